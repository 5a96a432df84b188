//! Descriptors that come over a Unix socket (SCM_RIGHTS). A message socket that comes back to its process is one again,
//! whatever its number; anywhere else it is refused, as one that was inherited ([`ownership`]).

use std::ffi::c_int;

use libc::{cmsghdr, msghdr};

use crate::ownership;
use crate::signals::Blocked;
use crate::table::{self, Entry};

/// Looks through what `recvmsg` has received.
///
/// # Safety
///
/// `header` was filled in by the kernel, and leads to its control messages.
pub(crate) unsafe fn note(header: &msghdr) {
    // SAFETY: the header leads to so many bytes of control messages, and the kernel wrote them.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    // SAFETY: null, or the next of these messages.
    while let Some(message) = unsafe { next.as_ref() } {
        if (message.cmsg_level, message.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: a message of this type holds descriptors.
            unsafe { descriptors(message) }.for_each(note_one);
        }
        // SAFETY: as above.
        next = unsafe { libc::CMSG_NXTHDR(header, message) };
    }
}

/// # Safety
///
/// `message` is of type SCM_RIGHTS, with what follows it.
unsafe fn descriptors(message: &cmsghdr) -> impl Iterator<Item = c_int> {
    // SAFETY: computes a length.
    let head = unsafe { libc::CMSG_LEN(0) } as usize;
    let count = message.cmsg_len.saturating_sub(head) / size_of::<c_int>();
    // SAFETY: so many numbers follow the head, in any place.
    (0..count).map(move |at| unsafe { libc::CMSG_DATA(message).cast::<c_int>().add(at).read_unaligned() })
}

fn note_one(fd: c_int) {
    let _blocked = Blocked::all();
    // The number is a new one: nothing that is known of it holds.
    table::remove(fd);
    if ownership::is_marked(fd) {
        let own = table::message_sockets().into_iter().find(|own| is_same_file(*own, fd));
        match own {
            Some(own) => table::copy(own, fd),
            None => table::insert(fd, Entry::Inherited),
        }
    }
}

/// True if both lead to the same open file (kcmp(2); false where it is missing or not allowed).
fn is_same_file(a: c_int, b: c_int) -> bool {
    const KCMP_FILE: c_int = 0;
    let process = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: compares two descriptors. No memory is involved.
    unsafe { libc::syscall(libc::SYS_kcmp, process, process, KCMP_FILE, a, b) == 0 }
}
