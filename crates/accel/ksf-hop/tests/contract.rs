//! What a program sees of a joined connection, beside what it sees of a plain one: the same, but for what docs/hop.md
//! names.

mod common;

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

use common::*;
use ksf_hop::Hop;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

/// A connection whose first end has sent a message in each direction by TCP, and a hop if it is to be joined.
fn pair(joined: bool) -> (TcpStream, TcpStream, Option<Hop>) {
    let (listener, at) = listen("127.0.0.1:0");
    let hop = joined.then(|| start(at.port()));
    let (mut one, mut other) = connect(&listener, at);
    warm_up(&mut one, &mut other);
    (one, other, hop)
}

/// Runs a scenario plain and joined. What it notes must be the same, and joined it must have been.
fn same_for_both(scenario: impl Fn(&mut TcpStream, TcpStream, &mut Vec<String>) + Sync) {
    let [plain, joined] = both(scenario);
    assert_eq!(plain, joined);
}

fn both(scenario: impl Fn(&mut TcpStream, TcpStream, &mut Vec<String>) + Sync) -> [Vec<String>; 2] {
    [false, true].map(|joined| {
        in_new_network(|| {
            let (mut one, other, hop) = pair(joined);
            let mut notes = Vec::new();
            scenario(&mut one, other, &mut notes);
            if let Some(hop) = hop {
                assert!(count(&hop, "messages") > 0, "{:?}", hop.counters());
            }
            notes
        })
    })
}

fn note(notes: &mut Vec<String>, what: &str, result: io::Result<impl std::fmt::Debug>) {
    notes.push(match result {
        Ok(value) => format!("{what}: {value:?}"),
        Err(error) => format!("{what}: {:?}", error.kind()),
    });
}

#[test]
fn reading_is_the_same() {
    if !is_root() {
        return;
    }
    same_for_both(|one, mut other, notes| {
        note(notes, "nothing yet", other.read(&mut [0; 10]));
        write(one, b"abcdef");
        write(one, b"ghijkl");
        note(notes, "waits", rustix::io::ioctl_fionread(&other).map_err(io::Error::from));
        let mut some = [0; 4];
        note(notes, "peek", other.peek(&mut some));
        notes.push(format!("{some:?}"));
        note(notes, "read", other.read(&mut some));
        note(notes, "still waits", rustix::io::ioctl_fionread(&other).map_err(io::Error::from));
        let (mut three, mut ten) = ([0; 3], [0; 10]);
        note(notes, "readv", other.read_vectored(&mut [IoSliceMut::new(&mut three), IoSliceMut::new(&mut ten)]));
        notes.push(format!("{some:?} {three:?} {ten:?}"));
        note(notes, "nothing any more", other.read(&mut [0; 10]));
        note(notes, "writev", one.write_vectored(&[IoSlice::new(b"12"), IoSlice::new(b""), IoSlice::new(b"345")]));
        note(notes, "read", other.read(&mut ten));
        notes.push(format!("{ten:?}"));
        note(notes, "writes nothing", one.write(&[]));
    });
}

#[test]
fn an_event_loop_is_told_the_same() {
    if !is_root() {
        return;
    }
    same_for_both(|one, mut other, notes| {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        epoll::add(&set, &other, epoll::EventData::new_u64(7), flags).unwrap();
        let mut told = |what: &str| {
            let mut events = Vec::with_capacity(4);
            let none = Timespec { tv_sec: 0, tv_nsec: 0 };
            epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), Some(&none)).unwrap();
            let flags: Vec<_> = events.iter().map(|event| event.flags).collect();
            notes.push(format!("{what}: {flags:?}"));
        };
        told("at first");
        write(one, b"abc");
        told("a message");
        told("it is still there");
        write(one, b"def");
        told("a second message");
        assert_eq!(other.read(&mut [0; 2]).unwrap(), 2);
        told("after reading a part");
        assert_eq!(read(&mut other, 4), b"cdef");
        write(one, b"ghi");
        one.shutdown(Shutdown::Write).unwrap();
        told("a message and the end");
        assert_eq!(read(&mut other, 10), b"ghi");
        told("after all");
    });
}

