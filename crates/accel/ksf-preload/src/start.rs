//! The library's start, before `main`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use ksf_accel_proto::message::{Answer, ENVIRONMENT, ENVIRONMENT_PORTS, Refusal};
use ksf_accel_proto::state::State;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::{accept, environment, holder, listener, pin, ports, process, real};

/// Descriptors that are looked at for listeners that came with `exec`: systemd, inetd and servers that replace their
/// own program pass low ones.
const INHERITED_MAX: c_int = 64;

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = start;

/// The key whose destructor sees a thread end, plus 1; 0: none.
static KEY: AtomicU32 = AtomicU32::new(0);

/// glibc and musl call this with `main`'s arguments; where nothing is set in the environment, nothing is done, now and
/// later.
extern "C" fn start(_count: c_int, _arguments: *const *const c_char, strings: *const *const c_char) {
    let errno = ksf_interpose::errno::errno();
    let _ = begin(strings);
    ksf_interpose::errno::set_errno(errno);
}

fn begin(strings: *const *const c_char) -> Option<()> {
    real::find_all();
    ksf_interpose::abort_on_panic("ksf accel");
    // SAFETY: reads what the kernel has told of this program. A setuid program gets here only with a library that its
    // administrator has installed for such programs; it is not to listen to the caller's environment.
    if unsafe { libc::getauxval(libc::AT_SECURE) } != 0 || strings.is_null() {
        return None;
    }
    // SAFETY: the environment, as the dynamic linker passes it: what is found are strings.
    let (value, ports) = unsafe {
        let find = |name: &str| environment::find(strings, name.as_bytes()).map(|value| CStr::from_ptr(value));
        (find(ENVIRONMENT), find(ENVIRONMENT_PORTS))
    };
    if let Some(ports) = ports {
        ports::set(ports);
    }
    let value = value?;
    holder::set_address(value.to_bytes())?;
    match holder::greet() {
        Ok(greeted) if greeted.answer == (Answer::Refused { reason: Refusal::Version }) => {
            say(Refusal::Version.text());
            return None;
        }
        Ok(greeted) => share(greeted.descriptors)?,
        Err(Errno::TIMEDOUT) => say("the holder does not answer yet; it is asked again when the program accepts"),
        Err(_) => return None,
    }
    // SAFETY: both functions are there for as long as the library is; it is never unloaded.
    unsafe {
        let mut key = 0;
        if libc::pthread_key_create(&mut key, Some(thread_ended)) == 0 {
            KEY.store(key + 1, Ordering::Relaxed);
        }
        libc::pthread_atfork(None, None, Some(forked));
    }
    environment::remember(strings, value, ports);
    process::begin()?;
    let entered = process::enter()?;
    if process::state().is_none() {
        holder::leave_alone(entered.process);
    }
    adopt(&entered);
    Some(())
}

/// Maps what the answer to a greeting brings, for good: the shared memory and the lifetime memfd. None: it is not there, or
/// cannot be mapped.
pub(crate) fn share([memory, lifetime]: [Option<OwnedFd>; 2]) -> Option<()> {
    let state = map::<State>(&memory?, ProtFlags::READ | ProtFlags::WRITE)?;
    // The mapping keeps the open file description, and with it the holder's lock, until the last process that has
    // inherited it ends or execs. It begins with the secret by which the holder knows them.
    if let Some(secret) = lifetime.and_then(|lifetime| map::<[u8; 16]>(&lifetime, ProtFlags::READ)) {
        // SAFETY: mapped for good; the holder has sealed it against writing.
        holder::set_secret(unsafe { secret.read() });
    }
    process::set_state(state);
    Some(())
}

unsafe extern "C" fn forked() {
    process::forked();
    pin::forked();
}

unsafe extern "C" fn thread_ended(instance: *mut c_void) {
    accept::thread_ended(instance);
}

/// Has [`accept::thread_ended`] called at this thread's end.
pub(crate) fn note_thread(instance: usize) {
    if let Some(key) = KEY.load(Ordering::Relaxed).checked_sub(1) {
        // SAFETY: the key exists. The value is a number, never followed.
        unsafe { libc::pthread_setspecific(key, (instance + 1) as *const c_void) };
    }
}

/// Maps shared memory for good.
fn map<T>(fd: &OwnedFd, protection: ProtFlags) -> Option<*mut T> {
    let stat = rustix::fs::fstat(fd).ok()?;
    // A file that is too short would end the program when it is touched. A BPF map has no size here, but the kernel
    // refuses to map more than it holds.
    let is_file = rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile;
    if is_file && (stat.st_size as u64) < size_of::<T>() as u64 {
        return None;
    }
    // SAFETY: a new mapping at an address that the kernel chooses.
    let memory = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size_of::<T>(), protection, MapFlags::SHARED, fd, 0) };
    Some(memory.ok()?.cast())
}

/// Learns which descriptors were listeners before this program began, or may become some.
fn adopt(entered: &process::Entered) {
    for fd in 0..INHERITED_MAX {
        if listener::may_listen(fd) {
            listener::meet(entered, fd);
        }
    }
}

fn say(what: &str) {
    let standard_error = crate::descriptor::borrow(2);
    for part in ["ksf accel: ", what, "\n"] {
        let _ = rustix::io::write(standard_error, part.as_bytes());
    }
}
