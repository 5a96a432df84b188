//! From an embedded object to loaded programs, and why the kernel said no.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ksf_bpf::{Capture, last_lines, to_io};
use libbpf_rs::{MapCore, Object, ObjectBuilder};

use crate::sys::Map;

/// Loads an object whose map `ksf_state` is the shared one and whose one constant has that value.
pub(super) fn load(object: &[u8], state: BorrowedFd<'_>, constant: u32) -> io::Result<Object> {
    load_with(object, Some((state, constant)))
}

/// Loads an object that has neither.
pub(crate) fn load_plain(object: &[u8]) -> io::Result<Object> {
    load_with(object, None)
}

fn load_with(object: &[u8], given: Option<(BorrowedFd<'_>, u32)>) -> io::Result<Object> {
    let capture = Capture::start();
    let failed = |error: libbpf_rs::Error| with_words(&to_io(error), &capture.text());
    let mut open = ObjectBuilder::default().open_memory(object).map_err(failed)?;
    for mut map in open.maps_mut() {
        let Some((state, constant)) = given else { break };
        let name = map.name().to_string_lossy().into_owned();
        if name == "ksf_state" {
            map.reuse_fd(state).map_err(failed)?;
        } else if name.ends_with(".rodata") {
            let image = map.initial_value_mut().expect(".rodata has a value");
            // Each object has one constant.
            image[..4].copy_from_slice(&constant.to_ne_bytes());
        }
    }
    open.load().map_err(failed)
}

/// A map of the object, with its own descriptor.
pub(crate) fn map(object: &Object, wanted: &str) -> io::Result<Map> {
    let map = object.maps().find(|map| map.name() == wanted).expect("the object is part of this crate");
    Ok(Map::new(map.as_fd().try_clone_to_owned()?, map.key_size() as usize, map.value_size() as usize))
}

/// The object's one program, with its own descriptor.
pub(super) fn program(object: &Object) -> io::Result<OwnedFd> {
    object.progs().next().expect("the object is part of this crate").as_fd().try_clone_to_owned()
}

/// In words, for people: a missing permission is looked up, not guessed.
pub(crate) fn explain(error: &io::Error) -> String {
    if error.kind() != io::ErrorKind::PermissionDenied {
        return error.to_string();
    }
    // It does without CAP_PERFMON.
    let missing = ksf_bpf::missing_capabilities().into_iter().filter(|name| *name != "CAP_PERFMON");
    match missing.collect::<Vec<_>>() {
        missing if missing.is_empty() => {
            format!(
                "not permitted ({error}), though the capabilities are there: a security module, a seccomp filter or a user namespace"
            )
        }
        missing => format!("not permitted: the process lacks {}", missing.join(" and ")),
    }
}

/// The error, with the last lines that libbpf and the verifier said.
fn with_words(error: &io::Error, output: &str) -> io::Error {
    if error.kind() == io::ErrorKind::PermissionDenied {
        // libbpf's words about it are guesses.
        return io::Error::from_raw_os_error(libc::EPERM);
    }
    let last = last_lines(output, 8).join("; ");
    io::Error::new(error.kind(), format!("{error}: {last}"))
}
