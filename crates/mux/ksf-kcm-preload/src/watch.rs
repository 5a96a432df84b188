//! `poll` and `select`: a message socket is readable when a message is there, a connection has the errors that only
//! the kernel could have put on it.

use std::ffi::c_int;
use std::time::{Duration, Instant};

use libc::{POLLERR, POLLIN, POLLOUT, POLLRDNORM, POLLWRNORM, pollfd, sigset_t};

use crate::hooks::give;
use crate::kcm::readiness;
use crate::ownership;
use crate::signals::{Blocked, SLICE, poll_with};
use crate::table::{Entry, find};

/// True if one of these is not what the kernel takes it for.
fn concerns(set: &[pollfd]) -> bool {
    set.iter().any(|polled| matches!(find(polled.fd), Some(Entry::Kcm(_) | Entry::Tcp(_) | Entry::Inherited)))
}

/// `ppoll`. `signals` are blocked meanwhile, if that is said; else those that are. None if all of these are what the kernel
/// takes them for.
pub(crate) fn watch(
    set: &mut [pollfd],
    timeout: Option<Duration>,
    signals: Option<&sigset_t>,
    blocked: &Blocked,
) -> Option<c_int> {
    if !concerns(set) {
        return None;
    }
    if !ownership::is_owner() {
        return Some(watch_in_child(set, signals.unwrap_or(&blocked.before)));
    }
    // A signal between two looks would not end the call: it comes during one.
    let signals = signals.unwrap_or(&blocked.before);
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let mut real: Vec<pollfd> = set.to_vec();
        let mut found = vec![0; set.len()];
        let mut slice = None;
        for (at, polled) in set.iter().enumerate() {
            match find(polled.fd) {
                Some(Entry::Kcm(kcm)) => {
                    let readable = polled.events & (POLLIN | POLLRDNORM);
                    // An error of the socket itself is for the next call to report.
                    if readable != 0 && kcm.socket.is_readable().unwrap_or(true) {
                        found[at] |= readable;
                    }
                    if kcm.socket.is_writable() {
                        found[at] |= polled.events & (POLLOUT | POLLWRNORM);
                    }
                    // A disabled socket is not readable, whatever comes.
                    let watched = readable != 0 && kcm.socket.is_receiving();
                    real[at].fd = if watched { readiness(&kcm) } else { -1 };
                    real[at].events = POLLIN;
                    slice = if watched { slice } else { Some(SLICE) };
                }
                Some(Entry::Tcp(tcp)) if tcp.has_unread() => found[at] |= polled.events & (POLLIN | POLLRDNORM),
                Some(Entry::Tcp(tcp)) => {
                    tcp.group.look();
                    if tcp.has_error() {
                        found[at] |= POLLERR;
                    }
                    // The bytes it has are the multiplexor's, which reads them so often: no other reader may be there.
                    real[at].events &= !(POLLIN | POLLRDNORM);
                    slice = Some(SLICE);
                }
                Some(Entry::Inherited) => {
                    ownership::refuse(polled.fd);
                    found[at] |= POLLERR;
                    real[at].fd = -1;
                }
                _ => {}
            }
        }
        let ready = found.iter().any(|found| *found != 0);
        let pause = if ready { Some(Duration::ZERO) } else { min(left, slice) };
        let result = poll_with(&mut real, pause, signals).unwrap_or_else(|errno| give(Err(errno)));
        if result < 0 && !ready {
            return Some(result);
        }
        let mut count = 0;
        for (at, polled) in set.iter_mut().enumerate() {
            let is_kcm = matches!(find(polled.fd), Some(Entry::Kcm(_)));
            // That bytes came does not say that a message is whole: the next round will.
            polled.revents = found[at] | if is_kcm || result < 0 { 0 } else { real[at].revents };
            count += c_int::from(polled.revents != 0);
        }
        if count > 0 || left.is_some_and(|left| left.is_zero()) {
            return Some(count);
        }
    }
}

/// [`watch`] in a child of vfork or `_Fork`, which may not wait for the allocator's lock: at least one has an error.
fn watch_in_child(set: &mut [pollfd], signals: &sigset_t) -> c_int {
    let _ = poll_with(set, Some(Duration::ZERO), signals);
    for polled in &mut *set {
        if matches!(find(polled.fd), Some(Entry::Inherited)) {
            ownership::refuse(polled.fd);
            polled.revents = POLLERR;
        }
    }
    set.iter().map(|polled| c_int::from(polled.revents != 0)).sum()
}

fn min(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
