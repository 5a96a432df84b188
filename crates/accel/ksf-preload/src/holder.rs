//! Questions to the holder.
//!
//! A connection lasts for one question: what a process owns, the holder knows by the process. Questions are rare, and a
//! connection that stays would be one more descriptor for the program to close by mistake, to share with a child, or to
//! leave behind.
//!
//! A question has a time limit, and a holder that fails to answer is left alone for a while: 1 s, 2 s, 4 s, ... The program
//! is held up for at most [`LIMIT_MS`] each time. A program that began meanwhile begins with its first question that is
//! answered.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ksf_accel_proto::message::{ANSWER_BYTES, Answer, Request};
use ksf_accel_proto::state::VERSION;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, socket_with, sockopt,
};

use crate::descriptor::borrow;
use crate::process::{self, Process, now_ns};
use crate::start;

/// Until the holder must have answered. Long: on a busy machine it may take a second to have the kernel verify a steering
/// program, at the first listener.
const LIMIT_MS: u64 = 5000;
/// Longest time a holder that failed is left alone.
const LEFT_ALONE_MAX_MS: u64 = 60_000;
/// Descriptors that come with an answer.
const DESCRIPTORS: usize = 2;

/// An answer, and what came with it.
pub(crate) struct Reply {
    pub(crate) answer: Answer,
    pub(crate) descriptors: [Option<OwnedFd>; DESCRIPTORS],
}

/// Where the holder is: name and its length, token, and the user that this program was started as. Written when the library
/// starts, in the only thread; the token once more by [`set_secret`].
struct Address {
    known: AtomicBool,
    inner: UnsafeCell<([u8; 108], usize, [u8; 16], u32)>,
}

// SAFETY: written by the constructor before `known` is set. The token is read and written again only by who asks, with
// the lock of `process::Entered`, or in the constructor.
unsafe impl Sync for Address {}

static ADDRESS: Address = Address { known: AtomicBool::new(false), inner: UnsafeCell::new(([0; 108], 0, [0; 16], 0)) };

/// Takes `NAME:TOKEN`. Called once, when the library starts. None: it is neither.
pub(crate) fn set_address(value: &[u8]) -> Option<()> {
    let colon = value.iter().rposition(|byte| *byte == b':')?;
    let (name, digits) = (&value[..colon], &value[colon + 1..]);
    if name.is_empty() || name.len() > 107 || digits.len() != 32 {
        return None;
    }
    let mut token = [0; 16];
    for (byte, pair) in token.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |digit: u8| (digit as char).to_digit(16);
        *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8;
    }
    // SAFETY: the constructor runs once, in the only thread; nobody reads before `known`.
    let inner = unsafe { &mut *ADDRESS.inner.get() };
    inner.0[..name.len()].copy_from_slice(name);
    inner.1 = name.len();
    inner.2 = token;
    inner.3 = rustix::process::geteuid().as_raw();
    ADDRESS.known.store(true, Ordering::Release);
    Some(())
}

/// Sets the secret of the lifetime memfd, by which the holder admits this process and its children under any user. The caller
/// has the lock of `process::Entered`, or is the constructor.
pub(crate) fn set_secret(secret: [u8; 16]) {
    // SAFETY: only who asks reads the token, and one thread asks at a time; see `Address`.
    unsafe { (&raw mut (*ADDRESS.inner.get()).2).write(secret) };
}

/// True unless the holder has failed so lately that it is left alone.
pub(crate) fn may_ask(process: &Process) -> bool {
    now_ns() / 1_000_000 >= process.ask_again_ms.load(Ordering::Relaxed)
}

/// Asks one question; `with` goes with it. None: no answer, or none that makes sense.
pub(crate) fn ask(process: &Process, request: &Request, with: Option<i32>) -> Option<Reply> {
    if !may_ask(process) {
        return None;
    }
    let deadline_ms = now_ns() / 1_000_000 + LIMIT_MS;
    let reply = ask_until(request, with, deadline_ms);
    match reply {
        Some(_) => process.failures.store(0, Ordering::Relaxed),
        None => leave_alone(process),
    }
    reply
}

/// The holder has not answered.
pub(crate) fn leave_alone(process: &Process) {
    let failures = process.failures.fetch_add(1, Ordering::Relaxed);
    let alone_ms = (1000u64 << failures.min(10)).min(LEFT_ALONE_MAX_MS);
    process.ask_again_ms.store(now_ns() / 1_000_000 + alone_ms, Ordering::Relaxed);
}

