//! Netlink: a socket, and messages as bytes (linux/netlink.h, linux/genetlink.h). One question is asked at a time, and the
//! kernel answers it before the call that asks returns.

mod message;

use std::cell::Cell;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with, sockopt,
};

use message::Progress;

pub use message::{Attributes, attribute, attribute_string, attribute_u32, attributes};
pub use rustix::net::netlink::{GENERIC, SOCK_DIAG};

/// The answer ends with an acknowledgement.
pub const NLM_F_ACK: u16 = 0x4;
/// All that there is.
pub const NLM_F_DUMP: u16 = 0x300;

/// Longer than any datagram of a dump, which the kernel bounds by the receive call's buffer, at most 32 KiB.
const DATAGRAM_BYTES: usize = 64 << 10;
/// Whatever happens, nobody is to wait for the kernel.
const PATIENCE: Duration = Duration::from_secs(1);

/// A socket in the network namespace of the thread that made it.
#[derive(Debug)]
pub struct NetlinkSocket {
    fd: OwnedFd,
    sequence: Cell<u32>,
}

impl NetlinkSocket {
    /// `None` is rtnetlink.
    ///
    /// # Errors
    ///
    /// What socket(2) answers: a seccomp profile, the limit of descriptors, a kernel without the protocol.
    pub fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(PATIENCE))?;
        Ok(Self { fd, sequence: Cell::new(0) })
    }

    /// Sends a request and collects the payloads of the answer. `fixed`: the header of the family's own, in front of the
    /// attributes. `flags` have [`NLM_F_ACK`] or [`NLM_F_DUMP`]: without either the answer has no end.
    ///
    /// # Errors
    ///
    /// What the kernel answered; EBADMSG for what is no netlink message; EINTR where what was dumped changed meanwhile, so
    /// that entries may be missing.
    pub fn ask(&self, kind: u16, flags: u16, fixed: &[u8], attributes: &Attributes) -> io::Result<Vec<Vec<u8>>> {
        let sequence = self.sequence.get().wrapping_add(1);
        self.sequence.set(sequence);
        let message = message::request(kind, flags, sequence, fixed, attributes);
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::io::retry_on_intr(|| sendto(&self.fd, &message, SendFlags::empty(), &kernel))?;
        let mut answers = Vec::new();
        let mut datagram = vec![0; DATAGRAM_BYTES];
        loop {
            let (length, whole) =
                rustix::io::retry_on_intr(|| recv(&self.fd, datagram.as_mut_slice(), RecvFlags::TRUNC))?;
            if whole > length {
                return Err(rustix::io::Errno::MSGSIZE.into());
            }
            if message::take_apart(&datagram[..length], sequence, &mut answers)? == Progress::Done {
                return Ok(answers);
            }
        }
    }
}
