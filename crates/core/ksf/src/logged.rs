//! Services that promise durability: every reply says what it depends on, and the compiler sees to it.
//!
//! ```text
//!   type Mode = Unlogged   Reply ─► bytes, message, pieces ...; Deferred ─► reply ...
//!   type Mode = Logged     Reply<Logged> ─► after(gate) ─► Reply<Named> ─► bytes, message, pieces ...
//!                          Deferred<Logged> ─► resume ─► Reply<Logged>
//! ```
//!
//! A [`Reply`](crate::Reply) of mode [`Logged`] has no method that sends bytes before [`after`](crate::Reply::after) was called, and
//! a message that was deferred can only be resumed, which leads to such a reply again. So no reply passes the gate by an
//! oversight.
//!
//! ```
//! # use ksf::{Reply, logged::{After, Logged}};
//! fn greet(reply: &mut Reply<'_, Logged>) {
//!     reply.after(After::Nothing).bytes(b"hello");
//! }
//! ```
//!
//! ```compile_fail,E0599
//! # use ksf::{Reply, logged::{After, Logged}};
//! fn greet(reply: &mut Reply<'_, Logged>) {
//!     reply.bytes(b"hello");
//! }
//! ```
//!
//! ```compile_fail,E0599
//! # use ksf::{Reply, logged::{After, Logged}};
//! fn later(reply: &mut Reply<'_, Logged>) {
//!     reply.after(After::Nothing).defer_for(5).reply(b"hello".to_vec());
//! }
//! ```

use std::fmt::Debug;

use crate::gates::Gate;

/// What must be durable before a reply may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// Nothing: the reply tells of no data (a greeting, a refusal, a counter).
    Nothing,
    /// Everything in a log up to a number: of a write, its own record; of a read, the record that wrote what it saw.
    Gate(Gate),
}

impl From<Gate> for After {
    fn from(gate: Gate) -> Self {
        Self::Gate(gate)
    }
}

/// Whether the replies of a service wait for logs: [`Unlogged`] or [`Logged`].
pub trait Mode: sealed::Sealed + Debug + Send + Sync + 'static {
    /// The mode of an answer that comes later: what was named by then may not be all that it tells of.
    type Later: Mode;
}

/// A mode in which replies may be written: [`Unlogged`], or [`Named`] where the log was named.
pub trait Sends: Mode {}

/// Replies depend on no log, unless one says so by [`Reply::gate`](crate::Reply::gate).
#[derive(Clone, Copy, Debug)]
pub enum Unlogged {}

/// Each reply names what it waits for.
#[derive(Clone, Copy, Debug)]
pub enum Logged {}

/// A reply of a [`Logged`] service, after it named what it waits for.
#[derive(Clone, Copy, Debug)]
pub enum Named {}

impl Mode for Unlogged {
    type Later = Self;
}

impl Mode for Logged {
    type Later = Self;
}

impl Mode for Named {
    type Later = Logged;
}

impl Sends for Unlogged {}
impl Sends for Named {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Unlogged {}
    impl Sealed for super::Logged {}
    impl Sealed for super::Named {}
}
