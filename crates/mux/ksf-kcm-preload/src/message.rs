//! Receiving and sending on a message socket, and what is left to read of a connection that was unattached.

use std::ffi::{c_int, c_uint, c_void};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use ksf_mux::CALL_MESSAGES_MAX;
use ksf_mux::kcm::{Flags, KcmSocketError, Kind};
use libc::{iovec, mmsghdr, msghdr};

use crate::attached::Attached;
use crate::kcm::{Answer, Kcm, is_nonblocking};
use crate::signals::{self, Blocked, For};
use crate::table::lock;

/// A caller's buffers.
///
/// # Safety
///
/// `parts` leads to `count` of them, each valid for writes and used by no other code meanwhile.
unsafe fn buffers<'a>(parts: *const iovec, count: usize) -> Vec<IoSliceMut<'a>> {
    // SAFETY: there are so many.
    let parts = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(parts, count) } };
    let filled = parts.iter().filter(|part| part.iov_len > 0);
    // SAFETY: each is valid for writes, by the contract of this function.
    filled
        .map(|part| unsafe { IoSliceMut::new(std::slice::from_raw_parts_mut(part.iov_base.cast(), part.iov_len)) })
        .collect()
}

/// A caller's bytes.
///
/// # Safety
///
/// `parts` leads to `count` of them, each valid for reads.
unsafe fn slices<'a>(parts: *const iovec, count: usize) -> Vec<IoSlice<'a>> {
    // SAFETY: there are so many.
    let parts = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(parts, count) } };
    let filled = parts.iter().filter(|part| part.iov_len > 0);
    // SAFETY: each is valid for reads, by the contract of this function.
    filled.map(|part| unsafe { IoSlice::new(std::slice::from_raw_parts(part.iov_base.cast(), part.iov_len)) }).collect()
}

fn with_mode(fd: c_int, flags: c_int) -> Flags {
    let flags = Flags::from_bits(flags);
    if is_nonblocking(fd) { flags | Flags::DONTWAIT } else { flags }
}

/// The message socket of a call: its descriptor, and the signals that are blocked during the call.
#[derive(Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) fd: c_int,
    pub(crate) kcm: &'a Kcm,
    pub(crate) blocked: &'a Blocked,
}

/// Does a call, with or without waiting; a signal may end the wait. Handlers run only while it waits.
fn call<T>(
    on: Target<'_>,
    flags: c_int,
    what: For,
    mut work: impl FnMut(Flags) -> Result<T, KcmSocketError>,
) -> Answer<T> {
    let Target { fd, kcm, blocked } = on;
    let flags = with_mode(fd, flags);
    let at_once = flags | Flags::DONTWAIT;
    match work(at_once) {
        Err(KcmSocketError::WouldBlock) if !flags.contains(Flags::DONTWAIT) => {
            signals::wait(kcm, what, blocked, || work(at_once))
                .unwrap_or_else(|| blocked.open(|| work(flags)).map_err(|error| error.errno()))
        }
        result => result.map_err(|error| error.errno()),
    }
}

/// `recvmsg`.
///
/// # Safety
///
/// `header` is what recvmsg(2) demands.
pub(crate) unsafe fn receive(on: Target<'_>, header: *mut msghdr, flags: c_int) -> Answer<isize> {
    // SAFETY: handed on from the caller.
    unsafe { receive_at(0, on, header, flags) }
}

/// The same, as the `at`-th message of a call that receives several.
unsafe fn receive_at(at: usize, on: Target<'_>, header: *mut msghdr, flags: c_int) -> Answer<isize> {
    // SAFETY: the header leads to its buffers.
    let (header, mut parts) = unsafe {
        let header = header.as_mut().ok_or(libc::EFAULT)?;
        let parts = buffers(header.msg_iov, header.msg_iovlen);
        (header, parts)
    };
    let received = call(on, flags, For::Message, |flags| on.kcm.socket.recvmsg_at(at, &mut parts, flags))?;
    header.msg_flags = received.flags.bits();
    header.msg_namelen = 0;
    header.msg_controllen = 0;
    Ok(received.bytes as isize)
}

/// `recv`, `read` and the like.
///
/// # Safety
///
/// `parts` leads to `count` buffers that can be written.
pub(crate) unsafe fn receive_parts(on: Target<'_>, parts: *const iovec, count: usize, flags: c_int) -> Answer<isize> {
    // SAFETY: the buffers are as the contract says.
    let mut parts = unsafe { buffers(parts, count) };
    let received = call(on, flags, For::Message, |flags| on.kcm.socket.recvmsg(&mut parts, flags))?;
    Ok(received.bytes as isize)
}

/// `recvmmsg`.
///
/// # Safety
///
/// `headers` leads to `count` of what recvmmsg(2) demands.
pub(crate) unsafe fn receive_many(
    on: Target<'_>,
    headers: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: Option<Duration>,
) -> Answer<c_int> {
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut own = flags & !Flags::WAITFORONE.bits();
    let count = (count as usize).min(CALL_MESSAGES_MAX);
    for at in 0..count {
        // SAFETY: there are `count` of them.
        let header = unsafe { &mut *headers.add(at) };
        // SAFETY: as the contract says.
        match unsafe { receive_at(at, on, &mut header.msg_hdr, own) } {
            Ok(bytes) => header.msg_len = bytes as c_uint,
            Err(errno) if at == 0 => return Err(errno),
            Err(_) => return Ok(at as c_int),
        }
        // Linux looks at the time after each message, too (recvmmsg(2), "Bugs").
        if flags & Flags::WAITFORONE.bits() != 0 || end.is_some_and(|end| Instant::now() >= end) {
            own |= libc::MSG_DONTWAIT;
        }
    }
    Ok(count as c_int)
}

