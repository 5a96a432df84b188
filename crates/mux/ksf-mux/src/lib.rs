//! Message sockets over TCP: N workers, M connections, and messages as the unit of scheduling.
//!
//! See [`Mux`] for connections, [`MessageSocket`] for workers, [`Workers`] for services of the framework, [`scheduler`]
//! for which worker gets which message; docs/mux.md tells how it works.
//!
//! ```
//! use std::io::{Read, Write};
//! use ksf::framing::{Framing, LengthPrefix};
//! use ksf_mux::{Mux, MuxOptions};
//!
//! let mux = Mux::new(MuxOptions::new(Framing::LengthPrefix(LengthPrefix::big_endian(2))))?;
//! let worker = mux.socket()?;
//! let (mut client, server) = std::os::unix::net::UnixStream::pair()?;
//! mux.attach(server.into())?;
//!
//! client.write_all(b"\x00\x05hello")?;
//! let message = worker.recv()?;
//! message.reply(&message.bytes().to_ascii_uppercase())?;
//! let mut answer = [0; 7];
//! client.read_exact(&mut answer)?;
//! assert_eq!(&answer, b"\x00\x05HELLO");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Non-goals: datagrams, which are messages already, and moving work that has begun to another thread.

#![forbid(unsafe_code)]

mod batch;
mod budget;
mod combining_lock;
mod connection;
pub mod cost;
mod descriptor;
mod error;
mod input;
pub mod kcm;
mod lease;
mod lingering;
mod monitor;
mod mux;
mod options;
mod out_queue;
mod pollable;
mod reply_order;
pub mod scheduler;
mod service;
mod socket;
mod sync;
mod timer_thread;
mod wait_set;
#[cfg(debug_assertions)]
mod watched;

pub use descriptor::place_descriptors;
pub use error::{AttachError, ConnectionError, RecvError, SendError, StartError};
pub use monitor::Event;
pub use mux::{AttachedLocked, ConnectionId, Detached, Mux};
pub use options::{Classify, MessageFraming, MuxOptions};
pub use reply_order::{CALL_MESSAGES_MAX, ReplyOrder, Unanswered};
pub use service::{Workers, WorkersOptions};
pub use socket::{Message, MessageSocket, SendOptions};
pub use timer_thread::{MuxTimer, NextCheck, TimerWaker};
#[cfg(debug_assertions)]
pub use watched::check_locks;
