//! `-d DIR`: the raw histogram of each run, a gnuplot script for it, and a plot.
//!
//! `DIR/<tool>.<run>.data` has one line per recorded bucket: NSECS (its lower bound), WIDTH (ns), one count per
//! thread and TOTAL. The original needed gnuplot to be installed; here the plot `.svg` is drawn by the program and
//! the script `.gnuplot` is for those who want another.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::error::LoadError;
use crate::record::run::RunRecord;
use crate::report::svg;

/// Writes the three files of one run.
pub(crate) fn write_run(dir: &Path, tool: &str, run: &RunRecord<()>) -> Result<(), LoadError> {
    std::fs::create_dir_all(dir).map_err(|source| LoadError::CreateFile { path: dir.to_path_buf(), source })?;
    let stem = format!("{tool}.{}", run.number);
    create(&dir.join(format!("{stem}.data")), |out| write_data(out, run))?;
    create(&dir.join(format!("{stem}.gnuplot")), |out| {
        let p999_us = run.latencies.at_percent(99.9) as f64 / 1e3;
        write_script(out, &stem, p999_us)
    })?;
    let title = format!("{tool}, run {}", run.number);
    svg::write_file(&dir.join(format!("{stem}.svg")), &title, &run.latencies)
}

/// Creates a file, lets `fill` write it, and names the file if anything fails.
pub(crate) fn create(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<(), LoadError> {
    let write = || {
        let mut out = BufWriter::new(File::create(path)?);
        fill(&mut out)?;
        out.flush()
    };
    write().map_err(|source| LoadError::CreateFile { path: path.to_path_buf(), source })
}

fn write_data(out: &mut impl Write, run: &RunRecord<()>) -> io::Result<()> {
    write!(out, "# {:>10} {:>10}", "NSECS", "WIDTH")?;
    for thread in 0..run.threads.len() {
        write!(out, " {:>10}", format!("JOB{thread}"))?;
    }
    writeln!(out, " {:>10}", "TOTAL")?;
    let merged = &run.latencies.histogram;
    for step in merged.iter_recorded() {
        let value = step.value_iterated_to();
        let floor = merged.lowest_equivalent(value);
        write!(out, "{floor:12} {:10}", merged.equivalent_range(value))?;
        for thread in &run.threads {
            write!(out, " {:10}", thread.record.latencies[0].histogram.count_at(value))?;
        }
        writeln!(out, " {:10}", step.count_at_value())?;
    }
    Ok(())
}

fn write_script(out: &mut impl Write, stem: &str, p999_us: f64) -> io::Result<()> {
    writeln!(out, "# gnuplot {stem}.gnuplot")?;
    writeln!(out, "set terminal pngcairo size 1280,768")?;
    writeln!(out, "set output '{stem}.png'")?;
    writeln!(out, "set title '{stem}: latency'")?;
    writeln!(out, "set xlabel 'latency (us)'")?;
    writeln!(out, "set ylabel 'replies per ns of bucket width'")?;
    writeln!(out, "set grid")?;
    // Up to the 99.9th percentile, as the original clips it.
    writeln!(out, "set xrange [0:{:.3}]", p999_us.max(0.001))?;
    writeln!(
        out,
        "stats '{stem}.data' using 1 nooutput\nplot '{stem}.data' using ($1/1000):(column(STATS_columns)/$2) with impulses title 'all threads'"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::run::tests::{run, thread};

    #[test]
    fn the_data_has_a_column_per_thread_and_loses_no_bucket() {
        let run = run(7, vec![thread(0, 10, &[100, 100, 5_000_000]), thread(0, 10, &[100, 900])]);
        let mut out = Vec::new();
        write_data(&mut out, &run).unwrap();
        let text = String::from_utf8(out).unwrap();
        let mut lines = text.lines();
        assert_eq!(
            lines.next().unwrap().split_whitespace().collect::<Vec<_>>(),
            ["#", "NSECS", "WIDTH", "JOB0", "JOB1", "TOTAL"]
        );
        let rows: Vec<Vec<u64>> =
            lines.map(|line| line.split_whitespace().map(|cell| cell.parse().unwrap()).collect()).collect();
        assert_eq!(rows[0], [100, 1, 2, 1, 3]);
        assert_eq!(rows[1], [900, 1, 0, 1, 1]);
        assert_eq!(rows[2][2..], [1, 0, 1]);
        assert!(rows[2][0] <= 5_000_000 && rows[2][0] + rows[2][1] > 5_000_000);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let run = run(1, vec![thread(0, 1, &[1])]);
        let error = write_run(Path::new("/proc/none"), "rpctest", &run).unwrap_err();
        assert_eq!(error.exit_code(), 73);
        assert!(error.to_string().contains("/proc/none"), "{error}");
    }
}
