//! The tables of the originals, column for column.
//!
//! rpctest, one line per run (widths in brackets, one blank between):
//!
//! | column | meaning |
//! |---|---|
//! | Date (10) | start of the run, seconds since the epoch |
//! | TD (3), INF (4) | threads; in flight per thread (0: synchronous loop) |
//! | MedRPC (8) | median over the runs so far of a run's correct replies per second, all threads together; `-m`: AvgRPC, their mean |
//! | MedLat (6) | median over the runs so far of a run's median latency, us; `-m`: AvgLat, mean of the runs' mean latencies |
//! | Mbps (7) | bits sent and received in this run, record marks included, 10^6 per second |
//! | MinLat (7), quantiles (7 each), MaxLat (8) | latency of this run, us |
//! | `-x`: TotalRPC (9) | correct replies in this run |
//! | `-x`: MinTime, MedTime, MaxTime (8) | the threads' elapsed times, s |
//! | `-x`: MinRPC, MedRPC, MaxRPC (8) | slowest, median and fastest run so far, correct replies per second |
//!
//! echotest: totmsgs (10), totusecs (10, wall time), msgs/sec (10), avglat (7, us), Mbps (7, payload one way),
//! cpu/msg (7, us of this program's threads); none is cumulative. `-x` adds min, quantiles and max in us.
//! With `--batch` a column Batch (5), with `--rate` the columns Target/s (9) and Bound (7, how often
//! the bound on the number in flight held a message back), with `--spin` the column Spun% (6, waits that ended while the
//! thread polled, so that it did not sleep) follow in either table.

use crate::calls::args::CallPlan;
use crate::drive::plan::Pace;
use crate::drive::spin::ClientSpin;
use crate::record::run::RunRecord;
use crate::record::running::{Running, median_of_sorted, per};

/// Which table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    Rpctest,
    Echotest,
}

/// The figures so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    rate_per_s: Running,
    median_us: Running,
    mean_us: Running,
}

impl History {
    pub(crate) fn add(&mut self, run: &RunRecord<()>) {
        self.rate_per_s.add(run.rate_per_s());
        self.median_us.add(us(run.latencies.at_percent(50.0)));
        self.mean_us.add(run.latencies.mean_ns() / 1e3);
    }

    pub(crate) fn runs(&self) -> u64 {
        self.rate_per_s.len() as u64
    }

    pub(crate) fn rate_per_s(&self) -> &Running {
        &self.rate_per_s
    }

    pub(crate) fn median_us(&self) -> &Running {
        &self.median_us
    }
}

/// The header line, without the line end.
pub(crate) fn header(style: Style, plan: &CallPlan) -> String {
    let mut cells = Vec::new();
    match style {
        Style::Rpctest => {
            cells.extend([right("Date", 10), right("TD", 3), right("INF", 4)]);
            cells.extend(match plan.args.average {
                true => [right("AvgRPC", 8), right("AvgLat", 6)],
                false => [right("MedRPC", 8), right("MedLat", 6)],
            });
            cells.extend([right("Mbps", 7), right("MinLat", 7)]);
            cells.extend(plan.quantiles.iter().map(|percent| quantile_head(*percent)));
            cells.push(right("MaxLat", 8));
            if plan.args.extended {
                cells.push(right("TotalRPC", 9));
                for name in ["MinTime", "MedTime", "MaxTime", "MinRPC", "MedRPC", "MaxRPC"] {
                    cells.push(right(name, 8));
                }
            }
        }
        Style::Echotest => {
            for name in ["totmsgs", "totusecs", "msgs/sec"] {
                cells.push(right(name, 10));
            }
            for name in ["avglat", "Mbps", "cpu/msg"] {
                cells.push(right(name, 7));
            }
            if plan.args.extended {
                cells.push(right("minlat", 7));
                cells.extend(plan.quantiles.iter().map(|percent| quantile_head(*percent)));
                cells.push(right("maxlat", 8));
            }
        }
    }
    if plan.drive.batch > 1 {
        cells.push(right("Batch", 5));
    }
    if let Pace::Open { .. } = plan.drive.pace {
        cells.extend([right("Target/s", 9), right("Bound", 7)]);
    }
    if plan.drive.spin != ClientSpin::Off {
        cells.push(right("Spun%", 6));
    }
    cells.join(" ")
}

