//! The descriptors that multiplexors make for themselves.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;

static PLACE: OnceLock<fn(OwnedFd) -> std::io::Result<OwnedFd>> = OnceLock::new();

/// From now on each descriptor that multiplexors of this process make for themselves is passed to `place`, and its result
/// used: for a library in a program that knows nothing of it, which keeps its own out of the program's way. What needed a
/// descriptor fails with its error. The first call counts.
pub fn place_descriptors(place: fn(OwnedFd) -> std::io::Result<OwnedFd>) {
    let _ = PLACE.set(place);
}

/// A descriptor that was just made, where it is to stay.
pub(crate) fn placed(fd: OwnedFd) -> std::io::Result<OwnedFd> {
    match PLACE.get() {
        Some(place) => place(fd),
        None => Ok(fd),
    }
}
