//! The tests of this crate, in one executable: each file is a module.

mod accept;
mod common;
mod deaths;
mod descriptors;
mod listeners;
mod ports;
mod processes;
mod programs;
mod styles;
mod untouched;
mod workers;
