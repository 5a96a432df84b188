//! The tests of this crate, in one executable: each file is a module.

mod boot;
mod skips;
