//! Framing programs: remembered when they are loaded, so that the interpreter can run them.

use std::ffi::{c_int, c_long};
use std::os::fd::IntoRawFd;
use std::sync::Arc;

use ksf_bpf_framing::{FramingProgram, Options};
use rustix::event::{EventfdFlags, eventfd};

use crate::table::{self, Entry};

/// bpf(BPF_PROG_LOAD, ...) of a program of BPF_PROG_TYPE_SOCKET_FILTER.
const PROG_LOAD: c_long = 5;
const SOCKET_FILTER: u32 = 1;

/// The start of `union bpf_attr` for BPF_PROG_LOAD (include/uapi/linux/bpf.h).
#[repr(C)]
#[derive(Clone, Copy)]
struct LoadAttributes {
    program_type: u32,
    instructions: u32,
    first: u64,
}

/// Instructions of a program that is about to be loaded, if it may be one that frames.
///
/// # Safety
///
/// `attributes` leads to `size` bytes, and they to so many instructions as they say: the kernel demands the same.
pub(crate) unsafe fn about_to_load(command: c_long, attributes: c_long, size: c_long) -> Option<Arc<FramingProgram>> {
    if command != PROG_LOAD || attributes == 0 || (size as usize) < size_of::<LoadAttributes>() {
        return None;
    }
    // SAFETY: there are so many bytes; any are a value.
    let load = unsafe { (attributes as *const LoadAttributes).read_unaligned() };
    if load.program_type != SOCKET_FILTER || load.first == 0 || load.instructions > 1 << 20 {
        return None;
    }
    // SAFETY: the caller has so many instructions of 8 bytes there.
    let code = unsafe { std::slice::from_raw_parts(load.first as *const u8, load.instructions as usize * 8) };
    FramingProgram::from_instructions(code, &Options::default()).ok().map(Arc::new)
}

/// It was loaded, or the process may not: then a descriptor of nothing stands for it.
pub(crate) fn loaded(program: Arc<FramingProgram>, result: Result<c_int, c_int>) -> Result<c_int, c_int> {
    let fd = match result {
        Ok(fd) => fd,
        Err(libc::EPERM | libc::ENOSYS) => {
            let stand_in = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| errno.raw_os_error())?;
            stand_in.into_raw_fd()
        }
        // The verifier's verdict.
        Err(errno) => return Err(errno),
    };
    table::insert(fd, Entry::Program(program));
    Ok(fd)
}
