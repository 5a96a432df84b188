//! Epoll instances that watch a listener without a queue: the library did not see how it was put there, because it came
//! by a bare system call or recvmmsg; or the holder was off then, or did not answer.
//!
//! They are met when the program accepts. What it asked for when it added them is what the kernel tells of the
//! instance in `/proc/self/fdinfo`: number, events and data of each descriptor (fs/eventpoll.c, `ep_show_fdinfo`).
//! Looking at each descriptor when it is added would find them too, at the price of a system call for each connection.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

use libc::epoll_event;
use rustix::fs::{CWD, Mode, OFlags};

use crate::process::{enter, is_on, process};
use crate::table::{self, DescriptorKind, LISTENERS};
use crate::{holder, listener, pin, wait, worker};

thread_local! {
    /// The instance that was last looked at by this thread, and the listeners (a bit for each slot) that it does not
    /// watch, or cannot get a queue for.
    static LOOKED: Cell<(c_int, u64)> = const { Cell::new((-1, 0)) };
}

/// The worker that this thread is for the listener, if the instance it last waited on turns out to watch it.
#[inline]
pub(crate) fn adopt(slot: usize, fd: c_int) -> Option<usize> {
    let epoll = wait::last_epoll()?;
    let (instance, slots) = LOOKED.get();
    let known = if instance == epoll { slots } else { 0 };
    if known & (1 << slot) != 0 || LISTENERS[slot].refused.load(Ordering::Relaxed) != 0 {
        return None;
    }
    let process = process().filter(|process| is_on() && holder::may_ask(process))?;
    let found = look(epoll, slot, fd);
    // Where the holder has not answered, it is worth another look.
    if found.is_none() && holder::may_ask(process) {
        LOOKED.set((epoll, known | 1 << slot));
    }
    found
}

#[cold]
fn look(epoll: c_int, slot: usize, fd: c_int) -> Option<usize> {
    let entered = enter()?;
    if listener::meet(&entered, fd) != Some(slot) {
        return None;
    }
    if let DescriptorKind::Epoll(index) = table::kind(epoll)
        && worker::entry(index, slot).is_some()
    {
        return None;
    }
    let asked = asked_for(epoll, fd)?;
    let index = worker::begin_late(&entered, epoll, fd, slot, asked)?;
    wait::arrive(entered.process, index);
    pin::settle(entered.process, index);
    Some(index)
}

/// What the program asked for when it put a descriptor into an epoll instance.
fn asked_for(epoll: c_int, fd: c_int) -> Option<epoll_event> {
    let mut path = *b"/proc/self/fdinfo/0000000000\0";
    let mut number = epoll;
    for digit in path[18..28].iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
    // The kernel takes no leading zeros.
    let zeros = path[18..27].iter().take_while(|digit| **digit == b'0').count();
    path.copy_within(18 + zeros.., 18);
    let path = std::ffi::CStr::from_bytes_until_nul(&path).ok()?;
    let file = rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut buffer = [0; 4096];
    let mut filled = 0;
    loop {
        let read = rustix::io::read(&file, &mut buffer[filled..]).ok()?;
        filled += read;
        let end = match buffer[..filled].iter().rposition(|byte| *byte == b'\n') {
            Some(newline) => newline + 1,
            None if read == 0 || filled == buffer.len() => return None,
            None => continue,
        };
        let found = buffer[..end].split(|byte| *byte == b'\n').find_map(|line| parse(line, fd));
        if found.is_some() || read == 0 {
            return found;
        }
        buffer.copy_within(end..filled, 0);
        filled -= end;
    }
}

/// `tfd: 5 events: 19 data: 7 pos:0 ino:4e sdev:9`, events and data in hexadecimal. None: of another descriptor.
fn parse(line: &[u8], fd: c_int) -> Option<epoll_event> {
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split_ascii_whitespace();
    let mut value = |name| (words.next()? == name).then(|| words.next()).flatten();
    if value("tfd:")?.parse() != Ok(fd) {
        return None;
    }
    let events = u32::from_str_radix(value("events:")?, 16).ok()?;
    let data = u64::from_str_radix(value("data:")?, 16).ok()?;
    Some(epoll_event { events, u64: data })
}
