//! Connections, framing programs and what is received, for the tests of message sockets with AF_KCM's contract.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ksf_bpf_framing::FramingProgram;
use ksf_mux::kcm::{AttachOptions, Flags, KcmOptions, KcmSocket, KcmSocketError, Kind, RecvInfo};
use ksf_mux::{ConnectionError, ConnectionId, Event};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::common;
use crate::common::wait_until;
pub(crate) use crate::common::{PATIENCE, connection, message, own_network};

// --- programs ---------------------------------------------------------------------------------------------------------

pub(crate) fn program(instructions: &[(u8, u8, i16, i32)]) -> Arc<FramingProgram> {
    let mut bytes = Vec::new();
    for (code, registers, offset, immediate) in instructions {
        bytes.extend([*code, *registers]);
        bytes.extend(offset.to_ne_bytes());
        bytes.extend(immediate.to_ne_bytes());
    }
    Arc::new(FramingProgram::from_instructions(&bytes, &ksf_bpf_framing::FramingOptions::default()).unwrap())
}

/// The program of kcm.rst: the word at the start, or 0.
pub(crate) fn documented() -> Arc<FramingProgram> {
    program(&[(0xbf, 0x16, 0, 0), (0x20, 0, 0, 0), (0x95, 0, 0, 0)])
}

/// The one that AF_KCM needs: it reads where in the segment the message starts. See `lab/kcm/contract.c`.
pub(crate) fn framing() -> Arc<FramingProgram> {
    program(&[
        (0xbf, 0x16, 0, 0),
        (0xbf, 0x13, 0, 0),
        (0x07, 0x03, 0, 68),
        (0xbf, 0xa1, 0, 0),
        (0x07, 0x01, 0, -8),
        (0xb7, 0x02, 0, 4),
        (0x85, 0, 0, 113),
        (0x61, 0xa2, -8, 0),
        (0xbf, 0x61, 0, 0),
        (0xbf, 0xa3, 0, 0),
        (0x07, 0x03, 0, -4),
        (0xb7, 0x04, 0, 4),
        (0x85, 0, 0, 26),
        (0x15, 0x00, 2, 0),
        (0xb7, 0x00, 0, 0),
        (0x95, 0, 0, 0),
        (0x61, 0xa0, -4, 0),
        (0xdc, 0x00, 0, 32),
        (0x95, 0, 0, 0),
    ])
}

pub(crate) fn constant(value: i32) -> Arc<FramingProgram> {
    program(&[(0xb7, 0, 0, value), (0x95, 0, 0, 0)])
}

// --- connections ------------------------------------------------------------------------------------------------------

pub(crate) type Tcp = common::Tcp<OwnedFd>;

pub(crate) fn attached_with(mux: &KcmSocket, program: Arc<FramingProgram>, receive_buffer: Option<usize>) -> Tcp {
    let (near, far) = connection(receive_buffer);
    let id = mux.attach(near.try_clone().unwrap(), program, AttachOptions::default()).unwrap();
    Tcp { near, far, id }
}

pub(crate) fn attached(mux: &KcmSocket) -> Tcp {
    attached_with(mux, framing(), None)
}

pub(crate) fn kcm(kind: Kind) -> KcmSocket {
    KcmSocket::new(kind, KcmOptions::default()).unwrap()
}

/// The same in a network of the test's own.
pub(crate) fn own_kcm(kind: Kind) -> KcmSocket {
    own_network();
    kcm(kind)
}

// --- observations -----------------------------------------------------------------------------------------------------

/// The error of a connection, waited for.
pub(crate) fn error_of(mux: &KcmSocket, connection: ConnectionId) -> ConnectionError {
    let end = Instant::now() + PATIENCE;
    loop {
        while let Some(event) = mux.event() {
            match event {
                Event::Ended { connection: ended, error } if ended == connection => return error,
                _ => {}
            }
        }
        wait_readable(mux, end);
        mux.look().unwrap();
    }
}

/// Waits until there may be a message or an event.
pub(crate) fn wait_readable(mux: &KcmSocket, end: Instant) {
    let left = end.saturating_duration_since(Instant::now());
    assert!(!left.is_zero(), "nothing happened");
    let events = mux.mux().event_fd();
    let messages = mux.poll_fd().unwrap();
    let mut set = [PollFd::new(&events, PollFlags::IN), PollFd::from_borrowed_fd(messages.as_fd(), PollFlags::IN)];
    let timeout = Timespec { tv_sec: left.as_secs() as _, tv_nsec: 0 };
    poll(&mut set, Some(&timeout)).unwrap();
}

/// Waits until so many bytes have come on a connection that nobody has received.
pub(crate) fn wait_for_bytes(socket: &KcmSocket, connection: ConnectionId, bytes: usize) {
    wait_until("bytes arrive", || {
        socket.look().unwrap();
        let all = socket.mux().connection_stats();
        all.iter().any(|of| of.connection == connection && of.waiting_bytes >= bytes)
    });
}

pub(crate) fn errno_name(errno: i32) -> String {
    let known = [
        (Errno::AGAIN, "EAGAIN"),
        (Errno::ALREADY, "EALREADY"),
        (Errno::BADMSG, "EBADMSG"),
        (Errno::CONNRESET, "ECONNRESET"),
        (Errno::MSGSIZE, "EMSGSIZE"),
        (Errno::NOENT, "ENOENT"),
        (Errno::NOTCONN, "ENOTCONN"),
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
        (Errno::PIPE, "EPIPE"),
        (Errno::PROTONOSUPPORT, "EPROTONOSUPPORT"),
        (Errno::SOCKTNOSUPPORT, "ESOCKTNOSUPPORT"),
        (Errno::TIMEDOUT, "ETIMEDOUT"),
    ];
    let found = known.iter().find(|(known, _)| known.raw_os_error() == errno);
    found.map_or_else(|| format!("error {errno}"), |(_, name)| (*name).to_owned())
}

fn describe(buffer: &[u8], received: Result<RecvInfo, KcmSocketError>) -> String {
    match received {
        Err(KcmSocketError::WouldBlock) => "nothing".into(),
        Err(error) => errno_name(error.errno()),
        Ok(received) => {
            let last = char::from(buffer[received.bytes - 1]);
            let last = if last < ' ' { '-' } else { last };
            let has = |flag, name| if received.flags.contains(flag) { name } else { "" };
            format!("{} {last}{}{}", received.bytes, has(Flags::TRUNC, " TRUNC"), has(Flags::EOR, " EOR"))
        }
    }
}

pub(crate) fn receive_into(socket: &KcmSocket, size: usize, flags: Flags) -> String {
    let mut buffer = vec![0; 1 << 20];
    socket.set_receive_timeout(Some(PATIENCE));
    let received = socket.recv(&mut buffer[..size], flags);
    describe(&buffer, received)
}

pub(crate) fn receive(socket: &KcmSocket) -> String {
    receive_into(socket, 1 << 20, Flags::NONE)
}

pub(crate) fn receive_now(socket: &KcmSocket) -> String {
    receive_into(socket, 1 << 20, Flags::DONTWAIT)
}
