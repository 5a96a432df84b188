//! Memory that is registered with the ring, so that a read of a file with O_DIRECT need not pin its pages and let go of them
//! again. The ring has a table of such memory, and a request names a place in it.
//!
//! ```text
//!   hold(pages) ── these pages are known at their address? ── yes ──► its place, out of the table ──► READ_FIXED ──► release(held)
//!                                                          └─ no ───► register, if there is room ─┘
//!                            no room, or the address had other pages: by address, and one time in eight registered after all
//! ```
//!
//! **What a place stands for** is pages, not addresses: the kernel pins those that are there when memory is registered
//! (`io_sqe_buffer_register` in io_uring/rsrc.c), and goes on using them when others are mapped at the address. So a place is
//! used only for memory with the number of its pages ([`PagesId`]), which is another one after memory was freed or gave its
//! pages back.
//!
//! **A place that is used stays.** A request names its place by an index, which the kernel looks up when it takes the request from
//! the submission queue, or later on a thread of its own (`io_find_buf_node`, called by `io_read_fixed`; until 6.12 by
//! `io_prep_rw_fixed`). From then on the kernel counts a user of the old pages, and an update waits with their release
//! (`io_reset_rsrc_node`; until 6.12 `io_queue_rsrc_removal`); before, an update would change what the request means. Here an
//! operation takes its place out of the table ([`Held`]) until its completion, so no other code can change it. A buffer that is
//! read into belongs to one operation alone, so no other one asks for that place.
//!
//! **What is pinned is bounded** by `file_pinned_bytes_max`, and by the table. Pages of memory that was freed stay
//! pinned until their place is needed, or the same address is registered anew. Before 6.13 the kernel lets go of pages
//! only when requests that began earlier have ended.
//!
//! All of it takes the same time whatever the number of places, but for the system calls.

use std::collections::HashMap;
use std::ops::Range;
use std::{io, ptr};

use io_uring::IoUring;

use crate::env::Env;
use crate::limits::Time;
use crate::pages::{Pages, PagesId};

/// Places of the table: as many as operations may be under way by default.
pub(super) const PLACES: u16 = 1024;
/// Registering costs more than it saves once. Where it may be in vain, it is done for one of so many operations: without room,
/// where more memory takes turns than has room, none would be used twice; and memory that grew, gave its pages back or was
/// mapped anew may do so before each operation.
pub(super) const MISSES: u32 = 8;
/// Places that make room at a time.
const EVICTED_MAX: usize = 8;
/// When the kernel refused, it is asked for more after this time.
const RETRY_MS: u64 = 10_000;

/// The table of a ring, which is made when it is first used.
#[derive(Default)]
pub(super) struct Registered {
    /// Those that no operation uses; the others are free, or [`Held`].
    places: Vec<Option<Place>>,
    free: Vec<u16>,
    /// Places that stand for memory, by its address. No two have the same: other memory there means that the first one is gone.
    by_address: HashMap<usize, u16>,
    idle: IdlePlaces,
    /// Of all places, held ones too.
    pinned_bytes: usize,
    /// Operations for which registering might have been in vain, since it was done for one of them.
    misses: u32,
    /// What was pinned when the kernel refused more, and when it is asked again.
    refused: Option<(usize, Time)>,
}

/// What a place stands for.
struct Place {
    id: PagesId,
    base: usize,
    bytes: usize,
    pinned_bytes: usize,
}

/// A place that one operation uses. It can be neither copied nor cloned, and [`Registered::release`] consumes it: it goes back
/// into the table once.
pub(super) struct Held {
    at: u16,
    place: Place,
}

impl Held {
    /// Its index in the ring's table, for a request.
    pub(super) fn index(&self) -> u16 {
        self.at
    }
}

impl Registered {
    /// The place of memory of which an operation uses the addresses in `part`. It stands for that memory until it is
    /// [released](Self::release). `None`: the operation names the memory by its address.
    pub(super) fn hold(&mut self, ring: &IoUring, pages: &Pages, part: Range<usize>, env: &Env) -> Option<Held> {
        let base = pages.base.addr().get();
        if part.is_empty() || part.start < base || part.end > base.saturating_add(pages.bytes) {
            return None;
        }
        let most = env.limits.file_pinned_bytes_max;
        if self.pinned_bytes > most {
            // It was lowered.
            self.make_room(ring, 0, most, env);
        }
        let before = self.by_address.get(&base).copied();
        let held = match before.filter(|at| self.stands_for(*at, pages.id, part.end)) {
            Some(at) => Held { at, place: self.take(at)? },
            None => self.register(ring, pages, before, most, env)?,
        };
        env.stats.file_ops_registered.add(1);
        Some(held)
    }

    /// An operation has ended.
    pub(super) fn release(&mut self, Held { at, place }: Held) {
        self.places[usize::from(at)] = Some(place);
        self.idle.push(at);
    }

    /// Bytes of pages that are pinned.
    #[cfg(test)]
    pub(super) fn pinned_bytes(&self) -> usize {
        self.pinned_bytes
    }

    fn stands_for(&self, at: u16, id: PagesId, end: usize) -> bool {
        let place = self.places[usize::from(at)].as_ref();
        place.is_some_and(|place| place.id == id && end <= place.base + place.bytes)
    }

    /// Takes a place that no operation uses out of the table.
    fn take(&mut self, at: u16) -> Option<Place> {
        let place = self.places[usize::from(at)].take()?;
        self.idle.remove(at);
        Some(place)
    }

