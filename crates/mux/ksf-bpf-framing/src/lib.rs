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

pub use builtin::BuiltinFraming;
pub use error::{Access, Fault, FramingLoadError, RunError};
#[cfg(feature = "kernel")]
pub use kernel::{KernelProgram, VerifyError};
pub use program::{FramingOptions, FramingProgram, FramingVerdict};

/// The header for authors of framing programs: name and text. It includes those of `ksf_bpf::SDK`.
pub const SDK: &[(&str, &str)] = &[("ksf_framing_program.h", include_str!("../bpf/ksf_framing_program.h"))];
