//! The library's variables, for programs that run another with an environment they have cleaned.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicBool, Ordering};

use ksf_accel_proto::message::{ENVIRONMENT, ENVIRONMENT_KEEP, ENVIRONMENT_PORTS};

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
}

// SAFETY: written by the constructor before `known` is set, and never again.
unsafe impl Sync for Remembered {}

static REMEMBERED: Remembered = Remembered {
    known: AtomicBool::new(false),
    inner: UnsafeCell::new(Texts { preload: [0; TEXT_MAX], accel: [0; 256], ports: None, path: 0 }),
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

/// Calls `run` with the environment, and the variables put back if they are missing from it. A program that wants a
/// child without the library passes `KSF_ACCEL=` with nothing.
///
/// # Safety
///
/// `strings` is null or a list of strings that ends with null.
pub(crate) unsafe fn restored<T>(strings: Strings, run: impl FnOnce(Strings) -> T) -> T {
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
