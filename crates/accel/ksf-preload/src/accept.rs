//! `accept()` of a listener: from the worker's own queue, then from the listener, then from a queue that nobody serves.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use ksf_accel_proto::message::{Answer, Request};
use ksf_accel_proto::state::Worker;
use ksf_interpose::errno::{errno, fail, set_errno};
use libc::{sockaddr, socklen_t};
use rustix::fs::{OFlags, fcntl_getfl};

use crate::descriptor::{self, borrow};
use crate::process::{enter, is_on, now_ns, process, state};
use crate::table::{self, DescriptorKind, Entry, INSTANCES, Instance, LISTENERS};
use crate::{adopt, holder, interrupt, listener, pin, real, wait, worker};

/// One in so many calls looks at the listener first: a queue that is never empty must not starve it. It looks for calls
/// for help without a hint, too.
const LISTENER_FIRST: u32 = 16;
const NONBLOCKING: u32 = 1;
const BLOCKING: u32 = 2;

thread_local! {
    /// The instance that this thread is itself, because it blocks in `accept()`, plus 1; 0: none.
    static BLOCKED: Cell<u32> = const { Cell::new(0) };
}

/// The caller's call: `accept4`, or `accept`, whose flags are none.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) fd: c_int,
    pub(crate) address: *mut sockaddr,
    pub(crate) length: *mut socklen_t,
    pub(crate) flags: Option<c_int>,
}

impl Call {
    /// The same call of another socket.
    fn of(self, fd: c_int) -> c_int {
        // SAFETY: the caller's call, of a socket that listens as well.
        unsafe {
            match self.flags {
                Some(flags) => real::accept4(fd, self.address, self.length, flags),
                None => real::accept(fd, self.address, self.length),
            }
        }
    }

    /// [`Call::of`] where the thread must not be cancelled. `errno` as libc has it.
    fn of_uncancelled(self, fd: c_int) -> c_int {
        // SAFETY: as above.
        let result =
            unsafe { libc::syscall(libc::SYS_accept4, fd, self.address, self.length, self.flags.unwrap_or(0)) };
        result as c_int
    }
}

/// `accept` of any descriptor.
#[inline]
pub(crate) fn accept(call: Call) -> c_int {
    match table::kind(call.fd) {
        DescriptorKind::Listener(slot) => of_listener(call, slot),
        DescriptorKind::None | DescriptorKind::MayListen if process().is_some() => met(call),
        _ => call.of(call.fd),
    }
}

/// A descriptor that did not listen, or was never looked at: a listener from a parent, from another process, or a duplicate.
#[cold]
fn met(call: Call) -> c_int {
    let slot = enter().and_then(|entered| listener::meet(&entered, call.fd));
    match slot {
        Some(slot) => of_listener(call, slot),
        None => call.of(call.fd),
    }
}

fn of_listener(call: Call, slot: usize) -> c_int {
    let before = errno();
    let serves = |index: &usize| worker::entry(*index, slot).is_some();
    let result = match wait::current().filter(serves).or_else(|| adopt::adopt(slot, call.fd)) {
        Some(index) => {
            worker::renew(index, slot, call.fd);
            by_worker(call, slot, index)
        }
        None => by_other(call, slot),
    };
    if result >= 0 {
        set_errno(before);
    }
    result
}

/// By a thread that has waited on an instance that watches the listener.
fn by_worker(call: Call, slot: usize, index: usize) -> c_int {
    let instance = &INSTANCES[index];
    let Some(entry) = worker::entry(index, slot) else { return call.of(call.fd) };
    let turn = instance.turn.fetch_add(1, Ordering::Relaxed);
    let is_turn = turn % LISTENER_FIRST == LISTENER_FIRST - 1;
    let hint = if is_turn { Hint::Ignored } else { Hint::Heeded };
    if is_turn || !is_on() {
        let result = from_listener(call, instance, entry);
        if !is_empty(result) {
            return result;
        }
        let found = from_rescue(call, slot, instance, entry, hint);
        return found.or_else(|| from_queue(call, slot, index, entry)).unwrap_or_else(|| fail(libc::EAGAIN));
    }
    if let Some(accepted) = from_queue(call, slot, index, entry) {
        return accepted;
    }
    let result = from_listener(call, instance, entry);
    if !is_empty(result) {
        return result;
    }
    from_rescue(call, slot, instance, entry, hint).unwrap_or_else(|| fail(libc::EAGAIN))
}

