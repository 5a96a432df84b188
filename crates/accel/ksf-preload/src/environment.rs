//! The library's variables, for a program that starts itself anew with an environment it has cleaned (a server that
//! replaces its own program).
//!
//! They are put back for the same program file and the same user only. A child of another user, and any other program, gets
//! what its parent passes: who cleans an environment means it.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

use ksf_accel_proto::message::{ENVIRONMENT, ENVIRONMENT_KEEP, ENVIRONMENT_PORTS};

use rustix::fs::{AtFlags, CWD, Stat};

use crate::descriptor::borrow;
use crate::real::Strings;

const PRELOAD: &[u8] = b"LD_PRELOAD";
/// Longest environment that is put together anew. It lies on the stack: after `vfork()` nothing may be allocated.
const POINTERS_MAX: usize = 512;
const TEXT_MAX: usize = 2048;

/// `LD_PRELOAD=...`, `KSF_ACCEL=...` and `KSF_ACCEL_PORTS=...` with their ends (the last may be missing), and the length of
/// this library's path. Written once, when the library starts: programs overwrite the memory of their environment to show a
/// title in `ps`.
struct Remembered {
    known: AtomicBool,
    inner: UnsafeCell<Texts>,
}

struct Texts {
    preload: [u8; TEXT_MAX],
    accel: [u8; 256],
    ports: Option<[u8; 512]>,
    path: usize,
    user: [u32; 4],
    program: Program,
}

/// The program file that runs now: the file itself, and its path, where another version may lie by the time of an upgrade.
struct Program {
    file: (u64, u64),
    path: [u8; PATH_MAX],
}

const PATH_MAX: usize = 4096;

/// What a call of `exec` or `posix_spawn` names.
#[derive(Clone, Copy)]
pub(crate) enum Target {
    /// A path.
    Path(*const c_char),
    /// A path from the root folder: of a child that may have another working folder by then.
    FromRoot(*const c_char),
    /// A name to be looked for in PATH, or a path if there is a slash in it.
    Name(*const c_char),
    /// An open file.
    Open(c_int),
    /// A path from an open folder.
    At(c_int, *const c_char, c_int),
}

// SAFETY: written by the constructor before `known` is set, and never again.
unsafe impl Sync for Remembered {}

static REMEMBERED: Remembered = Remembered {
    known: AtomicBool::new(false),
    inner: UnsafeCell::new(Texts {
        preload: [0; TEXT_MAX],
        accel: [0; 256],
        ports: None,
        path: 0,
        user: [0; 4],
        program: Program { file: (0, 0), path: [0; PATH_MAX] },
    }),
};

fn remembered() -> Option<&'static Texts> {
    // SAFETY: written before `known` was set, and never again.
    REMEMBERED.known.load(Ordering::Acquire).then(|| unsafe { &*REMEMBERED.inner.get() })
}

/// The value of a variable.
///
/// # Safety
///
/// `strings` is a list of strings that ends with null.
pub(crate) unsafe fn find(strings: Strings, name: &[u8]) -> Option<*const c_char> {
    let mut next = strings;
    // SAFETY: the list ends with null, and this stops there.
    while let Some(string) = unsafe { next.as_ref() }.filter(|string| !string.is_null()) {
        // SAFETY: it is a string.
        let bytes = unsafe { CStr::from_ptr(*string) }.to_bytes();
        if bytes.len() > name.len() && bytes[name.len()] == b'=' && bytes.starts_with(name) {
            // SAFETY: still inside the string, or at its end.
            return Some(unsafe { string.add(name.len() + 1) });
        }
        // SAFETY: there is a further entry, as this was not null.
        next = unsafe { next.add(1) };
    }
    None
}

