//! Opening, loading and attaching BPF objects, with what libbpf says when it fails.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;

use ksf_bpf::{Capture, check, is_denial, last_lines, owned, to_io};
use libbpf_rs::{MapCore, MapHandle, Object, ObjectBuilder};

use crate::HopError;

/// Loads an object. Maps that have the name of one of `shared` are that one.
pub(crate) fn load(bytes: &[u8], shared: &[(&str, &MapHandle)]) -> Result<Object, HopError> {
    let capture = Capture::start();
    open_and_load(bytes, shared).map_err(|error| {
        let said = capture.text();
        // The verifier's own refusals come with a log, and often as EACCES.
        let refused = said.contains("BEGIN PROG LOAD LOG");
        if !refused && is_denial(&error) {
            return HopError::not_permitted("load BPF programs");
        }
        HopError::Refused { problem: format!("{error}\n{}", last_lines(&said, 12).join("\n")) }
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

/// Attaches a program to the kernel function it was loaded for, by a link.
pub(crate) fn link_to_function(program: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: no name is needed, and null is how that is said; the kernel has just made the descriptor.
    unsafe { owned(libbpf_sys::bpf_raw_tracepoint_open(ptr::null(), program.as_raw_fd())) }
}

/// Has the program judge the messages of every socket that enters the map from now on. Ends when nobody holds the map.
pub(crate) fn attach_to_map(program: &OwnedFd, map: &MapHandle) -> io::Result<()> {
    let (program, map) = (program.as_raw_fd(), map.as_fd().as_raw_fd());
    // SAFETY: two descriptors that are open, and two numbers.
    check(unsafe { libbpf_sys::bpf_prog_attach(program, map, libbpf_sys::BPF_SK_MSG_VERDICT, 0) }).map(drop)
}
