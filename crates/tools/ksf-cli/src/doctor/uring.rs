//! What the engine `uring` is made of.
//!
//! Accepting and receiving many times by one request is not tried: every kernel that defers completions (6.1) has both
//! (5.19 and 6.0), and neither can be built out of it.

use std::io;

use io_uring::IoUring;
use ksf::Error;
use ksf::engine::EngineKind;

use super::machine::Machine;
use super::verdict::{Lack, Probe, Verdict};

const EPOLL: &str = "engine epoll: the same shard loop on plain system calls";

/// The probes, in the order in which one builds on the other.
pub(crate) const PROBES: &[Probe] = &[
    Probe { name: "uring_setup", title: "create an io_uring", fallback: EPOLL, run: setup },
    Probe {
        name: "uring_defer_taskrun",
        title: "one issuer, completions run only when the shard waits",
        fallback: EPOLL,
        run: defer_taskrun,
    },
    Probe {
        name: "uring_buffer_ring",
        title: "the engine's ring, with receive buffers shared with the kernel",
        fallback: EPOLL,
        run: buffer_ring,
    },
    Probe {
        name: "uring_min_wait",
        title: "wait for a batch, but only for a bounded time",
        fallback: "the shard takes what is there and forms smaller batches",
        run: min_wait,
    },
];

fn ring() -> io::Result<IoUring> {
    IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(8)
}

fn setup(machine: &Machine) -> Verdict {
    match IoUring::new(8) {
        Ok(_) => Verdict::works("a ring of 8 entries was created"),
        Err(error) => machine.uring_fails(&error),
    }
}

fn defer_taskrun(machine: &Machine) -> Verdict {
    match ring() {
        Ok(_) => Verdict::works("SINGLE_ISSUER and DEFER_TASKRUN accepted (kernel 6.1)"),
        Err(error) => machine.uring_fails(&error),
    }
}

fn buffer_ring(machine: &Machine) -> Verdict {
    match EngineKind::Uring.probe() {
        Ok(()) => Verdict::works("the engine's ring and its receive buffers were set up (kernel 5.19)"),
        Err(Error::Engine { step, source, .. }) => {
            let lack = machine.why_uring(&source);
            Verdict::Fails(Lack { cause: format!("{step} failed: {}", lack.cause), ..lack })
        }
        Err(error) => Verdict::fails(error.to_string(), "please report this"),
    }
}

fn min_wait(machine: &Machine) -> Verdict {
    match ring() {
        Ok(ring) if ring.params().is_feature_min_timeout() => Verdict::works("IORING_FEAT_MIN_TIMEOUT (kernel 6.12)"),
        Ok(_) => Verdict::fails(format!("kernel {} has no minimum wait", machine.kernel), "boot Linux 6.12 or later"),
        Err(error) => machine.uring_fails(&error),
    }
}
