//! The tests of this crate, in one executable: each file is a module.

mod http1;
mod p9;
mod properties;
mod second_reader;
