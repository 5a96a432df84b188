//! What a measurement leaves behind: tables, the JSON document and the files; and where it is written.

pub mod document;
pub mod escape;
pub(crate) mod files;
pub(crate) mod hdr;
pub(crate) mod raw;
pub(crate) mod svg;
pub(crate) mod warn;

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::error::LoadError;

/// Where a tool writes, and how it learns that the user wants to stop.
pub struct Io<'a> {
    /// Results.
    pub out: &'a mut dyn Write,
    /// Talk: progress, faults, warnings.
    pub err: &'a mut dyn Write,
    /// Set to end the measurement early; what was measured is still reported.
    pub stop: &'a AtomicBool,
}

/// Runs with stdout, stderr and SIGINT/SIGTERM. A second signal ends the process at once.
pub(crate) fn with_process_io<T>(work: impl FnOnce(&mut Io<'_>) -> Result<T, LoadError>) -> Result<T, LoadError> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut handlers = Vec::new();
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let install = || -> io::Result<_> {
            // First the one that looks at the flag, then the one that sets it: so the first signal only sets it.
            let second = signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))?;
            Ok([second, signal_hook::flag::register(signal, Arc::clone(&stop))?])
        };
        handlers.extend(install().map_err(|error| LoadError::system("cannot catch signals", error))?);
    }
    let outcome = work(&mut Io { out: &mut io::stdout(), err: &mut io::stderr(), stop: &stop });
    for handler in handlers {
        signal_hook::low_level::unregister(handler);
    }
    outcome
}
