//! The files that any tool writes: `--hdr` and `--svg`.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;

use crate::drive::clock::unix_seconds;
use crate::error::LoadError;
use crate::options::OutputArgs;
use crate::record::Latencies;
use crate::report::hdr::{self, IntervalLog};
use crate::report::{raw, svg};

/// The files of one measurement.
pub(crate) struct Files {
    output: OutputArgs,
    title: String,
    interval_log: Option<IntervalLog<BufWriter<File>>>,
}

impl Files {
    /// Makes empty files, so that one that cannot be written is found before the measurement.
    pub(crate) fn create(output: &OutputArgs, title: String) -> Result<Files, LoadError> {
        let mut interval_log = None;
        for path in output.hdr.iter().chain(&output.svg) {
            let file = File::create(path).map_err(cannot_write(path))?;
            if Some(path) == output.hdr.as_ref() && !hdr::is_text(path) {
                let log = IntervalLog::new(BufWriter::new(file), &title, unix_seconds());
                interval_log = Some(log.map_err(cannot_write(path))?);
            }
        }
        Ok(Files { output: output.clone(), title, interval_log })
    }

    /// Adds a run to the interval log.
    pub(crate) fn add_run(&mut self, started_unix_s: f64, wall_s: f64, latencies: &Latencies) -> Result<(), LoadError> {
        match (&mut self.interval_log, &self.output.hdr) {
            (Some(log), Some(path)) => log.add(started_unix_s, wall_s, latencies).map_err(cannot_write(path)),
            _ => Ok(()),
        }
    }

    /// Writes what is about all runs together.
    pub(crate) fn finish(&self, latencies: &Latencies) -> Result<(), LoadError> {
        if let Some(path) = self.output.hdr.as_deref().filter(|path| hdr::is_text(path)) {
            raw::create(path, |out| hdr::write_text(out, latencies))?;
        }
        match &self.output.svg {
            Some(path) => svg::write_file(path, &self.title, latencies),
            None => Ok(()),
        }
    }
}

fn cannot_write(path: &Path) -> impl Fn(io::Error) -> LoadError + '_ {
    |source| LoadError::CreateFile { path: path.to_path_buf(), source }
}