/// `sendmsg`.
///
/// # Safety
///
/// `header` is what sendmsg(2) demands.
pub(crate) unsafe fn send(on: Target<'_>, header: *const msghdr, flags: c_int) -> Answer<isize> {
    // SAFETY: handed on from the caller.
    unsafe { send_at(0, on, header, flags) }
}

/// The same, as the `at`-th message of a call that sends several.
unsafe fn send_at(at: usize, on: Target<'_>, header: *const msghdr, flags: c_int) -> Answer<isize> {
    // SAFETY: the header leads to its bytes.
    let parts = unsafe {
        let header = header.as_ref().ok_or(libc::EFAULT)?;
        slices(header.msg_iov, header.msg_iovlen)
    };
    let sent = call(on, flags, For::Room, |flags| on.kcm.socket.sendmsg_at(at, &parts, flags))?;
    Ok(sent as isize)
}

/// `send` and the like.
///
/// # Safety
///
/// `parts` leads to `count` parts that can be read.
pub(crate) unsafe fn send_parts(on: Target<'_>, parts: *const iovec, count: usize, flags: c_int) -> Answer<isize> {
    // SAFETY: the parts are as the contract says.
    let parts = unsafe { slices(parts, count) };
    let sent = call(on, flags, For::Room, |flags| on.kcm.socket.sendmsg(&parts, flags))?;
    Ok(sent as isize)
}

/// Flags of `write`: on a SOCK_SEQPACKET socket it ends a message (net/socket.c, sock_write_iter).
pub(crate) fn write_flags(kcm: &Kcm) -> c_int {
    if kcm.socket.kind() == Kind::Seqpacket { libc::MSG_EOR } else { 0 }
}

/// `sendmmsg`.
///
/// # Safety
///
/// `headers` leads to `count` of what sendmmsg(2) demands.
pub(crate) unsafe fn send_many(on: Target<'_>, headers: *mut mmsghdr, count: c_uint, flags: c_int) -> Answer<c_int> {
    for at in 0..count as usize {
        // SAFETY: there are `count` of them.
        let header = unsafe { &mut *headers.add(at) };
        // As the kernel does: MSG_EOR of each counts, and all but the last are a batch.
        let batch = if at + 1 < count as usize { Flags::BATCH.bits() } else { 0 };
        let flags = flags | header.msg_hdr.msg_flags & libc::MSG_EOR | batch;
        // SAFETY: as the contract says.
        match unsafe { send_at(at, on, &header.msg_hdr, flags) } {
            Ok(bytes) => header.msg_len = bytes as c_uint,
            Err(errno) if at == 0 => return Err(errno),
            Err(_) => {
                on.kcm.socket.flush();
                return Ok(at as c_int);
            }
        }
    }
    Ok(count as c_int)
}

/// `splice` from a message socket.
pub(crate) fn splice(on: Target<'_>, to: c_int, bytes: usize, flags: c_uint) -> Answer<isize> {
    let flags = if flags & libc::SPLICE_F_NONBLOCK != 0 { libc::MSG_DONTWAIT } else { 0 };
    if to < 0 {
        return Err(libc::EBADF);
    }
    // SAFETY: the caller keeps its descriptor open during its call; a wrong number gives EBADF.
    let to = unsafe { BorrowedFd::borrow_raw(to) };
    let spliced = call(on, flags, For::Message, |flags| {
        // The target may be slow.
        let write = |bytes: &[u8]| on.blocked.open(|| signals::outside(|| rustix::io::write(to, bytes)));
        on.kcm.socket.splice_with(bytes, flags, |bytes| Ok(write(bytes)?))
    })?;
    Ok(spliced as isize)
}

/// What unattach found read of a connection: first of all.
///
/// # Safety
///
/// `parts` leads to `count` buffers that can be written.
pub(crate) unsafe fn unread(tcp: &Attached, parts: *const iovec, count: usize, flags: c_int) -> Option<Answer<isize>> {
    let mut unread = lock(&tcp.unread);
    if unread.is_empty() {
        return None;
    }
    let mut copied = 0;
    // SAFETY: the buffers are as the contract says.
    for mut part in unsafe { buffers(parts, count) } {
        for (to, from) in part.iter_mut().zip(unread.iter().skip(copied)) {
            *to = *from;
        }
        copied += part.len().min(unread.len() - copied);
    }
    if flags & libc::MSG_PEEK == 0 {
        unread.drain(..copied);
    }
    Some(Ok(copied as isize))
}

/// One buffer, as a list.
pub(crate) fn part(bytes: *const c_void, count: usize) -> iovec {
    iovec { iov_base: bytes.cast_mut(), iov_len: count }
}