    /// Registers memory. `before`: the place of other pages that had its address, or of fewer of its own.
    fn register(
        &mut self,
        ring: &IoUring,
        pages: &Pages,
        before: Option<u16>,
        mut most: usize,
        env: &Env,
    ) -> Option<Held> {
        if let Some((granted, again)) = self.refused {
            if env.now < again {
                most = most.min(granted);
            } else {
                self.refused = None;
            }
        }
        let pinned_bytes = pages.pinned_bytes();
        if pinned_bytes > most {
            return None;
        }
        if self.places.is_empty() {
            self.make_table(ring, env)?;
        }
        if before.is_some() || !self.has_room(pinned_bytes, most) {
            self.misses += 1;
            if self.misses < MISSES {
                return None;
            }
            self.misses = 0;
        }
        let is_gone = before.is_none_or(|at| self.unregister(ring, at, env));
        if !is_gone || !self.make_room(ring, pinned_bytes, most, env) {
            return None;
        }
        let at = self.free.pop()?;
        let memory = libc::iovec { iov_base: pages.base.as_ptr().cast(), iov_len: pages.bytes };
        if update(ring, at, memory, env).is_err() {
            self.free.push(at);
            self.refuse(env);
            return None;
        }
        env.stats.file_memory_registered.add(1);
        self.pinned_bytes += pinned_bytes;
        let base = pages.base.addr().get();
        self.by_address.insert(base, at);
        Some(Held { at, place: Place { id: pages.id, base, bytes: pages.bytes, pinned_bytes } })
    }

    fn make_table(&mut self, ring: &IoUring, env: &Env) -> Option<()> {
        env.stats.syscalls.add(1);
        // Sparse since 5.19.
        if ring.submitter().register_buffers_sparse(PLACES.into()).is_err() {
            self.refuse(env);
            return None;
        }
        self.places.resize_with(PLACES.into(), || None);
        self.free.extend((0..PLACES).rev());
        self.by_address.reserve(PLACES.into());
        self.idle = IdlePlaces::new();
        Some(())
    }

    fn has_room(&self, bytes: usize, most: usize) -> bool {
        !self.free.is_empty() && self.pinned_bytes.saturating_add(bytes) <= most
    }

    /// Takes the places back that were not used for longest, a few at most, until there is room for so many bytes more.
    fn make_room(&mut self, ring: &IoUring, bytes: usize, most: usize, env: &Env) -> bool {
        for _ in 0..EVICTED_MAX {
            if self.has_room(bytes, most) {
                break;
            }
            let evicted = self.idle.oldest().is_some_and(|at| self.unregister(ring, at, env));
            if !evicted {
                return false;
            }
        }
        self.has_room(bytes, most)
    }

    /// Takes a place back, if no operation uses it.
    fn unregister(&mut self, ring: &IoUring, at: u16, env: &Env) -> bool {
        let Some(place) = self.take(at) else { return false };
        let nothing = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        // It fails only for want of memory, and then the kernel keeps what it has.
        if update(ring, at, nothing, env).is_err() {
            self.release(Held { at, place });
            return false;
        }
        self.by_address.remove(&place.base);
        self.free.push(at);
        // It is the sum over all places, and each is added and taken away whole.
        let rest = self.pinned_bytes.checked_sub(place.pinned_bytes);
        debug_assert!(rest.is_some(), "more is unpinned than was pinned");
        self.pinned_bytes = rest.unwrap_or(0);
        true
    }

    /// For a while no more is tried than what is pinned now: others of the same user have the rest of RLIMIT_MEMLOCK.
    fn refuse(&mut self, env: &Env) {
        self.refused = Some((self.pinned_bytes, env.now.plus_ms(RETRY_MS)));
        env.stats.file_memory_refused.add(1);
    }
}

/// Changes what a place of the ring's table stands for (IORING_REGISTER_BUFFERS_UPDATE).
fn update(ring: &IoUring, at: u16, memory: libc::iovec, env: &Env) -> io::Result<()> {
    env.stats.syscalls.add(1);
    // SAFETY: the kernel pins the pages, so they stay when the memory is freed. A request names the place only while the
    // memory has these pages and is owned by the operation (`Registered::hold`), so no other memory is written.
    unsafe { ring.submitter().register_buffers_update(at.into(), &[memory], None) }
}

/// Places that no operation uses, in the order of their last use: each knows the ones before and behind it. The one at
/// [`END`] stands for both ends.
#[derive(Default)]
struct IdlePlaces {
    links: Vec<Link>,
}

#[derive(Clone, Copy)]
struct Link {
    older: u16,
    newer: u16,
}

const END: u16 = PLACES;

impl IdlePlaces {
    fn new() -> Self {
        Self { links: vec![Link { older: END, newer: END }; usize::from(END) + 1] }
    }

    /// The one that was not used for longest.
    fn oldest(&self) -> Option<u16> {
        self.links.get(usize::from(END)).map(|end| end.newer).filter(|at| *at != END)
    }

    /// Adds one that is not there, as the one that was used last.
    fn push(&mut self, at: u16) {
        let older = self.links[usize::from(END)].older;
        self.links[usize::from(at)] = Link { older, newer: END };
        self.links[usize::from(older)].newer = at;
        self.links[usize::from(END)].older = at;
    }

    /// Removes one that is there.
    fn remove(&mut self, at: u16) {
        let Link { older, newer } = self.links[usize::from(at)];
        self.links[usize::from(older)].newer = newer;
        self.links[usize::from(newer)].older = older;
    }
}
