//! The kernel's own message sockets, AF_KCM, where a kernel has them: a safe wrapper ([`RawKcmSocket`]), their framing
//! programs ([`load`]), and a probe ([`probe`]).
//!
//! `ksf-mux` has the contract of AF_KCM in user space, on every kernel, without its faults (docs/kcm.md). This crate
//! tells `ksf doctor` and `ksf kcm-run --mux=kcm` whether the kernel's sockets work.

mod error;
mod probe;
mod program;
mod socket;
mod sys;

pub use error::{Absence, KcmError};
pub use probe::{Works, probe};
pub use program::{load, program};
pub use socket::{RawKcmSocket, Received};
