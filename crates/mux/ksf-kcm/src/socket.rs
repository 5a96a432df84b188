//! A socket of the family AF_KCM.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendFlags, SocketFlags,
    SocketType, recvmsg, sendmsg, socket_with,
};

use crate::error::{Absence, KcmError};
use crate::sys;

/// A SOCK_SEQPACKET socket on a multiplexor of the kernel (Documentation/networking/kcm.rst).
///
/// The multiplexor lives as long as one of its sockets. The descriptor may be used by several threads, and put into
/// event loops: it is readable while a message waits for this socket, not for its clones.
///
/// A message that is sent goes to any connection of the multiplexor: AF_KCM promises none, and cannot answer where a
/// multiplexor has several.
#[derive(Debug)]
pub struct RawKcmSocket(OwnedFd);

/// What one receive brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes put into the buffer.
    pub bytes: usize,
    /// They end a message. If not, the buffer was too short, and the kernel has thrown the rest away (seen on 6.1,
    /// although documented otherwise).
    pub is_whole: bool,
}

impl RawKcmSocket {
    /// The first socket of a new multiplexor. Its calls do not block.
    ///
    /// The kernel loads its module by itself if it may. Fails with [`KcmError::Absent`] where there is none, with
    /// [`KcmError::NotPermitted`] where a seccomp profile or security module refuses.
    pub fn new() -> Result<Self, KcmError> {
        // A const of the family in the kernel's own numbering; rustix has no name for it on all targets.
        let family = AddressFamily::from_raw(sys::AF_KCM);
        // Protocol 0 is KCMPROTO_CONNECTED.
        match socket_with(family, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None) {
            Ok(socket) => Ok(Self(socket)),
            Err(Errno::AFNOSUPPORT) => Err(KcmError::Absent(Absence::look_up())),
            Err(error @ (Errno::PERM | Errno::ACCESS)) => Err(KcmError::NotPermitted { error: error.into() }),
            Err(error) => Err(KcmError::os("socket(AF_KCM)")(error)),
        }
    }

    /// A further socket on the same multiplexor (`SIOCKCMCLONE`). Its calls do not block.
    ///
    /// Under SELinux a clone has no label, and connections cannot be attached to it: attach them to the first.
    pub fn try_clone(&self) -> Result<Self, KcmError> {
        let clone = sys::clone(self.as_fd()).map_err(KcmError::os("SIOCKCMCLONE"))?;
        rustix::io::ioctl_fionbio(&clone, true).map_err(KcmError::os("FIONBIO"))?;
        Ok(Self(clone))
    }

    /// Gives the multiplexor a TCP connection, and the program that finds the ends of its messages (`SIOCKCMATTACH`).
    ///
    /// The kernel refuses what is not TCP or not connected (EOPNOTSUPP), and what is attached already or used by a
    /// sockmap or kTLS (EALREADY). Errors of the stream are reported on `tcp` alone, by POLLERR and SO_ERROR.
    pub fn attach(&self, tcp: impl AsFd, program: impl AsFd) -> Result<(), KcmError> {
        sys::attach(self.as_fd(), tcp.as_fd(), program.as_fd()).map_err(KcmError::os("SIOCKCMATTACH"))
    }

    /// Takes the connection back (`SIOCKCMUNATTACH`). The beginning of a message that the kernel had read is lost.
    pub fn unattach(&self, tcp: impl AsFd) -> Result<(), KcmError> {
        sys::unattach(self.as_fd(), tcp.as_fd()).map_err(KcmError::os("SIOCKCMUNATTACH"))
    }

    /// Stops or resumes receiving (`KCM_RECV_DISABLE`). Messages that wait here go to the multiplexor's other sockets.
    pub fn set_recv_disabled(&self, disabled: bool) -> Result<(), KcmError> {
        sys::set_recv_disabled(self.as_fd(), disabled).map_err(KcmError::os("KCM_RECV_DISABLE"))
    }

    /// Whether receiving is stopped.
    pub fn is_recv_disabled(&self) -> Result<bool, KcmError> {
        sys::is_recv_disabled(self.as_fd()).map_err(KcmError::os("KCM_RECV_DISABLE"))
    }

    /// Receives the next message, as on the wire; `None` if none waits. There is no way to learn its length first.
    pub fn recv(&self, buffer: &mut [u8]) -> Result<Option<Received>, KcmError> {
        loop {
            let mut control = RecvAncillaryBuffer::default();
            let mut slices = [IoSliceMut::new(buffer)];
            match recvmsg(&self.0, &mut slices, &mut control, RecvFlags::DONTWAIT) {
                Ok(message) => {
                    let is_whole = message.flags.contains(ReturnFlags::EOR);
                    return Ok(Some(Received { bytes: message.bytes, is_whole }));
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(KcmError::os("recvmsg on AF_KCM")(error)),
            }
        }
    }

    /// Sends a part of a message, or all of it; `end` says that it is complete with these bytes (`MSG_EOR`). Returns how
    /// many bytes were taken: fewer than given if there is no more room, none of them if there is no room at all. The
    /// message is complete only when all were taken.
    ///
    /// Success means that the kernel has queued it on this socket. Nothing of a message is sent before its end was
    /// given, so one longer than SO_SNDBUF of this socket cannot be sent.
    pub fn send(&self, slices: &[IoSlice<'_>], end: bool) -> Result<usize, KcmError> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let flags = if end { flags | SendFlags::EOR } else { flags };
        loop {
            match sendmsg(&self.0, slices, &mut SendAncillaryBuffer::default(), flags) {
                Ok(bytes) => return Ok(bytes),
                Err(Errno::AGAIN) => return Ok(0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(KcmError::os("sendmsg on AF_KCM")(error)),
            }
        }
    }
}

impl AsFd for RawKcmSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
