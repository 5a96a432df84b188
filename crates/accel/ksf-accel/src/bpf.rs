//! From an object to loaded programs and maps, with what libbpf and the verifier say where that fails.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ksf_bpf::{Capture, is_denial, last_lines, to_io};
use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder, OpenObject};

/// An object on its way into the kernel. libbpf has one printer per process, so loads take turns.
pub(crate) struct Loading {
    pub(crate) object: OpenObject,
    output: Capture,
}

/// Why an object was not loaded.
pub(crate) struct LoadError {
    error: io::Error,
    said: String,
}

impl Loading {
    pub(crate) fn open(bytes: &[u8]) -> Result<Self, LoadError> {
        let output = Capture::start();
        match ObjectBuilder::default().open_memory(bytes) {
            Ok(object) => Ok(Self { object, output }),
            Err(error) => Err(LoadError { error: to_io(&error), said: output.text() }),
        }
    }

    pub(crate) fn load(self) -> Result<Object, LoadError> {
        let Self { object, output } = self;
        object.load().map_err(|error| LoadError { error: to_io(&error), said: output.text() })
    }
}

impl LoadError {
    /// A right is missing. The verifier's own refusals come with a log, and often as EACCES.
    pub(crate) fn is_denial(&self) -> bool {
        is_denial(&self.error) && !self.said.contains("BEGIN PROG LOAD LOG")
    }

    /// The error, and on lines of their own the last that were said.
    pub(crate) fn text(&self) -> String {
        format!("{}\n{}", self.error, last_lines(&self.said, 12).join("\n"))
    }
}

impl From<LoadError> for io::Error {
    fn from(LoadError { error, said }: LoadError) -> Self {
        if error.kind() == io::ErrorKind::PermissionDenied {
            // libbpf's words about it are guesses.
            return error;
        }
        io::Error::new(error.kind(), format!("{error}: {}", last_lines(&said, 8).join("; ")))
    }
}

/// The named map of a loaded object, with a descriptor of its own.
pub(crate) fn map(object: &Object, name: &str) -> io::Result<MapHandle> {
    let map = object.maps().find(|map| map.name() == name).ok_or_else(|| missing("map", name))?;
    MapHandle::try_from(&map).map_err(to_io)
}

/// The named program of a loaded object, with a descriptor of its own.
pub(crate) fn program(object: &Object, name: &str) -> io::Result<OwnedFd> {
    let program = object.progs().find(|program| program.name() == name).ok_or_else(|| missing("program", name))?;
    program.as_fd().try_clone_to_owned()
}

fn missing(what: &str, name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("the object has no {what} {name}"))
}

/// Sets an entry of a map.
pub(crate) fn put(map: &MapHandle, key: &[u8], value: &[u8]) -> io::Result<()> {
    map.update(key, value, MapFlags::ANY).map_err(to_io)
}

/// Removes an entry of a map. What is not there is not missed.
pub(crate) fn delete(map: &MapHandle, key: &[u8]) -> io::Result<()> {
    match map.delete(key) {
        Err(error) if error.kind() == libbpf_rs::ErrorKind::NotFound => Ok(()),
        result => result.map_err(to_io),
    }
}

/// Name and id of a program, as far as they can be told.
pub(crate) fn named(id: u32) -> String {
    match ksf_bpf::program_name(id) {
        Ok(name) if !name.is_empty() => format!("{name} (id {id})"),
        _ => format!("id {id}"),
    }
}