/// The line of one run. `history` already contains it.
pub(crate) fn row(style: Style, plan: &CallPlan, run: &RunRecord<()>, history: &History) -> String {
    let mut cells = Vec::new();
    let latency = |percent: f64| fit(us(run.latencies.at_percent(percent)), 7);
    match style {
        Style::Rpctest => {
            let (rate, middle) = match plan.args.average {
                true => (history.rate_per_s.mean(), history.mean_us.mean()),
                false => (history.rate_per_s.median(), history.median_us.median()),
            };
            cells.extend([
                format!("{:10.0}", run.started_unix_s.floor()),
                format!("{:3}", plan.drive.threads),
                format!("{:4}", plan.args.in_flight.unwrap_or_default()),
                format!("{rate:8.0}"),
                fit(middle, 6),
                fit(run.mbps(), 7),
                fit(us(run.latencies.min()), 7),
            ]);
            cells.extend(plan.quantiles.iter().map(|percent| latency(*percent)));
            cells.push(fit(us(run.latencies.max_ns), 8));
            if plan.args.extended {
                cells.push(format!("{:9}", run.record.answered));
                let times = run.thread_s();
                let first = times.first().copied().unwrap_or(0.0);
                let last = times.last().copied().unwrap_or(0.0);
                for seconds in [first, median_of_sorted(&times), last] {
                    cells.push(format!("{seconds:8.3}"));
                }
                let rates = &history.rate_per_s;
                for rate in [rates.min(), rates.median(), rates.max()] {
                    cells.push(format!("{rate:8.0}"));
                }
            }
        }
        Style::Echotest => {
            let payload_mbps = per(run.record.sent_bytes as f64 * 8.0 / 1e6, run.wall_s());
            cells.extend([
                format!("{:10}", run.record.answered),
                format!("{:10.0}", run.wall_s() * 1e6),
                format!("{:10.0}", run.rate_per_s()),
                format!("{:7.1}", run.latencies.mean_ns() / 1e3),
                format!("{payload_mbps:7.2}"),
                format!("{:7.2}", run.cpu_us_per_reply()),
            ]);
            if plan.args.extended {
                cells.push(fit(us(run.latencies.min()), 7));
                cells.extend(plan.quantiles.iter().map(|percent| latency(*percent)));
                cells.push(fit(us(run.latencies.max_ns), 8));
            }
        }
    }
    if plan.drive.batch > 1 {
        cells.push(format!("{:5}", plan.drive.batch));
    }
    if let Pace::Open { rate_per_s, .. } = plan.drive.pace {
        let bound_hits = run.lateness.as_ref().map_or(0, |lateness| lateness.bound_hits);
        cells.push(format!("{rate_per_s:9}"));
        cells.push(format!("{bound_hits:7}"));
    }
    if plan.drive.spin != ClientSpin::Off {
        let spin = run.spin();
        cells.push(format!("{:6.1}", 100.0 * per(spin.caught as f64, spin.waits as f64)));
    }
    cells.join(" ")
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

fn right(name: &str, width: usize) -> String {
    format!("{name:>width$}")
}

fn quantile_head(percent: f64) -> String {
    if percent.fract() == 0.0 { format!("{percent:7.0}") } else { format!("{percent:7.1}") }
}

/// A number with as many of two decimals as fit the width.
fn fit(value: f64, width: usize) -> String {
    (0..=2)
        .rev()
        .map(|decimals| format!("{value:width$.decimals$}"))
        .find(|text| text.len() <= width)
        .unwrap_or_else(|| format!("{value:.0}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::run::tests::{run, thread};

    fn plan(options: &str) -> CallPlan {
        crate::calls::args::tests::plan(&format!("localhost {options}")).unwrap()
    }

    fn summary(scale: u64) -> RunRecord<()> {
        let ns: Vec<u64> = (1..=1000).map(|i| i * 10 * scale).collect();
        run(1, vec![thread(0, 1_000_000 * scale, &ns)])
    }

    #[test]
    fn the_rpctest_table_is_the_originals() {
        let plan = plan("-a 128 -j 2");
        assert_eq!(
            header(Style::Rpctest, &plan),
            "      Date  TD  INF   MedRPC MedLat    Mbps  MinLat     0.3     4.6    31.7      50    68.3    95.4    99.7   MaxLat"
        );
        let mut history = History::default();
        let run = summary(1);
        history.add(&run);
        // 1000 replies of 72 bytes in a millisecond; latencies 0.01 to 10 us.
        assert_eq!(
            row(Style::Rpctest, &plan, &run, &history),
            "1700000000   2  128  1000000   5.00  576.00    0.01    0.03    0.46    3.17    5.00    6.83    9.54    9.97    10.00"
        );
    }

    #[test]
    fn every_row_is_as_wide_as_its_header() {
        for options in ["", "-x", "-m -x -q 1,50,99.99", "-x --rate 10k", "--spin auto", "-a 8 --batch 4", "-q ,"] {
            let plan = plan(options);
            for style in [Style::Rpctest, Style::Echotest] {
                for scale in [1, 100, 10_000] {
                    let mut history = History::default();
                    let run = summary(scale);
                    history.add(&run);
                    let (head, line) = (header(style, &plan), row(style, &plan, &run, &history));
                    assert_eq!(head.len(), line.len(), "{options}\n{head}\n{line}");
                    let columns = |text: &str| text.split_whitespace().count();
                    assert_eq!(columns(&head), columns(&line), "\n{head}\n{line}");
                }
            }
        }
    }

    #[test]
    fn the_echotest_table_is_the_originals() {
        let plan = plan("");
        assert_eq!(header(Style::Echotest, &plan), "   totmsgs   totusecs   msgs/sec  avglat    Mbps cpu/msg");
        let (run, history) = (summary(1), History::default());
        // The helper's thread sends 44 bytes a message and uses half of its millisecond.
        assert_eq!(
            row(Style::Echotest, &plan, &run, &history),
            "      1000       1000    1000000     5.0  352.00    0.50"
        );
    }

    #[test]
    fn medians_run_over_the_runs_and_averages_with_m() {
        let mut history = History::default();
        for scale in [1, 4, 2] {
            history.add(&summary(scale));
        }
        let cell = |options: &str, at: usize| {
            let line = row(Style::Rpctest, &plan(options), &summary(2), &history);
            line.split_whitespace().nth(at).unwrap().to_string()
        };
        assert_eq!(cell("", 3), "500000");
        assert_eq!(cell("", 4), "10.00");
        // (1,000,000 + 250,000 + 500,000) / 3 and (5.005 + 20.02 + 10.01) / 3.
        assert_eq!(cell("-m", 3), "583333");
        assert_eq!(cell("-m", 4), "11.68");
        assert_eq!(cell("-x", 19), "250000", "MinRPC is the slowest run");
        assert_eq!(cell("-x", 21), "1000000", "MaxRPC is the fastest run");
    }

    #[test]
    fn numbers_keep_the_decimals_that_fit() {
        assert_eq!(fit(2.7649, 6), "  2.76");
        assert_eq!(fit(1234.56, 6), "1234.6");
        assert_eq!(fit(12345.6, 6), " 12346");
        assert_eq!(fit(12345678.0, 6), "12345678");
    }
}
