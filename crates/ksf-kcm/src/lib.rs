//! The kernel's own message sockets, AF_KCM, where a kernel has them: a safe wrapper, a probe, and services on them.
//!
//! `ksf-mux` does the same in user space, on every kernel, without the faults of AF_KCM (docs/mux.md, "On AF_KCM").
//! This crate is for comparison, and for machines where AF_KCM is what is wanted.

mod error;
mod probe;
mod program;
mod socket;
mod sys;
mod workers;

pub use error::{Absence, KcmError};
pub use probe::{Works, probe};
pub use program::{load, program};
pub use socket::{KcmSocket, Received};
pub use workers::{KernelWorkers, KernelWorkersOptions};