/// Takes note of the variables that brought the library here. Called once, when the library starts.
pub(crate) fn remember(strings: Strings, accel: &CStr, ports: Option<&CStr>) {
    // SAFETY: the environment, as the dynamic linker passes it.
    let keep = unsafe { find(strings, ENVIRONMENT_KEEP.as_bytes()) };
    // SAFETY: a string of the environment.
    if keep.is_some_and(|keep| unsafe { CStr::from_ptr(keep) } == c"0") {
        return;
    }
    // SAFETY: the constructor runs once, in the only thread; nobody reads before `known`. dladdr writes the
    // description of the object that holds an address, whose path is a string.
    let (texts, path) = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let address = (&raw const REMEMBERED).cast();
        if libc::dladdr(address, &mut info) == 0 || info.dli_fname.is_null() {
            return;
        }
        (&mut *REMEMBERED.inner.get(), CStr::from_ptr(info.dli_fname).to_bytes())
    };
    let fits = put(&mut texts.preload, &[PRELOAD, b"=", path]).is_some()
        && put(&mut texts.accel, &[ENVIRONMENT.as_bytes(), b"=", accel.to_bytes()]).is_some();
    texts.ports = ports.and_then(|ports| {
        let mut text = [0; 512];
        put(&mut text, &[ENVIRONMENT_PORTS.as_bytes(), b"=", ports.to_bytes()])?;
        Some(text)
    });
    texts.path = path.len();
    texts.user = users();
    let Ok(program) = rustix::fs::stat(c"/proc/self/exe") else { return };
    texts.program.file = (program.st_dev, program.st_ino);
    // One byte less than there is room for: the rest stays zero. A path that does not fit is none.
    match rustix::fs::readlinkat_raw(CWD, c"/proc/self/exe", &mut texts.program.path[..PATH_MAX - 1]) {
        Ok(read) if read < PATH_MAX - 1 => {}
        _ => texts.program.path[0] = 0,
    }
    REMEMBERED.known.store(fits, Ordering::Release);
}

/// Puts the parts one after the other, and a NUL. None: they do not fit.
fn put(into: &mut [u8], parts: &[&[u8]]) -> Option<()> {
    let mut at = 0;
    for part in parts.iter().chain(&[&b"\0"[..]]) {
        into.get_mut(at..at + part.len())?.copy_from_slice(part);
        at += part.len();
    }
    Some(())
}

/// Real and effective user and group, and the saved ones if they differ. By the kernel: after `vfork()` and a bare system
/// call, libc knows nothing of it.
fn users() -> [u32; 4] {
    let (mut user, mut group) = ([0u32; 3], [0u32; 3]);
    // SAFETY: both calls write three numbers.
    unsafe {
        libc::syscall(libc::SYS_getresuid, &raw mut user[0], &raw mut user[1], &raw mut user[2]);
        libc::syscall(libc::SYS_getresgid, &raw mut group[0], &raw mut group[1], &raw mut group[2]);
    }
    let effective = |all: [u32; 3]| if all[1] == all[2] { all[1] } else { u32::MAX };
    [user[0], effective(user), group[0], effective(group)]
}

impl Program {
    /// True for this file, or for one that has taken its path since.
    fn is(&self, target: &Stat) -> bool {
        // Such a program would get other rights than this one has.
        if target.st_mode & 0o6000 != 0 {
            return false;
        }
        let file = (target.st_dev, target.st_ino);
        if file == self.file {
            return true;
        }
        let path = CStr::from_bytes_until_nul(&self.path).unwrap_or_default();
        !path.is_empty() && rustix::fs::stat(path).is_ok_and(|now| (now.st_dev, now.st_ino) == file)
    }
}

impl Target {
    /// What `posix_spawnp` takes.
    ///
    /// # Safety
    ///
    /// It is a string.
    pub(crate) unsafe fn named_from_root(name: *const c_char) -> Target {
        // SAFETY: handed on from the caller.
        let is_path = !name.is_null() && unsafe { CStr::from_ptr(name) }.to_bytes().contains(&b'/');
        if is_path { Target::FromRoot(name) } else { Target::Name(name) }
    }

    /// The file, if it can be told.
    ///
    /// # Safety
    ///
    /// Paths and names are strings.
    unsafe fn stat(self) -> Option<Stat> {
        // SAFETY: handed on from the caller.
        let string = |text: *const c_char| (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) });
        match self {
            Target::Path(path) => rustix::fs::stat(string(path)?).ok(),
            Target::FromRoot(path) => {
                rustix::fs::stat(string(path).filter(|path| path.to_bytes().starts_with(b"/"))?).ok()
            }
            Target::Name(name) if string(name)?.to_bytes().contains(&b'/') => rustix::fs::stat(string(name)?).ok(),
            Target::Name(name) => stat_in_path(string(name)?),
            Target::Open(file) => rustix::fs::fstat(borrow(file)).ok(),
            Target::At(_, path, flags) if flags & libc::AT_EMPTY_PATH != 0 && string(path)?.is_empty() => {
                let Target::At(file, ..) = self else { return None };
                rustix::fs::fstat(borrow(file)).ok()
            }
            Target::At(libc::AT_FDCWD, path, _) => rustix::fs::stat(string(path)?).ok(),
            Target::At(folder, path, _) => rustix::fs::statat(borrow(folder), string(path)?, AtFlags::empty()).ok(),
        }
    }
}

