//! A laboratory of virtual machines for tests that need another kernel than the one they run on.
//!
//! A [`Lab`] describes a machine: a program with its arguments and files, kernel modules, devices, forwarded ports.
//! [`Lab::run`] boots Debian's own kernel under QEMU with an initramfs made on the fly, runs the program and returns
//! its exit status, its output and the kernel's log; [`Lab::spawn`] leaves the machine running, for tests that talk to
//! it. Everything that runs comes from Debian packages: the kernel's package is downloaded and unpacked, never
//! installed. QEMU emulates the processor (TCG), so neither root nor /dev/kvm is needed; a boot takes about 2 seconds.
//!
//! ```no_run
//! # fn main() -> Result<(), ksf_lab::Error> {
//! let outcome = ksf_lab::Lab::new("lab/kcm/contract.c").module("kcm").run()?;
//! assert!(outcome.success(), "{}", outcome.output);
//! # Ok(())
//! # }
//! ```
//!
//! ```text
//!  Lab ── plan, program, modules, files ──► initramfs (memory only) ──► QEMU ◄── Debian's kernel, unpacked once
//!                                                                        │
//!  RunOutcome ◄── evaluate ◄── supervisor ◄── three serial ports: console, the program's output, init's report
//! ```

mod error;
mod evaluate;
mod initramfs;
mod kernel;
mod lab;
mod modules;
mod program;
mod testing;
mod tools;
mod vm;

pub use error::Error;
pub use evaluate::{RunOutcome, RunStatus};
pub use kernel::Kernel;
pub use lab::Lab;
pub use modules::Modules;
pub use testing::{LabTurn, available, turn};
pub use vm::Vm;
