//! What the engine `uring` is made of, each part tried on a ring of its own.

use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use io_uring::types::{BufRingEntry, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use super::machine::Machine;
use super::verdict::{Probe, Verdict};

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
        title: "a ring of receive buffers shared with the kernel",
        fallback: EPOLL,
        run: buffer_ring,
    },
    Probe {
        name: "uring_multishot_accept",
        title: "one accept request for all connections",
        fallback: EPOLL,
        run: multishot_accept,
    },
    Probe {
        name: "uring_multishot_recv",
        title: "one receive request per connection, into the buffer ring",
        fallback: EPOLL,
        run: multishot_recv,
    },
    Probe {
        name: "uring_min_wait",
        title: "wait for a batch, but only for a bounded time",
        fallback: "the shard takes what is there and forms smaller batches",
        run: min_wait,
    },
];

/// How long a probe waits for a completion before it calls the feature silent.
const WAIT: Timespec = Timespec::new().sec(1);
const BUFFERS: u16 = 4;
const BUFFER_BYTES: usize = 256;
const GROUP: u16 = 1;

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
    match ring().and_then(BufferedRing::new) {
        Ok(_) => Verdict::works("a ring of four buffers was registered (kernel 5.19)"),
        Err(error) => machine.uring_fails(&error),
    }
}

fn multishot_accept(machine: &Machine) -> Verdict {
    let (mut ring, listener) = match ring().and_then(|ring| Ok((ring, loopback()?))) {
        Ok(pair) => pair,
        Err(error) => return machine.uring_fails(&error),
    };
    let accept = opcode::AcceptMulti::new(Fd(listener.as_raw_fd())).build();
    let mut clients = Vec::new();
    for expected_more in [true, true] {
        let entry = clients.is_empty().then(|| accept.clone());
        match listener.local_addr().and_then(TcpStream::connect) {
            Ok(client) => clients.push(client),
            Err(error) => return Verdict::unknown(format!("cannot connect on loopback: {error}")),
        }
        match complete(&mut ring, entry) {
            Ok(done) if done.result() < 0 => {
                return machine.uring_fails(&io::Error::from_raw_os_error(-done.result()));
            }
            Ok(done) => {
                close(done.result());
                if cqueue::more(done.flags()) != expected_more {
                    return Verdict::fails("the accept request ended after one connection", "boot Linux 5.19 or later");
                }
            }
            Err(verdict) => return verdict.into_verdict(machine),
        }
    }
    Verdict::works("two connections by one request (kernel 5.19)")
}

fn multishot_recv(machine: &Machine) -> Verdict {
    let prepared = ring().and_then(|ring| {
        let buffered = BufferedRing::new(ring)?;
        let listener = loopback()?;
        let client = TcpStream::connect(listener.local_addr()?)?;
        let (server, _) = listener.accept()?;
        Ok((buffered, client, server))
    });
    let (mut buffered, mut client, server) = match prepared {
        Ok(parts) => parts,
        Err(error) => return machine.uring_fails(&error),
    };
    let mut request = Some(opcode::RecvMulti::new(Fd(server.as_raw_fd()), GROUP).build());
    for message in [&b"first"[..], b"second"] {
        if let Err(error) = client.write_all(message) {
            return Verdict::unknown(format!("cannot send on loopback: {error}"));
        }
        let done = match complete(&mut buffered.ring, request.take()) {
            Ok(done) if done.result() < 0 => {
                return machine.uring_fails(&io::Error::from_raw_os_error(-done.result()));
            }
            Ok(done) => done,
            Err(verdict) => return verdict.into_verdict(machine),
        };
        let received = cqueue::buffer_select(done.flags())
            .map(|id| buffered.bytes(id, usize::try_from(done.result()).unwrap_or(0)));
        if received != Some(message) {
            return Verdict::fails("the bytes did not arrive in the selected buffer", "boot Linux 6.0 or later");
        }
        if !cqueue::more(done.flags()) {
            return Verdict::fails("the receive request ended after one message", "boot Linux 6.0 or later");
        }
    }
    Verdict::works("two messages by one request, each in a buffer of the ring (kernel 6.0)")
}

fn min_wait(machine: &Machine) -> Verdict {
    let mut ring = match ring() {
        Ok(ring) => ring,
        Err(error) => return machine.uring_fails(&error),
    };
    if !ring.params().is_feature_min_timeout() {
        return Verdict::fails(format!("kernel {} has no minimum wait", machine.kernel), "boot Linux 6.12 or later");
    }
    // One completion is there, two are wanted: the minimum wait must end the call.
    let nop = opcode::Nop::new().build();
    // SAFETY: a no-op refers to no memory.
    if unsafe { ring.submission().push(&nop) }.is_err() {
        return Verdict::unknown("the submission queue of a new ring is full");
    }
    let args = SubmitArgs::new().timespec(&WAIT).min_wait_usec(50);
    match ring.submitter().submit_with_args(2, &args) {
        Ok(_) if ring.completion().count() == 1 => {
            Verdict::works("the wait ended with one of two completions (kernel 6.12)")
        }
        Ok(_) => Verdict::unknown("the wait ended without the completion of a no-op"),
        Err(error) if error.raw_os_error() == Some(libc::ETIME) => {
            Verdict::fails("the minimum wait is ignored", "boot Linux 6.12 or later")
        }
        Err(error) => machine.uring_fails(&error),
    }
}

