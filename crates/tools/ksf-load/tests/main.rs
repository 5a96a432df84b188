//! The tests of this crate, in one executable: each file is a module.

mod bad_server;
mod common;
mod good_server;
mod http;
mod http_nginx;
mod kv;
mod kv_redis;
mod output;
mod spin;
mod worktest;
