//! bpf(2) in the few forms the probes need.
//!
//! The probes speak to the kernel directly instead of through libbpf: libbpf tries fallbacks of
//! its own and turns the errno into text, and what a probe wants is the first errno.

use std::ffi::c_long;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

pub(crate) const MAP_ARRAY: u32 = 2;
pub(crate) const MAP_SOCKMAP: u32 = 15;
pub(crate) const MAP_SOCKHASH: u32 = 18;
pub(crate) const MAP_SK_STORAGE: u32 = 24;
pub(crate) const NO_PREALLOC: u32 = 1;
pub(crate) const MMAPABLE: u32 = 1 << 10;

pub(crate) const PROG_SOCKET_FILTER: u32 = 1;
pub(crate) const PROG_XDP: u32 = 6;
pub(crate) const PROG_SK_SKB: u32 = 14;
pub(crate) const PROG_SYSCALL: u32 = 31;
pub(crate) const SLEEPABLE: u32 = 1 << 4;

pub(crate) const ATTACH_STREAM_VERDICT: u32 = 5;
pub(crate) const ATTACH_XDP: u32 = 37;
pub(crate) const XDP_SKB_MODE: u32 = 2;

const CMD_MAP_CREATE: c_long = 0;
const CMD_MAP_LOOKUP: c_long = 1;
const CMD_MAP_UPDATE: c_long = 2;
const CMD_PROG_LOAD: c_long = 5;
const CMD_PROG_ATTACH: c_long = 8;
const CMD_PROG_TEST_RUN: c_long = 10;
const CMD_BTF_LOAD: c_long = 18;
const CMD_LINK_CREATE: c_long = 28;

/// One instruction, as the kernel reads it (linux/bpf.h `struct bpf_insn`).
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Insn {
    code: u8,
    /// Destination register in the low half, source register in the high half.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// The instructions the probe programs are made of.
pub(crate) mod insn {
    use super::{AsRawFd, BorrowedFd, Insn};

    const fn op(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Insn {
        Insn { code, registers: dst | src << 4, offset, immediate }
    }

    /// `dst = immediate`
    pub(crate) const fn set(dst: u8, immediate: i32) -> Insn {
        op(0xb7, dst, 0, 0, immediate)
    }

    /// `dst = src`
    pub(crate) const fn copy(dst: u8, src: u8) -> Insn {
        op(0xbf, dst, src, 0, 0)
    }

    /// `dst += immediate`
    pub(crate) const fn add(dst: u8, immediate: i32) -> Insn {
        op(0x07, dst, 0, 0, immediate)
    }

    /// `*(u32 *)(dst + offset) = immediate`
    pub(crate) const fn store_u32(dst: u8, offset: i16, immediate: i32) -> Insn {
        op(0x62, dst, 0, offset, immediate)
    }

    /// `*(u64 *)(dst + offset) += src`, atomically
    pub(crate) const fn atomic_add_u64(dst: u8, offset: i16, src: u8) -> Insn {
        op(0xdb, dst, src, offset, 0)
    }

    /// `if dst == immediate goto +offset`
    pub(crate) const fn jump_if(dst: u8, immediate: i32, offset: i16) -> Insn {
        op(0x15, dst, 0, offset, immediate)
    }

    pub(crate) const fn call(helper: i32) -> Insn {
        op(0x85, 0, 0, 0, helper)
    }

    pub(crate) const fn exit() -> Insn {
        op(0x95, 0, 0, 0, 0)
    }

    /// `dst = map`, in two instruction slots
    pub(crate) fn load_map(dst: u8, map: BorrowedFd<'_>) -> [Insn; 2] {
        // Source register 1 is BPF_PSEUDO_MAP_FD.
        [op(0x18, dst, 1, 0, map.as_raw_fd()), op(0, 0, 0, 0, 0)]
    }
}

/// Calls bpf(2) with `attr`, zero-extended to the size the kernel knows.
fn bpf<T>(command: c_long, attr: &mut T) -> io::Result<i32> {
    // SAFETY: `attr` is a repr(C) prefix of `union bpf_attr` for `command`, valid for reads and
    // writes of its own size for the duration of the call; every address inside it points into
    // a buffer the caller of the wrapper borrows for that long. The kernel treats the bytes
    // beyond `size` as zero.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::try_from(result).expect("bpf(2) returns an int"))
}

/// Takes over the descriptor a bpf command returned.
fn owned(fd: i32) -> OwnedFd {
    // SAFETY: `fd` is the result of a successful bpf command that creates a descriptor, and
    // nobody else has seen it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn address<T: ?Sized>(data: &T) -> u64 {
    std::ptr::from_ref(data).cast::<u8>().expose_provenance() as u64
}

#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    map_name: [u8; 16],
    map_ifindex: u32,
    btf_fd: u32,
    btf_key_type_id: u32,
    btf_value_type_id: u32,
}

/// Shape of a map to create.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MapSpec<'a> {
    pub(crate) kind: u32,
    pub(crate) value_bytes: u32,
    pub(crate) entries: u32,
    pub(crate) flags: u32,
    /// Type information whose type 1 describes both key and value.
    pub(crate) btf: Option<BorrowedFd<'a>>,
}

/// Creates a map with keys of four bytes.
pub(crate) fn map_create(spec: MapSpec<'_>) -> io::Result<OwnedFd> {
    let type_id = u32::from(spec.btf.is_some());
    let mut attr = MapCreate {
        map_type: spec.kind,
        key_size: 4,
        value_size: spec.value_bytes,
        max_entries: spec.entries,
        map_flags: spec.flags,
        btf_fd: spec.btf.map_or(0, |fd| fd.as_raw_fd() as u32),
        btf_key_type_id: type_id,
        btf_value_type_id: type_id,
        ..MapCreate::default()
    };
    bpf(CMD_MAP_CREATE, &mut attr).map(owned)
}

