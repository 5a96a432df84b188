//! The tests of this crate, in one executable: each file is a module.

mod bad_input;
mod common;
mod kcm;
mod keeping;
mod long_replies;
mod mux;
mod pressure;
mod workers;
