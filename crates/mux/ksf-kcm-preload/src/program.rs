//! Framing programs: remembered when they are loaded, so that the interpreter can run them.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_long};
use std::os::fd::IntoRawFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};

use ksf_bpf_framing::{FramingOptions, FramingProgram};
use rustix::event::{EventfdFlags, eventfd};

use crate::notice;
use crate::table::{self, Entry, lock};

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
    FramingProgram::from_instructions(code, &FramingOptions::default()).ok().map(Arc::new)
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
    if let Some(name) = name_of(fd) {
        let mut known = lock(&KNOWN);
        known.insert(name, Arc::clone(&program));
        if known.len() > KNOWN_MAX {
            known.pop_first();
        }
    }
    table::insert(fd, Entry::Program(program));
    Ok(fd)
}

/// Programs loaded here, by the number that the kernel gave them, in order: they may come back by another descriptor.
static KNOWN: Mutex<BTreeMap<Name, Arc<FramingProgram>>> = Mutex::new(BTreeMap::new());
/// Enough for any program; one that loads for ever gets no larger.
const KNOWN_MAX: usize = 1024;

/// The programs, locked while no handler can run.
pub(crate) type Locked = MutexGuard<'static, BTreeMap<Name, Arc<FramingProgram>>>;

pub(crate) fn locked() -> Locked {
    lock(&KNOWN)
}

/// What the kernel calls the thing behind a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Name {
    /// A program that was loaded.
    Program(u32),
    /// What stands for one where none may be loaded.
    StandIn(u32),
}

/// The program behind a descriptor that is open. Fails with EINVAL if it is none, as AF_KCM does, and with ENOEXEC if it
/// is one whose instructions were never seen: the kernel gives back only what it has made of them, which needs its
/// memory to run.
pub(crate) fn of_descriptor(fd: c_int) -> Result<Arc<FramingProgram>, c_int> {
    if let Some(Entry::Program(program)) = table::find(fd) {
        return Ok(program);
    }
    let name = name_of(fd).ok_or(libc::EINVAL)?;
    let known = lock(&KNOWN).get(&name).cloned();
    match (known, name) {
        (Some(program), _) => Ok(program),
        (None, Name::StandIn(_)) => Err(libc::EINVAL),
        (None, Name::Program(number)) => {
            static TOLD: AtomicBool = AtomicBool::new(false);
            notice::once(
                &TOLD,
                format_args!(
                    "the framing program of descriptor {fd} (number {number}) was loaded by another process, or not by \
                     a function of libc: its instructions are not known (ENOEXEC)"
                ),
            );
            Err(libc::ENOEXEC)
        }
    }
}

/// By /proc/self/fdinfo, which asks for no rights.
fn name_of(fd: c_int) -> Option<Name> {
    use rustix::fs::{Mode, OFlags};
    let path = format!("/proc/self/fdinfo/{fd}");
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = [0; 1024];
    let count = rustix::io::read(&file, &mut bytes).ok()?;
    name_in(std::str::from_utf8(&bytes[..count]).ok()?)
}

fn name_in(info: &str) -> Option<Name> {
    let value = |name: &str| {
        let mut lines = info.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(of, _)| *of == name).and_then(|(_, value)| value.trim().parse::<u32>().ok())
    };
    match value("prog_type") {
        Some(SOCKET_FILTER) => value("prog_id").map(Name::Program),
        Some(_) => None,
        None => value("eventfd-id").map(Name::StandIn),
    }
}