fn is_empty(result: c_int) -> bool {
    result < 0 && errno() == libc::EAGAIN
}

fn count(instance: &Instance, counter: impl FnOnce(&Worker) -> &std::sync::atomic::AtomicU64) {
    if let Some(worker) = worker::shared(instance) {
        counter(worker).fetch_add(1, Ordering::Relaxed);
    }
}

/// None: nothing there.
fn from_queue(call: Call, slot: usize, index: usize, entry: &Entry) -> Option<c_int> {
    let queue = entry.queue.load()?;
    let result = call.of(queue);
    if result >= 0 {
        count(&INSTANCES[index], |worker| &worker.accepted_own);
        return Some(result);
    }
    match errno() {
        libc::EAGAIN => None,
        libc::EBADF | libc::ENOTSOCK | libc::EINVAL | libc::EOPNOTSUPP => {
            worker::lose_queue(index, slot, queue);
            None
        }
        // The program's to deal with: too many open files, a connection that is gone.
        _ => Some(result),
    }
}

fn from_listener(call: Call, instance: &Instance, entry: &Entry) -> c_int {
    let result = call.of(call.fd);
    if result >= 0 {
        let is_queue = entry.queue.load().is_none();
        count(instance, |worker| if is_queue { &worker.accepted_own } else { &worker.accepted_fallback });
    }
    result
}

/// What to make of `Control::rescue_pending`: it may be wrong for a moment, where a process is killed between the hint and the
/// call. Who looks all the same now and then does not wake up for a call it never sees.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hint {
    Heeded,
    Ignored,
}

/// From a queue that needs somebody, if the holder has called for help. None: nothing there.
fn from_rescue(call: Call, slot: usize, instance: &Instance, entry: &Entry, hint: Hint) -> Option<c_int> {
    let rescue = entry.rescue.load()?;
    if hint == Hint::Heeded && !is_rescue_pending(slot) {
        return None;
    }
    let mut calls = [0; 8];
    rustix::io::read(borrow(rescue), &mut calls).ok()?;
    // Threads that help at once must not take a descriptor that another is about to replace.
    let entered = enter()?;
    let listener = &LISTENERS[slot];
    let worker = instance.worker.load(Ordering::Relaxed).checked_sub(1)?;
    let cookie = listener.cookie.load(Ordering::Relaxed);
    // A socket of the program's own is let go of at once: it gets connections as long as a process has it, and the
    // holder looks at it no more once it was empty and its worker had ended.
    let keeps = entry.queue.load().is_some();
    for asked in [false, true] {
        if asked {
            let reply = holder::ask(entered.process, &Request::Steal { cookie, worker }, Some(call.fd))?;
            let Answer::Done { found: 1.., .. } = reply.answer else { return None };
            let [Some(queue), ..] = reply.descriptors else { return None };
            if let Some(last) = listener.stolen.take() {
                descriptor::release(last);
            }
            listener.stolen.store(descriptor::keep(queue).ok());
        }
        let Some(queue) = listener.stolen.load() else { continue };
        let result = call.of_uncancelled(queue);
        let error = errno();
        if !keeps && let Some(last) = listener.stolen.take() {
            descriptor::release(last);
            set_errno(error);
        }
        if result >= 0 {
            count(instance, |worker| &worker.accepted_stolen);
            // There may be more: the next look, by whomever, shall come here again.
            pass_rescue_on(slot, rescue);
            return Some(result);
        }
        if errno() == libc::EMFILE || errno() == libc::ENFILE {
            pass_rescue_on(slot, rescue);
            return Some(result);
        }
    }
    None
}