#[repr(C)]
struct MapElem {
    map_fd: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// Stores `value` at index `key`. `value` must have the size the map was created with.
pub(crate) fn map_update(map: BorrowedFd<'_>, key: u32, value: &[u8]) -> io::Result<()> {
    let mut attr =
        MapElem { map_fd: map.as_raw_fd() as u32, pad: 0, key: address(&key), value: address(value), flags: 0 };
    bpf(CMD_MAP_UPDATE, &mut attr).map(drop)
}

/// Reads the eight-byte value at index `key`.
pub(crate) fn map_lookup_u64(map: BorrowedFd<'_>, key: u32) -> io::Result<u64> {
    let mut value = [0_u8; 8];
    let mut attr = MapElem {
        map_fd: map.as_raw_fd() as u32,
        pad: 0,
        key: address(&key),
        // The kernel writes through this address.
        value: value.as_mut_ptr().expose_provenance() as u64,
        flags: 0,
    };
    bpf(CMD_MAP_LOOKUP, &mut attr)?;
    Ok(u64::from_ne_bytes(value))
}

#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// Loads a program.
pub(crate) fn prog_load(kind: u32, attach: u32, flags: u32, program: &[Insn]) -> io::Result<OwnedFd> {
    let mut attr = ProgLoad {
        prog_type: kind,
        insn_cnt: u32::try_from(program.len()).expect("probe programs are short"),
        insns: address(program),
        license: address(c"GPL"),
        log_level: 0,
        log_size: 0,
        log_buf: 0,
        kern_version: 0,
        prog_flags: flags,
        prog_name: *b"ksf_doctor\0\0\0\0\0\0",
        prog_ifindex: 0,
        expected_attach_type: attach,
    };
    bpf(CMD_PROG_LOAD, &mut attr).map(owned)
}

#[repr(C)]
struct ProgAttach {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
    replace_bpf_fd: u32,
}

/// Attaches a program to a sockmap; it lives as long as the map does.
pub(crate) fn prog_attach(map: BorrowedFd<'_>, prog: BorrowedFd<'_>, kind: u32) -> io::Result<()> {
    let mut attr = ProgAttach {
        target_fd: map.as_raw_fd() as u32,
        attach_bpf_fd: prog.as_raw_fd() as u32,
        attach_type: kind,
        attach_flags: 0,
        replace_bpf_fd: 0,
    };
    bpf(CMD_PROG_ATTACH, &mut attr).map(drop)
}

#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

/// Attaches an XDP program to an interface until the returned link is closed.
pub(crate) fn link_xdp(prog: BorrowedFd<'_>, ifindex: u32, flags: u32) -> io::Result<OwnedFd> {
    let mut attr =
        LinkCreate { prog_fd: prog.as_raw_fd() as u32, target_ifindex: ifindex, attach_type: ATTACH_XDP, flags };
    bpf(CMD_LINK_CREATE, &mut attr).map(owned)
}

#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// Runs a program of type syscall once and returns its result.
pub(crate) fn syscall_run(prog: BorrowedFd<'_>) -> io::Result<u32> {
    let mut attr = TestRun { prog_fd: prog.as_raw_fd() as u32, ..TestRun::default() };
    bpf(CMD_PROG_TEST_RUN, &mut attr)?;
    Ok(attr.retval)
}

#[repr(C)]
struct BtfLoad {
    btf: u64,
    btf_log_buf: u64,
    btf_size: u32,
    btf_log_size: u32,
    btf_log_level: u32,
    pad: u32,
}

/// Loads type information with one type, a signed 32-bit integer: what a socket storage map
/// asks its key to be (kernel/bpf/bpf_local_storage.c).
pub(crate) fn btf_load_int() -> io::Result<OwnedFd> {
    let mut blob = Vec::with_capacity(48);
    blob.extend_from_slice(&0xeb9f_u16.to_ne_bytes());
    blob.extend_from_slice(&[1, 0]); // version, flags
    for word in [24_u32, 0, 16, 16, 5] {
        // header bytes, offset and bytes of the types, offset and bytes of the strings
        blob.extend_from_slice(&word.to_ne_bytes());
    }
    for word in [1_u32, 1 << 24, 4, 1 << 24 | 32] {
        // name, kind int, size in bytes, signed and 32 bits wide
        blob.extend_from_slice(&word.to_ne_bytes());
    }
    blob.extend_from_slice(b"\0int\0");
    let mut attr = BtfLoad {
        btf: address(blob.as_slice()),
        btf_log_buf: 0,
        btf_size: blob.len() as u32,
        btf_log_size: 0,
        btf_log_level: 0,
        pad: 0,
    };
    bpf(CMD_BTF_LOAD, &mut attr).map(owned)
}

/// Instructions that count each run in the eight-byte value at index 0 of `map` and then
/// return `result`.
pub(crate) fn counting_program(map: BorrowedFd<'_>, result: i32) -> Vec<Insn> {
    const LOOKUP: i32 = 1;
    let mut program = vec![insn::store_u32(10, -4, 0), insn::copy(2, 10), insn::add(2, -4)];
    program.extend(insn::load_map(1, map));
    program.extend([
        insn::call(LOOKUP),
        insn::jump_if(0, 0, 2),
        insn::set(1, 1),
        insn::atomic_add_u64(0, 0, 1),
        insn::set(0, result),
        insn::exit(),
    ]);
    program
}
