//! A library for LD_PRELOAD that gives each worker of an unchanged program an accept queue of its own: `ksf accel run`.
//!
//! ```text
//!  program                 this library                                  holder (another process)
//!  listen(L)           ──► tells of it                               ──► makes queues: sockets like L
//!  epoll_ctl(ADD, L)   ──► asks for a queue, watches it beside L     ◄── queue, rescue eventfd
//!  epoll_wait          ──► notes "waits", "busy since"               ──► shared memory, read by the steering program
//!  accept(L)           ──► own queue, then L, then what needs rescue
//! ```
//!
//! A **worker** is an epoll instance that watches a listener, or a thread that blocks in `accept()`. Connections reach
//! its queue only while its ready bit is set; the program's own listener L stays where the program put it and takes
//! what no worker is ready for. Whatever fails here, the program goes on as it would without.
//!
//! Rules that all of this keeps:
//!
//! * Data calls (`read`, `send`, ...) are not touched. Of a call that is, a descriptor that is no listener costs a look
//!   into a table ([`table`]).
//! * No allocation, no lock that `fork()` could leave taken, no signal handler and no cancellation while it is held
//!   ([`process`]).
//! * `errno` is what the program's own call left.
//! * The kernel is the truth: an entry of the table is believed only where `SO_COOKIE` says the same.
//! * A child does nothing until it uses a listener. A `vfork()` child never does anything: its memory is its parent's.
//! * A question to the holder has a time limit ([`holder`]).
//!
//! Apart from all of this, and only where it is asked for, connections that the program opens get source ports of the CPU
//! that opens them ([`ports`]).
//!
//! Functions that the program may be cancelled in (`pthread_cancel`) have the ABI `C-unwind` and hold nothing that would
//! have to be released while they wait.

mod accept;
mod adopt;
mod descriptor;
mod environment;
pub mod exec;
mod holder;
pub mod hooks;
mod interrupt;
mod listener;
mod pin;
mod ports;
mod process;
mod real;
mod start;
mod table;
mod wait;
mod worker;
