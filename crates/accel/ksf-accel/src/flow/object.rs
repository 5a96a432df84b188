//! Opening and loading objects, with what libbpf says when it fails.

use std::os::fd::{AsFd, OwnedFd};

use ksf_bpf::{Capture, is_denial, last_lines, to_io};
use libbpf_rs::{MapCore, MapHandle, Object, ObjectBuilder, OpenObject};

use super::FlowError;

/// `BPF_F_XDP_HAS_FRAGS` of linux/bpf.h, kernel 5.18.
const XDP_HAS_FRAGS: u32 = 1 << 5;

/// An object on its way into the kernel. libbpf has one printer per process, so loads take turns.
pub(crate) struct Loading {
    pub(crate) object: OpenObject,
    name: String,
    output: Capture,
}

impl Loading {
    pub(crate) fn open(name: &str, bytes: &[u8]) -> Result<Self, FlowError> {
        let output = Capture::start();
        let object = ObjectBuilder::default().open_memory(bytes).map_err(|error| FlowError::BadPolicy {
            object: name.to_owned(),
            problem: format!("is not a BPF object ({error})"),
        })?;
        Ok(Self { object, name: name.to_owned(), output })
    }

    /// Whether the XDP programs take frames of several buffers. All programs of a chain must agree.
    pub(crate) fn set_frags(&mut self, frags: bool) {
        if frags {
            self.object.progs_mut().for_each(|mut program| program.set_flags(XDP_HAS_FRAGS));
        }
    }

    pub(crate) fn load(self) -> Result<Object, FlowError> {
        let Self { object, name, output } = self;
        object.load().map_err(|error| {
            let error = to_io(&error);
            let said = output.text();
            // The verifier's own refusals come with a log, and often as EACCES.
            let refused = said.contains("BEGIN PROG LOAD LOG");
            if !refused && is_denial(&error) {
                return FlowError::not_permitted("load BPF programs");
            }
            FlowError::Refused { object: name, problem: format!("{error}\n{}", last_lines(&said, 12).join("\n")) }
        })
    }
}

/// The named map of a loaded object, with a descriptor of its own.
pub(crate) fn map(object: &Object, name: &str) -> Result<MapHandle, FlowError> {
    let map = object.maps().find(|map| map.name() == name).ok_or_else(|| missing("map", name))?;
    MapHandle::try_from(&map).map_err(|error| FlowError::system("keeping a map", to_io(&error)))
}

/// The named program of a loaded object, with a descriptor of its own.
pub(crate) fn program(object: &Object, name: &str) -> Result<OwnedFd, FlowError> {
    let program = object.progs().find(|program| program.name() == name).ok_or_else(|| missing("program", name))?;
    program.as_fd().try_clone_to_owned().map_err(|error| FlowError::system("keeping a program", error))
}

fn missing(what: &str, name: &str) -> FlowError {
    FlowError::BadPolicy { object: "built-in object".into(), problem: format!("has no {what} {name}") }
}
