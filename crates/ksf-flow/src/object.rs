//! Opening and loading objects, with what libbpf says when it fails.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::{MapCore, MapHandle, Object, ObjectBuilder, OpenObject, PrintCallback, PrintLevel};

use crate::FlowError;

/// `BPF_F_XDP_HAS_FRAGS` of linux/bpf.h, kernel 5.18.
const XDP_HAS_FRAGS: u32 = 1 << 5;

/// An object on its way into the kernel. libbpf has one printer per process, so loads take turns.
pub(crate) struct Loading {
    pub(crate) object: OpenObject,
    name: String,
    output: Output,
}

impl Loading {
    pub(crate) fn open(name: &str, bytes: &[u8]) -> Result<Self, FlowError> {
        let output = Output::capture();
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
            if !refused && matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) {
                return FlowError::not_permitted("load BPF programs");
            }
            FlowError::Refused { object: name, problem: format!("{error}\n{}", last_lines(&said)) }
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

/// Makes a link: it ends with its descriptor, so also with the process.
pub(crate) fn link(
    program: &OwnedFd,
    target: i32,
    kind: libbpf_sys::bpf_attach_type,
    flags: u32,
) -> io::Result<OwnedFd> {
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags,
        ..Default::default()
    };
    // SAFETY: `opts` is valid for the call and says its size.
    let fd = unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), target, kind, &raw const opts) };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
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

/// Collects what libbpf prints while it lives.
struct Output {
    before: Option<(PrintLevel, PrintCallback)>,
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());
static TEXT: Mutex<String> = Mutex::new(String::new());

impl Output {
    fn capture() -> Self {
        fn collect(_: PrintLevel, text: String) {
            TEXT.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
        }
        // A panic in another load leaves nothing half-done here.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        TEXT.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Self { before: libbpf_rs::set_print(Some((PrintLevel::Warn, collect))), _turn: turn }
    }

    fn text(&self) -> String {
        TEXT.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        libbpf_rs::set_print(self.before.take());
    }
}