/// True where the holder, or a worker, may have called for help.
fn is_rescue_pending(slot: usize) -> bool {
    let bit = 1u64 << LISTENERS[slot].index.load(Ordering::Relaxed);
    state().is_some_and(|state| state.control.rescue_pending.load(Ordering::SeqCst) & bit != 0)
}

/// Asks for another rescue: there may be more to take.
fn pass_rescue_on(slot: usize, rescue: c_int) {
    let bit = 1u64 << LISTENERS[slot].index.load(Ordering::Relaxed);
    let note = || state().map(|state| state.control.rescue_pending.fetch_or(bit, Ordering::SeqCst));
    // Before, for who wakes up at once; and after, because the holder clears what it does not see called.
    note();
    let _ = rustix::io::write(borrow(rescue), &1u64.to_ne_bytes());
    note();
}

/// By a thread that has not: it was handed the event, or polls, or blocks.
fn by_other(call: Call, slot: usize) -> c_int {
    if is_blocking(call.fd, slot) {
        return by_blocking(call, slot);
    }
    let mut watched = None;
    for (index, instance) in table::instances() {
        let Some(entry) = worker::entry(index, slot) else { continue };
        watched.get_or_insert((instance, entry));
        if let Some(accepted) = from_queue(call, slot, index, entry) {
            return accepted;
        }
    }
    let Some((instance, entry)) = watched else { return call.of(call.fd) };
    let result = from_listener(call, instance, entry);
    if !is_empty(result) {
        return result;
    }
    from_rescue(call, slot, instance, entry, Hint::Ignored).unwrap_or_else(|| fail(libc::EAGAIN))
}

/// As it was seen first; where it matters, `by_blocking` looks again.
fn is_blocking(fd: c_int, slot: usize) -> bool {
    let mode = &LISTENERS[slot].mode;
    match mode.load(Ordering::Relaxed) {
        NONBLOCKING => false,
        BLOCKING => true,
        _ => {
            let nonblocking = fcntl_getfl(borrow(fd)).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK));
            mode.store(if nonblocking { NONBLOCKING } else { BLOCKING }, Ordering::Relaxed);
            !nonblocking
        }
    }
}

/// A thread that blocks in `accept()` is a worker, and ready while it does.
fn by_blocking(call: Call, slot: usize) -> c_int {
    let Some(index) = blocked_instance(slot, call.fd) else { return call.of(call.fd) };
    worker::renew(index, slot, call.fd);
    let instance = &INSTANCES[index];
    let Some(entry) = worker::entry(index, slot) else { return call.of(call.fd) };
    if let Some(worker) = worker::shared(instance) {
        worker.busy_since_ns.store(0, Ordering::Relaxed);
        if worker.stalled.load(Ordering::Relaxed) != 0 {
            worker.stalled.store(0, Ordering::Relaxed);
        }
    }
    // A thread that is cancelled while it waits leaves the bit behind, until its end is seen.
    worker::set_ready(instance, slot, true);
    let result = blocking(call, slot, index, entry);
    worker::set_ready(instance, slot, false);
    if let Some(worker) = worker::shared(instance) {
        worker.busy_since_ns.store(now_ns(), Ordering::Relaxed);
    }
    result
}

