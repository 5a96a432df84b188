//! The tests of this crate, in one executable: each file is a module.

mod backup;
mod clients;
mod cluster;
mod common;
mod connections;
mod conversation;
mod errors;
mod fractions;
mod full;
mod http;
mod keys;
mod larger;
mod load;
mod long_keys;
mod malformed;
mod memory;
mod mixed;
mod pmem;
mod registry_clients;
mod replies;
mod server;
mod strangers;
mod watching;
