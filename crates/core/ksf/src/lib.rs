//! Network services at kernel speed on stock Linux: the framework.
//!
//! A service is a [`Framing`](framing::Framing) and a function from message to replies ([`Service`]). A
//! [`Server`](server::Server) runs services on one [shard](server) per core: a thread with its listening sockets, its
//! receive slots ([`pool`]), its connections ([`connection`]) and an [engine](engine) that moves the bytes. A
//! [kernel half](assist) may answer messages before user space sees them.
//!
//! Non-goals: timers finer than the shard's tick, TLS, and any protocol; protocols live in the services.

// Some files belong to the tests inside of the crate and to those outside.
#[cfg(test)]
extern crate self as ksf;

pub mod adopt;
pub mod assist;
mod boxes;
pub mod budget;
pub mod buffers;
pub mod connection;
pub mod cpus;
pub mod cutter;
mod datagram_output;
pub mod deferred;
pub mod engine;
pub mod env;
pub mod error;
pub mod files;
pub mod framing;
pub mod gates;
pub mod give_back;
pub mod limits;
pub mod listener;
pub mod logged;
pub mod mapped;
pub mod outgoing;
pub mod output;
mod pace;
pub mod pool;
pub mod server;
pub mod service;
pub mod session;
mod shard;
mod shares;
pub mod spin;
pub mod stats;
pub mod status_socket;
pub mod tasks;
pub mod threads;
mod turn;

pub use error::{CloseReason, Error};
pub use logged::Unlogged;
pub use server::Server;
pub use service::{
    Message, Order, Peer, Pieces, Profile, Refused, Reply, ReplyEnd, Service, SessionState, WorkerService,
};
pub use turn::{Closer, Releaser, Turn, Waker};
