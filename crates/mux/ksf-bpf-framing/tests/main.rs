//! The tests of this crate, in one executable: each file is a module.

mod common;
mod differential;
mod kernel;
mod objects;
mod offset;
mod programs;
mod twins;
