//! The tests of this crate, in one executable: each file is a module.

mod common;
mod content;
mod exports;
mod identities;
mod listing;
mod model;
mod opened;
mod operations;
mod settled;
mod warm;
