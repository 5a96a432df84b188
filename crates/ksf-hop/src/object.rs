//! Opening, loading and attaching BPF objects, with what libbpf says when it fails.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use libbpf_rs::{MapCore, MapHandle, Object, ObjectBuilder, PrintLevel};

use crate::HopError;

static TURN: Mutex<()> = Mutex::new(());
static SAID: Mutex<String> = Mutex::new(String::new());

/// Loads an object. Maps that have the name of one of `shared` are that one.
pub(crate) fn load(bytes: &[u8], shared: &[(&str, &MapHandle)]) -> Result<Object, HopError> {
    fn collect(_: PrintLevel, text: String) {
        SAID.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
    }
    // libbpf has one printer per process, so loads take turns. A panic in another one leaves nothing half-done here.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    SAID.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let before = libbpf_rs::set_print(Some((PrintLevel::Warn, collect)));
    let loaded = open_and_load(bytes, shared);
    libbpf_rs::set_print(before);
    loaded.map_err(|error| {
        let said = SAID.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // The verifier's own refusals come with a log, and often as EACCES.
        let refused = said.contains("BEGIN PROG LOAD LOG");
        if !refused && matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) {
            return HopError::not_permitted("load BPF programs");
        }
        HopError::Refused { problem: format!("{error}\n{}", last_lines(&said)) }
    })
}

fn open_and_load(bytes: &[u8], shared: &[(&str, &MapHandle)]) -> io::Result<Object> {
    let mut open = ObjectBuilder::default().open_memory(bytes).map_err(|error| to_io(&error))?;
    for mut map in open.maps_mut() {
        let name = map.name().to_owned();
        if let Some((_, handle)) = shared.iter().find(|(shared, _)| name == *shared) {
            map.reuse_fd(handle.as_fd()).map_err(|error| to_io(&error))?;
        }
    }
    open.load().map_err(|error| to_io(&error))
}

/// The named map of a loaded object, with a descriptor of its own.
pub(crate) fn map(object: &Object, name: &str) -> Result<MapHandle, HopError> {
    let map = object.maps().find(|map| map.name() == name).ok_or_else(|| missing(name))?;
    MapHandle::try_from(&map).map_err(|error| HopError::system("keeping a map", to_io(&error)))
}

/// The named program of a loaded object, with a descriptor of its own.
pub(crate) fn program(object: &Object, name: &str) -> Result<OwnedFd, HopError> {
    let program = object.progs().find(|program| program.name() == name).ok_or_else(|| missing(name))?;
    program.as_fd().try_clone_to_owned().map_err(|error| HopError::system("keeping a program", error))
}

fn missing(name: &str) -> HopError {
    HopError::Refused { problem: format!("the object has no {name}") }
}

/// Attaches a program to a cgroup by a link: it ends with its descriptor, so also with the process.
pub(crate) fn link_to_cgroup(
    program: &OwnedFd,
    cgroup: RawFd,
    kind: libbpf_sys::bpf_attach_type,
) -> io::Result<OwnedFd> {
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: `opts` is valid for the call and says its size.
    owned(unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), cgroup, kind, &raw const opts) })
}

/// Attaches a program to the kernel function it was loaded for, by a link.
pub(crate) fn link_to_function(program: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: no name is needed, and null is how that is said; the descriptor is open.
    owned(unsafe { libbpf_sys::bpf_raw_tracepoint_open(ptr::null(), program.as_raw_fd()) })
}

/// Has the program judge the messages of every socket that enters the map from now on. Ends when nobody holds the map.
pub(crate) fn attach_to_map(program: &OwnedFd, map: &MapHandle) -> io::Result<()> {
    let (program, map) = (program.as_raw_fd(), map.as_fd().as_raw_fd());
    // SAFETY: two descriptors that are open, and two numbers.
    let result = unsafe { libbpf_sys::bpf_prog_attach(program, map, libbpf_sys::BPF_SK_MSG_VERDICT, 0) };
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn to_io(error: &libbpf_rs::Error) -> io::Error {
    let kind = match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => return io::Error::from_raw_os_error(libc::EPERM),
        libbpf_rs::ErrorKind::NotFound => io::ErrorKind::NotFound,
        libbpf_rs::ErrorKind::OutOfMemory => io::ErrorKind::OutOfMemory,
        libbpf_rs::ErrorKind::InvalidInput | libbpf_rs::ErrorKind::InvalidData => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error.to_string())
}

/// The last lines that say something, without the verifier's statistics.
fn last_lines(log: &str) -> String {
    const LINES: usize = 12;
    let is_news = |line: &&str| {
        let line = line.trim();
        !(line.is_empty()
            || line.starts_with("processed ")
            || line.starts_with("libbpf: failed to load")
            || line.contains("END PROG LOAD LOG"))
    };
    let lines: Vec<&str> = log.lines().filter(is_news).collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
