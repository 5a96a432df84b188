//! BPF system calls with their sizes checked, and shared memory of maps.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use ksf_bpf::{check, program_info, to_io};
use libbpf_rs::MapCore;
use rustix::mm::{MapFlags, ProtFlags};

/// A map, with its own descriptor.
#[derive(Debug)]
pub(crate) struct Map {
    fd: OwnedFd,
    key_bytes: usize,
    value_bytes: usize,
    entries: u32,
}

impl Map {
    /// Keeps a map of a loaded object alive beyond the object.
    pub(crate) fn of(map: &libbpf_rs::Map<'_>) -> io::Result<Self> {
        Ok(Self {
            fd: map.as_fd().try_clone_to_owned()?,
            key_bytes: map.key_size() as usize,
            value_bytes: map.value_size() as usize,
            entries: map.max_entries(),
        })
    }

    /// Another descriptor of the same map.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()?, ..*self })
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries
    }

    pub(crate) fn update(&self, key: &[u8], value: &[u8]) -> io::Result<()> {
        assert_eq!((key.len(), value.len()), (self.key_bytes, self.value_bytes), "sizes of the map's types");
        // SAFETY: key and value are readable for the sizes the map was created with (asserted above), and the kernel
        // copies them before it returns.
        let rc = unsafe {
            libbpf_sys::bpf_map_update_elem(self.fd.as_raw_fd(), key.as_ptr().cast(), value.as_ptr().cast(), 0)
        };
        check(rc).map(drop)
    }

    pub(crate) fn delete(&self, key: &[u8]) -> io::Result<()> {
        assert_eq!(key.len(), self.key_bytes, "size of the map's key");
        // SAFETY: key is readable for the map's key size (asserted above); the kernel copies it.
        let rc = unsafe { libbpf_sys::bpf_map_delete_elem(self.fd.as_raw_fd(), key.as_ptr().cast()) };
        check(rc).map(drop)
    }

    /// Sums a per-CPU value of eight bytes over all CPUs.
    pub(crate) fn sum_u64(&self, key: u32) -> io::Result<u64> {
        assert_eq!((self.key_bytes, self.value_bytes), (4, 8), "an array of counters");
        let mut values = vec![0u64; libbpf_rs::num_possible_cpus().map_err(to_io)?];
        // SAFETY: for a per-CPU map the kernel writes the value size, rounded up to 8, for each possible CPU; `values`
        // has that many.
        let rc = unsafe {
            libbpf_sys::bpf_map_lookup_elem(
                self.fd.as_raw_fd(),
                std::ptr::from_ref(&key).cast(),
                values.as_mut_ptr().cast(),
            )
        };
        check(rc)?;
        Ok(values.iter().sum())
    }
}

impl AsFd for Map {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Shared memory of a map (`BPF_F_MMAPABLE` array, or a ring buffer).
#[derive(Debug)]
pub(crate) struct Mapping {
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory shared with the kernel and belongs to no thread; what may be done with it
// concurrently is decided by the types laid over it (atomics, or `&mut` access to an area).
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself gives out the address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, bytes: usize, writable: bool) -> io::Result<Self> {
        let page = rustix::param::page_size();
        let bytes = bytes.next_multiple_of(page);
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh shared mapping at an address of the kernel's choice: no existing memory is touched.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, offset)? };
        Ok(Self { at: NonNull::new(at.cast()).expect("mmap never returns null here"), bytes })
    }

    /// The address of a `T` at `offset`, checked to lie inside and to be aligned.
    pub(crate) fn at<T>(&self, offset: usize) -> NonNull<T> {
        assert!(offset + size_of::<T>() <= self.bytes && offset.is_multiple_of(align_of::<T>()));
        // SAFETY: the offset lies inside the mapping (asserted above).
        unsafe { self.at.add(offset).cast() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and nobody else unmaps it; borrows of it live no longer than `self`,
        // which their owners keep.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

/// Attaches a verdict program to a socket map. Ends with the map.
pub(crate) fn attach_verdict(program: BorrowedFd<'_>, map: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: two descriptors and numbers; no memory is passed.
    let rc = unsafe {
        libbpf_sys::bpf_prog_attach(program.as_raw_fd(), map.as_raw_fd(), libbpf_sys::BPF_SK_SKB_STREAM_VERDICT, 0)
    };
    check(rc).map(drop)
}

/// `XDP_FLAGS_SKB_MODE`, `XDP_FLAGS_DRV_MODE` of linux/if_link.h.
pub(crate) const XDP_GENERIC: u32 = 1 << 1;
pub(crate) const XDP_NATIVE: u32 = 1 << 2;

/// Attaches an XDP program by a link: it ends with the descriptor, so also with the process.
pub(crate) fn attach_xdp(program: BorrowedFd<'_>, interface: u32, flags: u32) -> io::Result<OwnedFd> {
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags,
        ..Default::default()
    };
    // SAFETY: `opts` is valid for the call and says its size.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(program.as_raw_fd(), interface as i32, libbpf_sys::BPF_XDP, &raw const opts)
    };
    let fd = check(fd)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts another program behind a link, without a moment in between.
pub(crate) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: two descriptors; null stands for "no options".
    let rc = unsafe { libbpf_sys::bpf_link_update(link.as_raw_fd(), program.as_raw_fd(), std::ptr::null()) };
    check(rc).map(drop)
}

/// Ids of the XDP programs on an interface, whatever the mode.
pub(crate) fn xdp_programs(interface: u32) -> io::Result<Vec<u32>> {
    let mut opts = libbpf_sys::bpf_xdp_query_opts {
        sz: size_of::<libbpf_sys::bpf_xdp_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: `opts` is valid and writable for the call and says its size.
    let rc = unsafe { libbpf_sys::bpf_xdp_query(interface as i32, 0, &raw mut opts) };
    check(rc)?;
    let mut ids = vec![opts.prog_id, opts.drv_prog_id, opts.skb_prog_id, opts.hw_prog_id];
    ids.retain(|&id| id != 0);
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// Runs a `SEC("syscall")` program once with `args` and gives its return value.
pub(crate) fn run(program: BorrowedFd<'_>, args: &[u8]) -> io::Result<i32> {
    let mut opts = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        ctx_in: args.as_ptr().cast(),
        ctx_size_in: args.len() as u32,
        ..Default::default()
    };
    // SAFETY: `opts` is valid and writable for the call, and ctx_in is readable for ctx_size_in bytes.
    let rc = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut opts) };
    check(rc)?;
    Ok(opts.retval as i32)
}

/// Runs an XDP program once on a frame: its verdict and what became of the frame.
pub(crate) fn run_xdp(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<(u32, Vec<u8>)> {
    let mut out = vec![0; 65_536];
    let mut opts = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: frame.as_ptr().cast(),
        data_size_in: frame.len() as u32,
        data_out: out.as_mut_ptr().cast(),
        data_size_out: out.len() as u32,
        repeat: 1,
        ..Default::default()
    };
    // SAFETY: `opts` is valid and writable for the call; data_in is readable and data_out writable for their sizes.
    let rc = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut opts) };
    check(rc)?;
    out.truncate(opts.data_size_out as usize);
    Ok((opts.retval, out))
}

/// How many instructions the verifier looked at: the price of loading a program.
pub(crate) fn verified_instructions(program: BorrowedFd<'_>) -> u32 {
    program_info(program).map_or(0, |info| info.verified_insns)
}
