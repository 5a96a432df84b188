//! The tests of this crate, in one executable: each file is a module.

mod coherence;
mod common;
mod failures;
mod large_folder;
mod local_user;
mod media;
mod model;
mod other_client;
mod procedures;
mod server;
