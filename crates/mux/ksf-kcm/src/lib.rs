//! The kernel's own message sockets, AF_KCM, where a kernel has them: a safe wrapper ([`RawKcmSocket`]), a probe, and the
//! calls of `ksf-mux` on them ([`KernelMux`], or [`AnyMux`] where a program chooses).
//!
//! `ksf-mux` does the same in user space, on every kernel, without the faults of AF_KCM (docs/kcm.md).
//! This crate is for comparison, and for machines where AF_KCM is what is wanted.

mod choice;
mod cut;
mod error;
mod intake;
mod mux;
mod probe;
mod program;
mod socket;
mod sys;
mod tcp;

pub use choice::{AnyMessage, AnyMux, AnySocket, Backend};
pub use error::{Absence, KcmError};
pub use mux::{KernelMessage, KernelMux, KernelSocket};
pub use probe::{Works, probe};
pub use program::{load, program};
pub use socket::{RawKcmSocket, Received};