/// The first file of that name that PATH has and that can be run, as `execvp` looks for it.
fn stat_in_path(name: &CStr) -> Option<Stat> {
    // SAFETY: the process's environment.
    let path = unsafe { find(crate::exec::own_environment(), b"PATH") };
    // SAFETY: a string of the environment.
    let path = path.map_or(&b"/bin:/usr/bin"[..], |path| unsafe { CStr::from_ptr(path) }.to_bytes());
    for folder in path.split(|byte| *byte == b':') {
        let mut text = [0; PATH_MAX];
        // One that goes by the working folder is not followed: it may be another for the child.
        if !folder.starts_with(b"/") {
            return None;
        }
        put(&mut text, &[folder, b"/", name.to_bytes()])?;
        let file = CStr::from_bytes_until_nul(&text).ok()?;
        if rustix::fs::accessat(CWD, file, rustix::fs::Access::EXEC_OK, AtFlags::EACCESS).is_ok() {
            return rustix::fs::stat(file).ok();
        }
    }
    None
}

/// Calls `run` with the environment, and the variables put back if they are missing from it, the target is this program and
/// the user has not changed since it was started. A program that wants a child without the library passes `KSF_ACCEL=` with
/// nothing.
///
/// # Safety
///
/// `strings` is null or a list of strings that ends with null; the target's path or name is a string.
pub(crate) unsafe fn restored<T>(target: Target, strings: Strings, run: impl FnOnce(Strings) -> T) -> T {
    let Some(texts) = remembered() else { return run(strings) };
    let own: &[u8] = &texts.preload[PRELOAD.len() + 1..PRELOAD.len() + 1 + texts.path];
    let empty = [std::ptr::null()];
    let strings = if strings.is_null() { empty.as_ptr() } else { strings };
    // SAFETY: handed on from the caller; what is found are strings.
    let (accel, preload, ports) = unsafe {
        let read = |name| find(strings, name).map(|value| CStr::from_ptr(value).to_bytes());
        (read(ENVIRONMENT.as_bytes()), read(PRELOAD), read(ENVIRONMENT_PORTS.as_bytes()))
    };
    let loaded = preload.is_some_and(|preload| preload.split(|byte| b": ".contains(byte)).any(|path| path == own));
    let is_whole = accel.is_some() && loaded && (ports.is_some() || texts.ports.is_none());
    if accel.is_some_and(|accel| accel.is_empty()) || is_whole {
        return run(strings);
    }
    // SAFETY: handed on from the caller.
    if users() != texts.user || !unsafe { target.stat() }.is_some_and(|target| texts.program.is(&target)) {
        return run(strings);
    }
    // SAFETY: handed on from the caller.
    unsafe { put_back(texts, own, strings, preload.filter(|_| !loaded), run) }
}

/// Apart, because its frame is large.
///
/// # Safety
///
/// `strings` is a list of strings that ends with null.
#[inline(never)]
unsafe fn put_back<T>(
    texts: &Texts,
    own: &[u8],
    strings: Strings,
    other: Option<&[u8]>,
    run: impl FnOnce(Strings) -> T,
) -> T {
    let mut list = [std::ptr::null(); POINTERS_MAX];
    let mut joined = [0; TEXT_MAX];
    let mut preload = texts.preload.as_ptr();
    if let Some(other) = other {
        if put(&mut joined, &[PRELOAD, b"=", own, b":", other]).is_none() {
            return run(strings);
        }
        preload = joined.as_ptr();
    }
    let mut count = 0;
    let mut next = strings;
    // SAFETY: the list ends with null, and this stops there; its entries are strings.
    unsafe {
        while !(*next).is_null() {
            let bytes = CStr::from_ptr(*next).to_bytes();
            let is = |name: &[u8]| bytes.starts_with(name) && bytes.get(name.len()) == Some(&b'=');
            if ![PRELOAD, ENVIRONMENT.as_bytes(), ENVIRONMENT_PORTS.as_bytes()].into_iter().any(is) {
                if count + 4 >= POINTERS_MAX {
                    return run(strings);
                }
                list[count] = *next;
                count += 1;
            }
            next = next.add(1);
        }
    }
    list[count] = preload.cast();
    list[count + 1] = texts.accel.as_ptr().cast();
    if let Some(ports) = &texts.ports {
        list[count + 2] = ports.as_ptr().cast();
    }
    run(list.as_ptr())
}
