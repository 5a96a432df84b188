//! The memory of one buffer: zeroed, page-aligned, and taken from the machine only as far as it is touched if it is long.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::ALIGN_BYTES;

/// Memory from this length on is a mapping of its own. The allocator clears shorter memory at once, which takes all of
/// its pages; those of a mapping come one by one when they are touched, so a peer that announces a long message costs
/// no more than what it sends.
const MAPPED_BYTES_MIN: usize = 64 << 10;

/// Memory of a fixed length, and how much of it may have been touched.
pub(super) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    touched_bytes: usize,
}

impl Memory {
    /// At least `bytes` zeroed bytes; whole pages.
    pub(super) fn zeroed(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        let bytes = layout.size();
        let (base, touched_bytes) = if bytes >= MAPPED_BYTES_MIN {
            (map(bytes), 0)
        } else {
            // SAFETY: the layout is not empty (`layout` takes at least one page).
            (NonNull::new(unsafe { alloc_zeroed(layout) }), bytes)
        };
        Self { base: base.unwrap_or_else(|| handle_alloc_error(layout)), bytes, touched_bytes }
    }

    fn layout(bytes: usize) -> Layout {
        let layout = Layout::from_size_align(bytes.max(ALIGN_BYTES), ALIGN_BYTES).map(|layout| layout.pad_to_align());
        // Only a length near the end of the address space, which no limit admits and no allocator could serve.
        layout.unwrap_or_else(|_| handle_alloc_error(Layout::new::<Self>()))
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes from the front that may be taken from the machine.
    pub(super) fn touched_bytes(&self) -> usize {
        self.touched_bytes
    }

    /// Says that up to `bytes` bytes from the front are written.
    pub(super) fn touch(&mut self, bytes: usize) {
        self.touched_bytes = self.touched_bytes.max(bytes.min(self.bytes));
    }

    /// Gives all pages back to the machine, and reads as zeros. False if that is not possible, and nothing changes.
    pub(super) fn forget(&mut self) -> bool {
        if self.bytes < MAPPED_BYTES_MIN {
            return false;
        }
        // SAFETY: these are the pages of a private anonymous mapping that `map` made and this value owns; its owner holds
        // no reference into them, because it lends this value out for writing here.
        let forgotten = unsafe { madvise(self.base.as_ptr().cast(), self.bytes, Advice::LinuxDontNeed) }.is_ok();
        if forgotten {
            self.touched_bytes = 0;
        }
        forgotten
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.bytes >= MAPPED_BYTES_MIN {
            // SAFETY: `map` made a mapping of this length, and this value owns it.
            let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
            // It fails only where the kernel would have to split a mapping, and has no room for one more.
            debug_assert!(unmapped.is_ok(), "{unmapped:?}");
        } else {
            // SAFETY: `base` was allocated with this layout in `zeroed`, and this value owns it.
            unsafe { dealloc(self.base.as_ptr(), Self::layout(self.bytes)) }
        }
    }
}

/// A mapping of `bytes` bytes; `None` if there is no memory.
fn map(bytes: usize) -> Option<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address the kernel chooses aliases nothing.
    let base = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }.ok()?;
    // Huge pages would be taken as a whole with their first byte. A kernel without them refuses the advice.
    // SAFETY: these are the pages of the mapping that was just made; the advice does not change what they contain.
    let _ = unsafe { madvise(base, bytes, Advice::LinuxNoHugepage) };
    NonNull::new(base.cast())
}
