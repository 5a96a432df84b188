//! The seam to a kernel half, with halves that cannot be had from a kernel on demand.

mod common;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use common::net::*;
use ksf::Server;
use ksf::assist::{Assist, AssistConn};

/// Says that it queued a reply, which never reaches TCP: its way was lost inside the kernel.
struct Loses;

struct LosingConn;

impl Assist for Loses {
    fn attach(&self, _: BorrowedFd<'_>) -> Option<Box<dyn AssistConn>> {
        Some(Box::new(LosingConn))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

impl AssistConn for LosingConn {
    fn replied_bytes(&self) -> u64 {
        100
    }

    fn drained(&mut self, _: BorrowedFd<'_>, _: u64) -> bool {
        false
    }

    fn settle(&mut self, _: BorrowedFd<'_>, _: u64, _: u64) {}
}

/// A client must not wait for ever for a reply that cannot come.
#[test]
fn a_reply_lost_in_the_kernel_ends_its_connection() {
    for engine in engines() {
        let server =
            Server::builder().engine(engine).listen(ANY.parse().unwrap(), Arc::new(Echo), Some(Arc::new(Loses)));
        let server = server.start().unwrap();
        let mut peer = connect(&server);
        // The peer is silent: nothing but the clock can notice.
        expect_end(&mut peer);
        until_count(&server, "closed_kernel_half", 1);
    }
}
