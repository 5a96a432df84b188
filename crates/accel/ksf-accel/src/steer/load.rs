//! The program that chooses queues, and why the kernel does not take them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ksf_bpf::to_io;
use libbpf_rs::Object;

use crate::bpf::Loading;

/// Loads an object whose map `ksf_state` is the shared one and whose one constant has that value.
pub(super) fn load(object: &[u8], state: BorrowedFd<'_>, constant: u32) -> io::Result<Object> {
    let mut loading = Loading::open(object)?;
    for mut map in loading.object.maps_mut() {
        let name = map.name().to_string_lossy().into_owned();
        if name == "ksf_state" {
            map.reuse_fd(state).map_err(to_io)?;
        } else if name.ends_with(".rodata") {
            let image = map.initial_value_mut().expect(".rodata has a value");
            // Each object has one constant.
            image[..4].copy_from_slice(&constant.to_ne_bytes());
        }
    }
    Ok(loading.load()?)
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
