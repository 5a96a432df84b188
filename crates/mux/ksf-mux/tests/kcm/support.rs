//! Connections, framing programs and the record, for the tests of KCM's contract.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ksf_bpf_framing::FramingProgram;
use ksf_mux::kcm::{AttachOptions, KcmOptions, KcmSocket, Kind};
use ksf_mux::{ConnectionError, ConnectionId, Event};
pub(crate) use ksf_test::repository;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::common;
pub(crate) use crate::common::contract::{
    arrives as wait_for_bytes, errno_name, outcome, receive, receive_into, receive_now,
};
pub(crate) use crate::common::{PATIENCE, connection, message, own_network};

/// Lines "row: what happened", in their order.
pub(crate) fn record(name: &str) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(repository().join("lab/kcm").join(name)).unwrap();
    let split = |line: &str| line.split_once(": ").map(|(row, what)| (row.to_owned(), what.to_owned()));
    text.lines().map(|line| split(line).unwrap_or_else(|| panic!("{name}: {line}"))).collect()
}

/// Compares what was observed with `lab/kcm/ours.txt`.
pub(crate) fn check(observed: &[(&str, String)]) {
    let ours = record("ours.txt");
    for (row, observed) in observed {
        let wanted = ours.iter().find(|(name, _)| name == row).unwrap_or_else(|| panic!("no row {row}"));
        assert_eq!(observed, &wanted.1, "{row}");
    }
}

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
