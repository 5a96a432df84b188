//! A seeded simulator for [`ksf::connection::Connection`], and the ideal server it is checked against.
//!
//! [`simulate`] runs one world: a few dozen connections over one [`Env`](ksf::env::Env), one after another in a handful
//! of places, each with a peer behind a simulated network that splits, delays and coalesces, that closes halfway or
//! resets, and that reads slowly or not at all. Some replies wait for a log, which gets further late, or stops, or is
//! lost; the service panics in messages, when it goes on with one, and at the end of a turn. Nothing in it asks a clock or
//! a thread: a seed is a complete description of a run, so a failure is reproduced by its number alone
//! (`KSF_SIM_SEED=17 cargo test -p ksf-sim`).
//!
//! ```text
//!   peer (script of requests) ──► network ──► Connection ──► service ──► deferred answers, in any order, any time
//!      ▲                                          │
//!      └───── network, send window ◄──────────────┘      every byte is compared with what the ideal server says
//! ```

#![forbid(unsafe_code)]

mod check;
mod far;
pub mod ideal;
mod plan;
mod remote;
pub mod script;
mod service;
mod world;

pub use world::{SimReport, simulate};
