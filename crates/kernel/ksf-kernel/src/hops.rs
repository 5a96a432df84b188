//! The detours that replies of another length than their request take: see `bpf/ksf_stream.h`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::abi::SLOTS_PER_CPU;
use crate::sys::Map;
use crate::tcp;

/// Room for one message and the kernel's overhead, twice: the work queue asks for half of it to be free.
const SNDBUF_BYTES: u32 = 256 * 1024;

/// Hops of each CPU: as many as it has work areas, fewer on large machines, where each takes two descriptors of the
/// process. Replies beyond them go to user space.
pub(crate) fn per_cpu(cpus: u32) -> u32 {
    match cpus {
        0..=16 => SLOTS_PER_CPU,
        17..=64 => 2,
        _ => 1,
    }
}

/// A pair of connected Unix datagram sockets per work area. They live as long as this.
#[derive(Debug)]
pub(crate) struct Hops {
    _sockets: Vec<(OwnedFd, OwnedFd)>,
}

/// The maps that know the hops.
pub(crate) struct HopMaps<'maps> {
    /// Where requests enter, by slot.
    pub(crate) near: &'maps Map,
    /// The far ends, which run the program.
    pub(crate) far: &'maps Map,
    /// Cookie of either end to its slot.
    pub(crate) slots: &'maps Map,
}

impl Hops {
    pub(crate) fn new(slots: u32, maps: &HopMaps<'_>) -> io::Result<Self> {
        let mut sockets = Vec::with_capacity(slots as usize);
        for slot in 0..slots {
            let (near, far) = rustix::net::socketpair(
                AddressFamily::UNIX,
                SocketType::DGRAM,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
                None,
            )?;
            tcp::set_sndbuf(near.as_fd(), SNDBUF_BYTES)?;
            let slot = slot.to_ne_bytes();
            // The program sees the cookie of the sender (Linux 6.18: unix_read_skb leaves skb->sk as it is) or of the
            // receiver (where the verdict code sets it): both mean this slot.
            maps.slots.update(&tcp::cookie(near.as_fd())?.to_ne_bytes(), &slot)?;
            maps.slots.update(&tcp::cookie(far.as_fd())?.to_ne_bytes(), &slot)?;
            // The far end first: a request never finds a hop without a program.
            maps.far.update(&slot, &(far.as_raw_fd() as u32).to_ne_bytes())?;
            maps.near.update(&slot, &(near.as_raw_fd() as u32).to_ne_bytes())?;
            sockets.push((near, far));
        }
        Ok(Self { _sockets: sockets })
    }
}
