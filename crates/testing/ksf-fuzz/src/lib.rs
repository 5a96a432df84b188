//! What the fuzz targets check, as ordinary functions.
//!
//! Each target takes any bytes and panics if a promise is broken. `fuzz/` wraps
//! them for libFuzzer (`make fuzz`); the tests of this crate
//! replay the corpora, and mutants of them, on the stable one. So a finding that
//! was put into `fuzz/corpus/TARGET/` stays found.
//!
//! Promises are relations that need no second implementation: what is read
//! writes back to the same bytes, and the way a stream is cut does not matter.

#![forbid(unsafe_code)]

mod exported;
mod http1;
mod input;
mod nfs;
mod ninep;
mod p9;
mod programs;
mod rdb;
mod store;
mod stream;
mod wire;

pub use http1::{http1_message, http1_page, http1_proxy};
pub use nfs::{nfs_arguments, nfs_calls};
pub use ninep::ninep_requests;
pub use p9::p9;
pub use programs::{framing_object, framing_program};
pub use rdb::rdb;
pub use store::{resp, store_log, store_requests};
pub use stream::{connection, framing, rpc_stream};
pub use wire::{auth_sys, oncrpc_call, oncrpc_reply, rpcbind_results, xdr};

/// A target: its name, which is that of its corpus too, and what it checks.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [Target; 21] = [
    ("auth_sys", auth_sys),
    ("connection", connection),
    ("framing", framing),
    ("framing_object", framing_object),
    ("framing_program", framing_program),
    ("http1_message", http1_message),
    ("http1_page", http1_page),
    ("http1_proxy", http1_proxy),
    ("nfs_arguments", nfs_arguments),
    ("nfs_calls", nfs_calls),
    ("ninep_requests", ninep_requests),
    ("oncrpc_call", oncrpc_call),
    ("oncrpc_reply", oncrpc_reply),
    ("p9", p9),
    ("rdb", rdb),
    ("resp", resp),
    ("rpc_stream", rpc_stream),
    ("rpcbind_results", rpcbind_results),
    ("store_log", store_log),
    ("store_requests", store_requests),
    ("xdr", xdr),
];