fn ask_until(request: &Request, with: Option<i32>, deadline_ms: u64) -> Option<Reply> {
    // The greeting's answer brings memory, which this process has if an earlier one was answered.
    let begins = process::state().is_none();
    let (greeted, socket) = greet_until(begins, deadline_ms).ok()?;
    match greeted.answer {
        Answer::Done { .. } => {
            if begins {
                start::share(greeted.descriptors)?;
            }
            exchange(&socket, request, with, deadline_ms).ok()
        }
        Answer::Refused { .. } => Some(greeted),
    }
}

/// The first word of a program: the answer brings the shared memory and the lifetime memfd, in this order.
///
/// # Errors
///
/// `TIMEDOUT`: a holder is there, and has not answered in time. Any other: there is none for this program.
pub(crate) fn greet() -> Result<Reply, Errno> {
    Ok(greet_until(true, now_ns() / 1_000_000 + LIMIT_MS)?.0)
}

fn greet_until(begins: bool, deadline_ms: u64) -> Result<(Reply, OwnedFd), Errno> {
    let socket = open(deadline_ms)?;
    let reply = exchange(&socket, &greeting(begins).ok_or(Errno::NOTCONN)?, None, deadline_ms)?;
    Ok((reply, socket))
}

fn greeting(begins: bool) -> Option<Request> {
    // SAFETY: written before `known` was set, and never again.
    let inner = ADDRESS.known.load(Ordering::Acquire).then(|| unsafe { &*ADDRESS.inner.get() })?;
    Some(Request::Hello { version: VERSION, token: inner.2, pid: std::process::id(), begins: begins.into() })
}

fn open(deadline_ms: u64) -> Result<OwnedFd, Errno> {
    if !ADDRESS.known.load(Ordering::Acquire) {
        return Err(Errno::NOTCONN);
    }
    // SAFETY: written before `known` was set, and never again.
    let inner = unsafe { &*ADDRESS.inner.get() };
    let address = SocketAddrUnix::new_abstract_name(&inner.0[..inner.1])?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // Where the holder's backlog is full, connect() and send() wait.
    let left = Duration::from_millis(deadline_ms.saturating_sub(now_ns() / 1_000_000).max(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left))?;
    connect(&socket, &address).map_err(|errno| if errno == Errno::AGAIN { Errno::TIMEDOUT } else { errno })?;
    // Names of sockets are free for all to take once the holder has ended. What this program sends is for root, or for the
    // user that it was started as.
    match listening_user(&socket) {
        Some(user) if user == 0 || user == inner.3 => Ok(socket),
        _ => Err(Errno::PERM),
    }
}

/// The effective user of the process that listens at the other end, as the kernel noted it then.
fn listening_user(socket: &OwnedFd) -> Option<u32> {
    // SAFETY: the kernel writes as many bytes as it is told there is room for.
    unsafe {
        let mut peer: libc::ucred = std::mem::zeroed();
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        let result = libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &mut length,
        );
        (result == 0).then_some(peer.uid)
    }
}

fn exchange(socket: &OwnedFd, request: &Request, with: Option<i32>, deadline_ms: u64) -> Result<Reply, Errno> {
    let bytes = request.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [borrow(with.unwrap_or(0))];
    if with.is_some() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;

    wait_readable(socket, deadline_ms)?;
    let mut answer = [0; ANSWER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut answer)], &mut control, flags)?;
    if received.bytes == 0 {
        return Err(Errno::CONNRESET);
    }
    let mut reply = Reply { answer: Answer::Refused { reason: REFUSED }, descriptors: [const { None }; DESCRIPTORS] };
    let mut places = reply.descriptors.iter_mut();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(all) = message {
            all.zip(&mut places).for_each(|(descriptor, place)| *place = Some(descriptor));
        }
    }
    reply.answer = Answer::decode(&answer[..received.bytes]).ok_or(Errno::PROTO)?;
    Ok(reply)
}

/// Stands in a reply until the true answer is there.
const REFUSED: ksf_accel_proto::message::Refusal = ksf_accel_proto::message::Refusal::Malformed;

fn wait_readable(socket: &OwnedFd, deadline_ms: u64) -> Result<(), Errno> {
    loop {
        let left_ms = deadline_ms.saturating_sub(now_ns() / 1_000_000);
        let left = Timespec { tv_sec: (left_ms / 1000) as i64, tv_nsec: (left_ms % 1000 * 1_000_000) as i64 };
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) => return Ok(()),
            // Signals wait; a debugger may still interrupt.
            Err(Errno::INTR) if left_ms > 0 => {}
            Err(errno) => return Err(errno),
        }
    }
}
