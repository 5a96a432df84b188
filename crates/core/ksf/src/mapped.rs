//! A file that is mapped, written with stores, and flushed from the caches of the CPU: persistent memory without a system call.
//!
//! ```text
//!   store ─► flush: each cache line begins to be written back ─► fence: what was flushed before is on the medium
//! ```
//!
//! That holds for a mapping with MAP_SYNC on a DAX file system. On any other one the same instructions run, and what they
//! write back is not a medium.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Bytes of a cache line of every x86-64 CPU: what a flush writes back.
pub const LINE_BYTES: usize = 64;

/// How a file is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// MAP_SHARED: other processes see what is stored, and nothing is promised of a power cut.
    Shared,
    /// MAP_SHARED_VALIDATE with MAP_SYNC (mmap(2), Linux 4.15): a store that was flushed and fenced is on the medium. Refused
    /// where the file system or the medium cannot do that.
    Synchronous,
}

/// Maps the front of a file for reading and writing, and locks nothing.
///
/// # Errors
///
/// Those of mmap(2). [`io::ErrorKind::Unsupported`]: there is no MAP_SYNC.
pub(crate) fn map(file: impl AsFd, bytes: usize, mapping: Mapping) -> io::Result<NonNull<u8>> {
    let flags = match mapping {
        Mapping::Shared => MapFlags::SHARED,
        Mapping::Synchronous => MapFlags::SHARED_VALIDATE | MapFlags::SYNC,
    };
    // SAFETY: a new mapping at an address the kernel chooses aliases nothing.
    let base = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags, file, 0) };
    let base = base.map_err(|error| match error {
        rustix::io::Errno::OPNOTSUPP if mapping == Mapping::Synchronous => io::Error::new(
            io::ErrorKind::Unsupported,
            "the file is not on persistent memory with DAX (MAP_SYNC is refused); mount the file system \
             with dax=always on a pmem device, or use another kind of memory",
        ),
        error => error.into(),
    })?;
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// The instruction that writes a cache line back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flush {
    /// It may leave the line in the cache.
    Clwb,
    /// It takes the line out, and does not wait for others.
    Clflushopt,
    /// It takes the line out, one after the other. Every x86-64 CPU has it.
    Clflush,
}

/// A part of a file in memory. No other code writes to that part.
#[derive(Debug)]
pub struct MappedFile {
    base: NonNull<u8>,
    bytes: usize,
    flush: Flush,
}

