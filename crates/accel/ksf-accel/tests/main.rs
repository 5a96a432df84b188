//! The tests of this crate, in one executable: each file is a module.

mod attach;
mod common;
mod copies;
mod flow;
mod hostile;
mod ladder;
mod program;
mod steering;
