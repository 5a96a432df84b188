//! The detours that replies of another length than their request take: see `bpf/ksf_stream.h`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;

use crate::abi::SLOTS_PER_CPU;
use crate::sys::{self, Map};
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
///
/// A send into one can fail for good, for want of memory. A thread waits for that, which else does nothing.
#[derive(Debug)]
pub(crate) struct Hops {
    /// Closed to end the thread.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// What knows the hops.
#[derive(Debug)]
pub(crate) struct HopMaps {
    /// Where requests enter, by slot.
    pub(crate) near: Map,
    /// The far ends, which run the program.
    pub(crate) far: Map,
    /// Cookie of either end to its slot.
    pub(crate) slots: Map,
    /// The program that ends the connection of a hop that failed.
    pub(crate) failed: OwnedFd,
}

/// The two ends of a hop.
#[derive(Debug)]
struct Pair {
    near: OwnedFd,
    far: OwnedFd,
}

impl Hops {
    pub(crate) fn new(slots: u32, maps: HopMaps) -> io::Result<Self> {
        let mut pairs = (0..slots).map(|slot| maps.make(slot).map(Some)).collect::<io::Result<Vec<_>>>()?;
        let (told, stop) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let watch = move || {
            while let Ok(failed) = wait(&told, &pairs) {
                let Some(slot) = failed else { return };
                // Without new sockets the slot stays taken: replies of another length have one way less.
                let old = pairs[slot].take();
                pairs[slot] = old.and_then(|old| maps.renew(slot as u32, &old).ok());
                let _ = maps.end_connection(slot as u32, pairs[slot].is_some());
            }
        };
        let thread = ksf::threads::start("ksf-hops", watch)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Hops {
    fn drop(&mut self) {
        self.stop = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Sleeps until a near end has failed, and returns its slot; `None`: it is to end.
fn wait(told: &OwnedFd, pairs: &[Option<Pair>]) -> io::Result<Option<usize>> {
    let hops = || pairs.iter().enumerate().filter_map(|(slot, pair)| Some((slot, pair.as_ref()?)));
    // Errors are always reported.
    let nothing = PollFlags::empty();
    let mut fds: Vec<_> = hops().map(|(_, pair)| PollFd::new(&pair.near, nothing)).collect();
    fds.push(PollFd::new(told, nothing));
    loop {
        match poll(&mut fds, None) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        if fds.last().is_some_and(|told| !told.revents().is_empty()) {
            return Ok(None);
        }
        if let Some(at) = fds.iter().position(|fd| !fd.revents().is_empty()) {
            return Ok(hops().nth(at).map(|(slot, _)| slot));
        }
    }
}

impl HopMaps {
    /// Makes the sockets of a slot, and tells the programs of them.
    fn make(&self, slot: u32) -> io::Result<Pair> {
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
        self.slots.update(&tcp::cookie(near.as_fd())?.to_ne_bytes(), &slot)?;
        self.slots.update(&tcp::cookie(far.as_fd())?.to_ne_bytes(), &slot)?;
        // The far end first: a request never finds a hop without a program.
        self.far.update(&slot, &(far.as_raw_fd() as u32).to_ne_bytes())?;
        self.near.update(&slot, &(near.as_raw_fd() as u32).to_ne_bytes())?;
        Ok(Pair { near, far })
    }

    /// Puts new sockets in the place of those of a slot. The slot is taken, so nothing is sent meanwhile.
    fn renew(&self, slot: u32, old: &Pair) -> io::Result<Pair> {
        for end in [&old.near, &old.far] {
            self.slots.delete(&tcp::cookie(end.as_fd())?.to_ne_bytes())?;
        }
        self.make(slot)
    }

    /// Ends the connection whose reply was lost in the hop, and gives the slot free if it is `renewed`.
    fn end_connection(&self, slot: u32, renewed: bool) -> io::Result<()> {
        let args = [slot, u32::from(renewed)].map(u32::to_ne_bytes).concat();
        sys::run(self.failed.as_fd(), &args).map(drop)
    }
}