// SAFETY: the mapping belongs to this value alone, and nothing in it is tied to a thread.
unsafe impl Send for MappedFile {}
// SAFETY: through a shared reference nothing is stored, and nothing is read.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Maps the first `bytes` bytes of a file. A process that cuts the file shorter kills this one with SIGBUS, as an error of
    /// the medium does.
    ///
    /// # Errors
    ///
    /// Those of mmap(2). [`io::ErrorKind::InvalidInput`]: the file is shorter than that. [`io::ErrorKind::Unsupported`]: there
    /// is no MAP_SYNC, or no instruction that this program knows to flush a cache line with.
    pub fn map(file: impl AsFd, bytes: usize, mapping: Mapping) -> io::Result<Self> {
        let flush = best_flush().ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::Unsupported,
                "caches are flushed by instructions of x86-64, which this is not",
            )
        })?;
        let length = rustix::fs::fstat(&file)?.st_size;
        if bytes == 0 || u64::try_from(length).unwrap_or(0) < bytes as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the file is shorter than what is to be mapped"));
        }
        let base = map(file, bytes, mapping)?;
        Ok(Self { base, bytes, flush })
    }

    /// Has the kernel map every page now (MADV_POPULATE_WRITE, Linux 5.14), so that no store faults. Where it cannot, each
    /// page is mapped by the first store to it.
    pub fn populate(&self) {
        // SAFETY: these are the pages of the mapping that this value owns; the advice does not change what they contain.
        let _ = unsafe { madvise(self.base.as_ptr().cast(), self.bytes, Advice::LinuxPopulateWrite) };
    }

    /// Bytes of it.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The instruction that flushes: `clwb`, `clflushopt` or `clflush`.
    pub fn instruction(&self) -> &'static str {
        match self.flush {
            Flush::Clwb => "clwb",
            Flush::Clflushopt => "clflushopt",
            Flush::Clflush => "clflush",
        }
    }

    /// Copies bytes to where they are to lie.
    ///
    /// # Panics
    ///
    /// They do not fit in there.
    pub fn store(&mut self, at: usize, bytes: &[u8]) {
        self.check(at, bytes.len());
        // SAFETY: `check` says that the bytes are inside of the mapping. There is never a reference into it, so `bytes` is
        // elsewhere, and this value is borrowed for writing.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(at), bytes.len()) };
    }

    /// Begins to write back each cache line that has one of these bytes.
    ///
    /// # Panics
    ///
    /// They are not in the mapping.
    pub fn flush(&self, at: usize, bytes: usize) {
        self.check(at, bytes);
        // A mapping begins at a page, and so at a line.
        for line in (at / LINE_BYTES * LINE_BYTES..at + bytes).step_by(LINE_BYTES) {
            // SAFETY: the line begins in the mapping, as `check` says, and `best_flush` found the instruction.
            unsafe { flush_line(self.flush, self.base.as_ptr().add(line)) };
        }
    }

    /// Waits until what was flushed before is written back.
    pub fn fence(&self) {
        store_fence();
    }

    fn check(&self, at: usize, bytes: usize) {
        let fits = at.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(fits, "{bytes} bytes at {at} are outside of a mapping of {} bytes", self.bytes);
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: made by `map` with this length, and nothing refers into it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(target_arch = "x86_64")]
fn best_flush() -> Option<Flush> {
    use std::arch::x86_64::__cpuid_count;

    const EXTENDED_FEATURES: u32 = 7;
    // SAFETY: every x86-64 CPU has cpuid, and leaf 0 of it.
    #[allow(unused_unsafe, reason = "newer compilers know that cpuid is there")]
    let last_leaf = unsafe { __cpuid_count(0, 0) }.eax;
    if last_leaf < EXTENDED_FEATURES {
        return Some(Flush::Clflush);
    }
    // SAFETY: the same, and the leaf is there.
    #[allow(unused_unsafe, reason = "newer compilers know that cpuid is there")]
    let features = unsafe { __cpuid_count(EXTENDED_FEATURES, 0) }.ebx;
    // Bits 24 and 23 (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, CPUID).
    Some(match (features >> 24 & 1, features >> 23 & 1) {
        (1, _) => Flush::Clwb,
        (_, 1) => Flush::Clflushopt,
        _ => Flush::Clflush,
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn best_flush() -> Option<Flush> {
    None
}

/// # Safety
///
/// The CPU has the instruction, and the address is mapped.
#[cfg(target_arch = "x86_64")]
unsafe fn flush_line(flush: Flush, line: *mut u8) {
    use std::arch::asm;

    // SAFETY: the caller says that the instruction and the address are there. It changes neither registers nor what memory
    // contains. Without `nomem`, the compiler has done all stores before it.
    unsafe {
        match flush {
            Flush::Clwb => asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)),
            Flush::Clflushopt => asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags)),
            Flush::Clflush => asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags)),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn store_fence() {
    // SAFETY: every x86-64 CPU has it, and it changes nothing. Without `nomem`, the compiler moves no store over it.
    unsafe { std::arch::asm!("sfence", options(nostack, preserves_flags)) };
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn flush_line(_: Flush, _: *mut u8) {
    unreachable!("nothing is mapped here: best_flush finds no instruction");
}

#[cfg(not(target_arch = "x86_64"))]
fn store_fence() {
    unreachable!("nothing is mapped here: best_flush finds no instruction");
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const BYTES: usize = 3 * 4096;

    fn file() -> std::fs::File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(BYTES as u64).unwrap();
        file
    }

    /// Each instruction that this CPU has runs, and a reader of the file sees what was stored.
    #[test]
    fn what_is_stored_is_in_the_file() {
        let file = file();
        let mut mapped = MappedFile::map(&file, BYTES, Mapping::Shared).unwrap();
        mapped.populate();
        assert_eq!(mapped.bytes(), BYTES);
        assert_eq!(best_flush(), Some(mapped.flush));
        let mut flushes = vec![mapped.flush, Flush::Clflush];
        flushes.dedup();
        for (round, flush) in (1..).zip(flushes) {
            mapped.flush = flush;
            for (at, bytes) in [(0, 1), (63, 2), (4000, 200), (BYTES - 1, 1), (0, BYTES), (BYTES, 0)] {
                mapped.store(at, &vec![round; bytes]);
                mapped.flush(at, bytes);
                mapped.fence();
                let mut read = vec![0; bytes];
                file.read_exact_at(&mut read, at as u64).unwrap();
                assert_eq!(read, vec![round; bytes], "{} at {at}", mapped.instruction());
            }
        }
    }

    #[test]
    fn nothing_is_stored_outside() {
        let file = file();
        for (at, bytes) in [(BYTES, 1), (BYTES - 1, 2), (usize::MAX, 2)] {
            let mut mapped = MappedFile::map(&file, BYTES, Mapping::Shared).unwrap();
            let stored = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| mapped.store(at, &vec![1; bytes])));
            assert!(stored.is_err(), "{bytes} bytes at {at}");
            let flushed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| mapped.flush(at, bytes)));
            assert!(flushed.is_err(), "{bytes} bytes at {at}");
        }
        for bytes in [0, BYTES + 1] {
            let refused = MappedFile::map(&file, bytes, Mapping::Shared).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        }
    }

    /// A file in the page cache, or in the kernel's memory, is no persistent memory.
    #[test]
    fn what_is_not_synchronous_is_refused_by_name() {
        let memory = rustix::fs::memfd_create("no-pmem", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, BYTES as u64).unwrap();
        let refused = MappedFile::map(&memory, BYTES, Mapping::Synchronous).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::Unsupported);
        assert!(refused.to_string().contains("MAP_SYNC"), "{refused}");
    }
}
