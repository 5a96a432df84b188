//! What the parts of `ksf accel` share: the holder (which owns the queues), the preload library inside the
//! accelerated program, and the steering programs in the kernel.
//!
//! ```text
//!  accelerated program                      holder                              kernel
//!  preload library ── messages, descriptors ──► queues, wake-ups ── SOCKMAP ──►  sk_lookup program
//!        └────────────────── State (shared memory) ───────┴──────── map value ──────┘
//! ```
//!
//! * [`message`]: what is said over the holder's socket, rarely: at `listen()`, and when an epoll instance begins or
//!   ends to watch a listener.
//! * [`state`]: what is read and written all the time, without a system call: who is ready, who is busy since when.
//! * [`Layout`] and [`source_port`]: which source ports belong to which CPU, and how a socket gets one of them.
#![deny(unsafe_code)]

mod cpus;
mod layout;
pub mod message;
#[allow(unsafe_code, reason = "the only module that makes system calls, inside of any program")]
pub mod source_port;
pub mod state;

pub use cpus::{BadCpuList, CPUS_MAX, CpuMask};
pub use layout::{Layout, LayoutError, PortRange};
