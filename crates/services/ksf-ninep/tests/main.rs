//! The tests of this crate, in one executable: each file is a module.

mod common;
mod messages;
mod session;