fn blocking(call: Call, slot: usize, index: usize, entry: &Entry) -> c_int {
    let instance = &INSTANCES[index];
    let turn = instance.turn.fetch_add(1, Ordering::Relaxed);
    if turn % LISTENER_FIRST != LISTENER_FIRST - 1
        && let Some(accepted) = from_queue(call, slot, index, entry)
    {
        return accepted;
    }
    if fcntl_getfl(borrow(call.fd)).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
        LISTENERS[slot].mode.store(NONBLOCKING, Ordering::Relaxed);
        return from_listener(call, instance, entry);
    }
    let limit_ns = receive_timeout_ns(call.fd);
    let deadline_ns = limit_ns.map(|limit| now_ns().saturating_add(limit));
    loop {
        // With a time limit it is never restarted (inet_csk_accept, sock_intr_errno).
        let held = if limit_ns.is_none() { interrupt::hold() } else { None };
        let signals = held.as_ref().map(|held| held.fd);
        let sources = [Some(call.fd), entry.queue.load(), entry.rescue.load(), signals];
        // poll() ignores negative numbers.
        let mut set = sources.map(|fd| libc::pollfd { fd: fd.unwrap_or(-1), events: libc::POLLIN, revents: 0 });
        let left = deadline_ns.map(|deadline| {
            let left = deadline.saturating_sub(now_ns());
            libc::timespec { tv_sec: (left / 1_000_000_000) as _, tv_nsec: (left % 1_000_000_000) as _ }
        });
        let left = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mask = held.as_ref().map_or(std::ptr::null(), |held| &raw const held.mask);
        // SAFETY: as many entries as are said, a timeout or none, a mask or none. libc's: accept() is where a thread may be
        // cancelled.
        let ready = unsafe { libc::ppoll(set.as_mut_ptr(), set.len() as _, left, mask) };
        if ready < 0 && errno() == libc::EINTR {
            if limit_ns.is_none() && interrupt::restarts() {
                continue;
            }
            return fail(libc::EINTR);
        }
        if ready < 0 {
            return -1;
        }
        if ready == 0 {
            return fail(libc::EAGAIN);
        }
        if set[0].revents != 0 {
            // Another may take the connection first. Then this waits in the kernel, where it does not see its queue:
            // it must get nothing meanwhile.
            worker::set_ready(instance, slot, false);
            return match from_queue(call, slot, index, entry) {
                Some(accepted) => accepted,
                None => from_listener(call, instance, entry),
            };
        }
        if set[1].revents != 0
            && let Some(accepted) = from_queue(call, slot, index, entry)
        {
            return accepted;
        }
        if set[2].revents != 0
            && let Some(accepted) = from_rescue(call, slot, instance, entry, Hint::Ignored)
        {
            return accepted;
        }
    }
}

/// The instance that this thread is, with a queue for this listener.
fn blocked_instance(slot: usize, fd: c_int) -> Option<usize> {
    let mine = |index: &usize| process().is_some_and(|process| process.owns(*index));
    let known = (BLOCKED.get() as usize).checked_sub(1).filter(mine);
    if let Some(index) = known
        && worker::entry(index, slot).is_some()
    {
        return Some(index);
    }
    if LISTENERS[slot].refused.load(Ordering::Relaxed) != 0 || !is_on() || !process().is_some_and(holder::may_ask) {
        return None;
    }
    let entered = enter()?;
    // The number may have become another listener's.
    if listener::meet(&entered, fd) != Some(slot) {
        return None;
    }
    let index = match known {
        Some(index) => index,
        None => {
            let index = table::new_instance(None)?;
            entered.process.set_owned(index, true);
            BLOCKED.set(index as u32 + 1);
            crate::start::note_thread(index);
            index
        }
    };
    INSTANCES[index].entries[slot].listener.store(Some(fd));
    worker::join(&entered, index, slot, fd).then(|| {
        pin::arrive(entered.process, index);
        index
    })
}

/// A thread that blocked in `accept()` has ended.
pub(crate) extern "C" fn thread_ended(instance: *mut c_void) {
    let Some(index) = (instance as usize).checked_sub(1) else { return };
    if let Some(entered) = enter()
        && entered.process.owns(index)
    {
        crate::worker::close_instance(&entered, index);
    }
}

/// `SO_RCVTIMEO`, which holds for `accept()` too. None: for ever.
fn receive_timeout_ns(fd: c_int) -> Option<u64> {
    let timeout = rustix::net::sockopt::socket_timeout(borrow(fd), rustix::net::sockopt::Timeout::Recv).ok()??;
    u64::try_from(timeout.as_nanos()).ok()
}
