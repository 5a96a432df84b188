#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod alu;
mod builtin;
mod elf;
mod error;
mod instruction;
#[cfg(feature = "kernel")]
mod kernel;
mod machine;
mod memory;
mod program;

pub use builtin::Builtin;
pub use error::{Access, Fault, LoadError, RunError};
#[cfg(feature = "kernel")]
pub use kernel::{KernelProgram, VerifyError};
pub use program::{FramingProgram, Options, Verdict};

/// The header for authors of framing programs, `ksf_framing_program.h`.
pub const HEADER: &str = include_str!("../bpf/ksf_framing_program.h");