/// Why no completion came.
enum Silence {
    Refused(io::Error),
    TimedOut,
}

impl Silence {
    fn into_verdict(self, machine: &Machine) -> Verdict {
        match self {
            Silence::Refused(error) => machine.uring_fails(&error),
            Silence::TimedOut => Verdict::unknown("no completion within one second"),
        }
    }
}

/// Submits `entry`, if any, and waits for one completion.
fn complete(ring: &mut IoUring, entry: Option<squeue::Entry>) -> Result<cqueue::Entry, Silence> {
    if let Some(entry) = entry {
        // SAFETY: the callers' entries refer to descriptors and to a registered buffer group
        // that outlive the ring's use; they carry no address of their own.
        unsafe { ring.submission().push(&entry) }
            .map_err(|_| Silence::Refused(io::Error::from_raw_os_error(libc::EBUSY)))?;
    }
    let args = SubmitArgs::new().timespec(&WAIT);
    match ring.submitter().submit_with_args(1, &args) {
        Ok(_) => {}
        Err(error) if error.raw_os_error() == Some(libc::ETIME) => return Err(Silence::TimedOut),
        Err(error) => return Err(Silence::Refused(error)),
    }
    ring.completion().next().ok_or(Silence::TimedOut)
}

fn loopback() -> io::Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
}

/// Closes a descriptor that a completion handed over.
fn close(fd: i32) {
    use std::os::fd::{FromRawFd, OwnedFd};
    // SAFETY: `fd` is the non-negative result of an accept completion; nobody else owns it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
}

/// An io_uring with a buffer ring. Ring entries and buffers share one anonymous mapping: the
/// entries need page alignment.
struct BufferedRing {
    ring: IoUring,
    memory: *mut u8,
}

impl BufferedRing {
    const ENTRIES_BYTES: usize = 4096;
    const BYTES: usize = Self::ENTRIES_BYTES + BUFFERS as usize * BUFFER_BYTES;

    /// Registers the buffers as group [`GROUP`] and offers all of them.
    fn new(ring: IoUring) -> io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        // SAFETY: a fresh private mapping at an address the kernel chooses aliases nothing.
        let memory = unsafe {
            mmap_anonymous(std::ptr::null_mut(), Self::BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        let buffered = BufferedRing { ring, memory: memory.cast() };
        let entries = buffered.memory.cast::<BufRingEntry>();
        for id in 0..BUFFERS {
            // SAFETY: `id` is below the number of entries, the mapping is writable and zeroed
            // (every bit pattern is a valid entry), and the kernel does not know it yet.
            let entry = unsafe { &mut *entries.add(usize::from(id)) };
            entry.set_addr(buffered.buffer(id).expose_provenance() as u64);
            entry.set_len(BUFFER_BYTES as u32);
            entry.set_bid(id);
        }
        // SAFETY: the mapping is page aligned, longer than the entries, and unmapped only in
        // `drop`, after the group was unregistered.
        unsafe {
            buffered.ring.submitter().register_buf_ring_with_flags(
                entries.expose_provenance() as u64,
                BUFFERS,
                GROUP,
                0,
            )
        }?;
        // SAFETY: the tail lies in the first entry of the mapped ring and is aligned for u16;
        // the kernel reads it with acquire, so the store that offers the entries is a release.
        unsafe {
            let tail = BufRingEntry::tail(entries).cast_mut();
            std::sync::atomic::AtomicU16::from_ptr(tail).store(BUFFERS, std::sync::atomic::Ordering::Release);
        }
        Ok(buffered)
    }

    fn buffer(&self, id: u16) -> *mut u8 {
        self.memory.wrapping_add(Self::ENTRIES_BYTES + usize::from(id % BUFFERS) * BUFFER_BYTES)
    }

    /// The first `length_bytes` of buffer `id`, which a completion has handed over.
    fn bytes(&self, id: u16, length_bytes: usize) -> &[u8] {
        let length_bytes = length_bytes.min(BUFFER_BYTES);
        // SAFETY: the buffer lies in the mapping and the kernel has given it back; it is never
        // offered again.
        unsafe { std::slice::from_raw_parts(self.buffer(id), length_bytes) }
    }
}

impl Drop for BufferedRing {
    fn drop(&mut self) {
        // A receive that is still armed must not find the buffers: closing the ring cancels it
        // only later. Without a group it ends with ENOBUFS. It fails if `new` did not register.
        let _ = self.ring.submitter().unregister_buf_ring(GROUP);
        // SAFETY: the mapping was made in `new` with this length; the kernel no longer knows it
        // and no reference to it lives.
        let _ = unsafe { rustix::mm::munmap(self.memory.cast(), Self::BYTES) };
    }
}