#[test]
fn ends_are_the_same() {
    if !is_root() {
        return;
    }
    same_for_both(|one, mut other, notes| {
        write(one, b"abc");
        assert_eq!(read(&mut other, 3), b"abc");
        drop(other);
        // The first is refused by the peer, the second by what came back.
        note(notes, "to one who is gone", one.write(b"x"));
        wait(one, PollFlags::IN);
        note(notes, "read", one.read(&mut [0; 3]));
        note(notes, "again", one.write(b"x"));
    });
    same_for_both(|one, mut other, notes| {
        write(one, b"abc");
        other.shutdown(Shutdown::Both).unwrap();
        wait(one, PollFlags::IN);
        note(notes, "the end", one.read(&mut [0; 3]));
        note(notes, "what came before it", other.read(&mut [0; 3]));
    });
}

/// docs/hop.md, "What is different".
#[test]
fn the_differences_are_those_that_are_documented() {
    if !is_root() {
        return;
    }
    // Bytes that were never read: TCP resets.
    let [plain, joined] = both(|one, other, notes| {
        write(one, b"never read");
        drop(other);
        wait(one, PollFlags::IN);
        note(notes, "read", one.read(&mut [0; 3]));
    });
    assert_eq!((plain[0].as_str(), joined[0].as_str()), ("read: ConnectionReset", "read: 0"));
    // Urgent data is a byte like others.
    let [plain, joined] = both(|one, mut other, notes| {
        // SAFETY: sends three bytes that live for the call.
        let sent = unsafe { libc::send(one.as_raw_fd(), b"abc".as_ptr().cast(), 3, libc::MSG_OOB) };
        assert_eq!(sent, 3);
        wait(&other, PollFlags::IN);
        note(notes, "read", other.read(&mut [0; 10]));
    });
    assert_eq!((plain[0].as_str(), joined[0].as_str()), ("read: 2", "read: 3"));
    // splice() sees nothing.
    let [plain, joined] = both(|one, other, notes| {
        write(one, b"abc");
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let moved = rustix::pipe::splice(other.as_fd(), None, &writer, None, 10, rustix::pipe::SpliceFlags::NONBLOCK);
        note(notes, "splice", moved.map_err(io::Error::from));
    });
    assert_eq!((plain[0].as_str(), joined[0].as_str()), ("splice: 3", "splice: WouldBlock"));
    // FIONREAD does not count what comes by TCP: a kernel that does needs no `no_fionread`.
    let counted = in_new_network(|| {
        let (mut one, other, _hop) = pair(true);
        write(&mut one, &[1; 100_000]);
        wait(&other, PollFlags::IN);
        rustix::io::ioctl_fionread(&other).unwrap()
    });
    let mut careful = options();
    careful.no_fionread = false;
    let refused = in_new_network(|| Hop::check(&careful).is_err_and(|error| error.to_string().contains("FIONREAD")));
    assert_eq!(counted == 0, refused);
    // Reading no bytes succeeds.
    let [plain, joined] = both(|one, mut other, notes| {
        write(one, b"abc");
        assert_eq!(read(&mut other, 3), b"abc");
        note(notes, "read", other.read(&mut []));
    });
    assert_eq!((plain[0].as_str(), joined[0].as_str()), ("read: WouldBlock", "read: 0"));
    // Nobody tells that a buffer lent by MSG_ZEROCOPY is free again.
    let [plain, joined] = both(|one, other, notes| {
        let on: libc::c_int = 1;
        // SAFETY: the kernel reads four bytes of `on`, which lives for the call.
        let result = unsafe {
            libc::setsockopt(one.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ZEROCOPY, (&raw const on).cast(), 4)
        };
        assert_eq!(result, 0);
        // SAFETY: sends bytes that live for ever.
        let sent = unsafe { libc::send(one.as_raw_fd(), [7u8; 3000].as_ptr().cast(), 3000, libc::MSG_ZEROCOPY) };
        assert_eq!(sent, 3000);
        let mut other = other;
        assert_eq!(read(&mut other, 3000).len(), 3000);
        // The kernel frees a buffer when it comes to it: it has a thousand messages of time.
        let was_told = (0..1000).any(|_| {
            warm_up(one, &mut other);
            let mut told = [PollFd::new(one, PollFlags::empty())];
            poll(&mut told, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
            told[0].revents().contains(PollFlags::ERR)
        });
        notes.push(was_told.to_string());
    });
    assert_eq!((plain[0].as_str(), joined[0].as_str()), ("true", "false"));
}

/// A set of epoll in which `end` is, with these flags.
fn waits(end: &TcpStream, flags: epoll::EventFlags) -> std::os::fd::OwnedFd {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    epoll::add(&set, end, epoll::EventData::new_u64(0), epoll::EventFlags::IN | flags).unwrap();
    set
}

/// Two messages that are not read meanwhile, the second too large to be joined; the reader's first read is short where they
/// lie in two queues. Is there an event behind it?
#[test]
fn a_short_read_of_an_edge_triggered_reader_is_all_there_is() {
    if !is_root() {
        return;
    }
    let after_a_short_read = |flags: epoll::EventFlags| {
        in_new_network(|| {
            let (listener, at) = listen("127.0.0.1:0");
            let hop = start(at.port());
            let (mut one, mut other) = connect(&listener, at);
            let set = waits(&other, flags);
            warm_up(&mut one, &mut other);
            write(&mut one, b"joined");
            write(&mut one, &[7; 40_000]);
            wait(&other, PollFlags::IN);
            let none = Timespec { tv_sec: 0, tv_nsec: 0 };
            let is_told = || {
                let mut events = Vec::with_capacity(4);
                epoll::wait(&set, rustix::buffer::spare_capacity(&mut events), Some(&none)).unwrap() > 0
            };
            assert!(is_told());
            let bytes = read_some(&mut other, 100_000).len();
            (count(&hop, "messages"), bytes, bytes == 40_006 || is_told())
        })
    };
    assert_eq!(after_a_short_read(epoll::EventFlags::empty()), (1, 6, true), "level-triggered: joined, and told again");
    assert_eq!(after_a_short_read(epoll::EventFlags::ET), (0, 40_006, true), "edge-triggered: not joined");
}

#[test]
fn edge_triggered_readers_stay_on_tcp_however_they_wait() {
    if !is_root() {
        return;
    }
    in_new_network(|| {
        let (listener, at) = listen("127.0.0.1:0");
        let hop = start(at.port());
        let joined = |one: &mut TcpStream, other: &mut TcpStream| {
            let before = count(&hop, "messages");
            write(one, b"abc");
            assert_eq!(read(other, 3), b"abc");
            count(&hop, "messages") > before
        };
        // In a second set, by another descriptor, behind others that wait.
        let (mut one, mut other) = connect(&listener, at);
        let copy = other.try_clone().unwrap();
        let level = waits(&other, epoll::EventFlags::empty());
        warm_up(&mut one, &mut other);
        assert!(joined(&mut one, &mut other));
        let edge = waits(&copy, epoll::EventFlags::ET);
        // Joined already: it goes back, and stays.
        assert!(!joined(&mut one, &mut other) && !joined(&mut one, &mut other));
        assert_eq!((count(&hop, "left"), count(&hop, "tcp_edge")), (1, 2));
        drop((edge, copy));
        let _second = waits(&other, epoll::EventFlags::empty());
        assert!(joined(&mut one, &mut other), "nobody waits so any more");
        drop(level);
        assert!(joined(&mut one, &mut other), "nobody waits at all");
        // The writer may wait as it likes.
        let _edge = waits(&one, epoll::EventFlags::ET);
        assert!(joined(&mut one, &mut other));
        // More sets than are looked at.
        let _many: Vec<_> = (0..9).map(|_| waits(&other, epoll::EventFlags::empty())).collect();
        assert!(!joined(&mut one, &mut other));
    });
}
