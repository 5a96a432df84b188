//! The tests of this crate, in one executable: each file is a module.

mod common;
mod datagram;
mod ends;
mod frames;
mod hops;
mod host;
mod idle;
mod rig;
mod sdk;
mod selftest;
mod server;
mod strangers;
mod stream;
