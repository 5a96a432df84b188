//! What the kernel tells of a program.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::link::{check, owned};

/// All that it tells, without lists: the pointers in it are null.
pub fn program_info(program: BorrowedFd<'_>) -> io::Result<libbpf_sys::bpf_prog_info> {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut bytes = size_of_val(&info) as u32;
    // SAFETY: `info` is writable for `bytes` bytes, zeroed (no pointers for the kernel to follow), and the call says
    // how much it wrote.
    let rc = unsafe { libbpf_sys::bpf_obj_get_info_by_fd(program.as_raw_fd(), (&raw mut info).cast(), &raw mut bytes) };
    check(rc)?;
    Ok(info)
}

/// The program's id.
pub fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    program_info(program).map(|info| info.id)
}

/// Name of the program with this id.
pub fn program_name(id: u32) -> io::Result<String> {
    // SAFETY: takes a number; the kernel has just made the descriptor.
    let fd = unsafe { owned(libbpf_sys::bpf_prog_get_fd_by_id(id)) }?;
    let name = program_info(fd.as_fd())?.name;
    let name: Vec<u8> = name.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8).collect();
    Ok(String::from_utf8_lossy(&name).into_owned())
}
