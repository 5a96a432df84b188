//! The tests of this crate, in one executable: each file is a module.

mod common;
mod echo;
mod file_pieces;
mod file_program;
mod http_page;
mod http_proxy;
#[path = "../../../core/ksf-proto/tests/second_reader/node.rs"]
mod node;
mod proxy_sockets;
mod rpc_conformance;
mod rpcbind;
mod sockets;
