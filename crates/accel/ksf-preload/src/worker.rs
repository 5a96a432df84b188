//! Workers: an epoll instance, or a thread that blocks in `accept()`, gets a queue for a listener, watches it, and lets
//! it go.
//!
//! The ready bit is set after the queue is watched, and cleared before it is watched no more: what the steering program
//! sends to a queue finds somebody there. What was under way all the same is found by the holder.

use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use ksf_accel_proto::message::{Answer, NO_WORKER, Refusal, Request};
use ksf_accel_proto::state::{VERSION, WORKERS_MAX, Worker};
use libc::epoll_event;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;

use crate::descriptor::{self, borrow};
use crate::process::{Entered, is_on, process, state, thread_id};
use crate::table::{
    self, DescriptorKind, ENTRY_ARMED, ENTRY_JOINED, ENTRY_NONE, Entry, INSTANCES, Instance, LISTENERS,
};
use crate::{holder, interrupt, listener, pin, real};

/// The worker's place in shared memory. None: it has none, or it is another's by now.
#[inline]
pub(crate) fn shared(instance: &Instance) -> Option<&'static Worker> {
    let generation = instance.generation.load(Ordering::Relaxed);
    place(instance).filter(|worker| worker.generation.load(Ordering::Relaxed) == generation)
}

#[inline]
fn place(instance: &Instance) -> Option<&'static Worker> {
    let worker = (instance.worker.load(Ordering::Acquire) as usize).checked_sub(1)?;
    state()?.workers.get(worker)
}

/// True where the holder has given the worker's index away, because it took its process for dead: the parent of this
/// one, that has ended after `fork()`.
#[inline]
fn is_lost(instance: &Instance) -> bool {
    place(instance).is_some_and(|worker| {
        worker.generation.load(Ordering::Relaxed) != instance.generation.load(Ordering::Relaxed)
            || worker.pid.load(Ordering::Relaxed) == 0
    })
}

/// Where an instance serves a listener: with a queue, watched now or not.
#[inline]
pub(crate) fn entry(instance: usize, slot: usize) -> Option<&'static Entry> {
    let entry = &INSTANCES[instance].entries[slot];
    (entry.stage.load(Ordering::Acquire) != ENTRY_NONE).then_some(entry)
}

/// Makes one event of those of a listener, its queue and its rescue eventfd, which all have the program's data: the
/// program gave up one descriptor, and after its first event may have freed what the data point to. Other descriptors
/// with the same data may join in: who gives two the same cannot ask which of them it was.
#[inline]
pub(crate) fn merge(instance: &Instance, events: &mut [epoll_event]) -> usize {
    let mut count = events.len();
    let mut armed = instance.armed.load(Ordering::Relaxed);
    while armed != 0 && count > 1 {
        let data = instance.entries[armed.trailing_zeros() as usize].data.load(Ordering::Relaxed);
        armed &= armed - 1;
        let is_of = |event: &epoll_event| event.u64 == data;
        let Some(first) = events[..count].iter().position(is_of) else { continue };
        let (mut kept, mut all) = (first + 1, events[first].events);
        for next in first + 1..count {
            if is_of(&events[next]) {
                all |= events[next].events;
            } else {
                events[kept] = events[next];
                kept += 1;
            }
        }
        events[first].events = all;
        count = kept;
    }
    count
}

/// Looks whether the holder still knows the worker; if not, becomes a worker anew.
#[inline]
pub(crate) fn renew(index: usize, slot: usize, fd: c_int) {
    if is_lost(&INSTANCES[index])
        && let Some(entered) = crate::process::enter()
    {
        become_new(&entered, index, slot, fd);
    }
}

#[cold]
fn become_new(entered: &Entered, index: usize, slot: usize, fd: c_int) {
    let instance = &INSTANCES[index];
    // Where the holder cannot be asked now, the next accept() comes back here.
    if !is_lost(instance) || !holder::may_ask(entered.process) {
        return;
    }
    instance.worker.store(0, Ordering::Release);
    entered.process.set_owned(index, true);
    for (other, entry) in instance.entries.iter().enumerate() {
        if entry.stage.load(Ordering::Relaxed) != ENTRY_NONE {
            let number = entry.listener.load().or((other == slot).then_some(fd));
            rejoin(entered, index, other, number);
        }
    }
}

/// Drops what the instance has for a listener, and asks for it anew; `number` is by which it is watched.
fn rejoin(entered: &Entered, index: usize, slot: usize, number: Option<c_int>) {
    let instance = &INSTANCES[index];
    let entry = &instance.entries[slot];
    let was_armed = entry.stage.load(Ordering::Relaxed) == ENTRY_ARMED;
    let stood_in = entry.inner.load().is_some();
    unwatch(instance, entry);
    drop_descriptors(entry);
    let Some(number) = number else { return };
    match (join(entered, index, slot, number), stood_in) {
        (true, true) => stand_in_or_plain(instance, slot, number),
        (true, false) if was_armed => watch(instance, slot, entry),
        (false, true) => add_plain(instance, entry, number),
        _ => {}
    }
}

/// Puts the listener itself into the instance, as the program has asked for it.
fn add_plain(instance: &Instance, entry: &Entry, fd: c_int) {
    let Some(epoll) = instance.epoll.load() else { return };
    let events = entry.events.load(Ordering::Relaxed);
    let _ = set_watched(epoll, fd, events, entry.data.load(Ordering::Relaxed));
}

fn stand_in_or_plain(instance: &Instance, slot: usize, fd: c_int) {
    let entry = &instance.entries[slot];
    let Some(epoll) = instance.epoll.load() else { return };
    let asked = epoll_event { events: entry.events.load(Ordering::Relaxed), u64: entry.data.load(Ordering::Relaxed) };
    if stand_in(epoll, fd, slot, instance, asked) != Some(0) {
        add_plain(instance, entry, fd);
    }
}

/// Gets a queue for the instance, if it has none yet. False: it serves the listener without.
pub(crate) fn join(entered: &Entered, index: usize, slot: usize, fd: c_int) -> bool {
    let (instance, listener) = (&INSTANCES[index], &LISTENERS[slot]);
    let entry = &instance.entries[slot];
    if entry.stage.load(Ordering::Relaxed) != ENTRY_NONE {
        return true;
    }
    let usable = state().is_none_or(|state| state.control.version.load(Ordering::Relaxed) == VERSION);
    if listener.refused.load(Ordering::Relaxed) != 0 || !usable || !is_on() {
        return false;
    }
    let request = Request::Join {
        cookie: listener.cookie.load(Ordering::Relaxed),
        worker: instance.worker.load(Ordering::Relaxed).checked_sub(1).unwrap_or(NO_WORKER),
        tid: thread_id(),
        cpu: pin::only_cpu().map_or(-1, |cpu| cpu as i32),
    };
    let mut reply = holder::ask(entered.process, &request, Some(fd));
    let unknown = Answer::Refused { reason: Refusal::Unknown };
    if reply.as_ref().is_some_and(|reply| reply.answer == unknown) && listener::tell(entered, slot, fd) {
        reply = holder::ask(entered.process, &request, Some(fd));
    }
    let Some(reply) = reply else { return false };
    let Answer::Done { listener: bit, worker, cpu, generation, .. } = reply.answer else {
        // A worker that the holder does not know has been given up for dead: accept() will see that, and join anew.
        if instance.worker.load(Ordering::Relaxed) == 0 {
            listener.refused.store(1, Ordering::Relaxed);
        }
        return false;
    };
    let (mut queue, mut rescue) = (None, None);
    for fd in reply.descriptors.into_iter().flatten() {
        if is_socket(&fd) { queue = Some(fd) } else { rescue = Some(fd) }
    }
    if worker as usize >= WORKERS_MAX || bit as usize >= LISTENERS.len() {
        return false;
    }
    let cookie = listener.cookie.load(Ordering::Relaxed);
    let queue = match queue {
        // A program that uses SO_REUSEPORT itself: its own listener is the queue, and may be handed back as such.
        Some(queue) if cookie_of(&queue) == Some(cookie) => Some(None),
        Some(queue) => descriptor::keep(queue).ok().map(Some),
        // The process had no number free to receive it.
        None => None,
    };
    let Some(queue) = queue else {
        holder::ask(entered.process, &Request::Leave { cookie, worker, closed: 0 }, None);
        return false;
    };
    listener.index.store(bit, Ordering::Release);
    instance.generation.store(generation, Ordering::Relaxed);
    instance.cpu.store(cpu.saturating_add(1).max(0), Ordering::Relaxed);
    instance.worker.store(worker + 1, Ordering::Release);
    entry.queue.store(queue);
    entry.rescue.store(rescue.and_then(|rescue| descriptor::keep(rescue).ok()));
    entry.stage.store(ENTRY_JOINED, Ordering::Release);
    true
}

fn is_socket(fd: &OwnedFd) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
}

fn cookie_of(fd: &OwnedFd) -> Option<u64> {
    rustix::net::sockopt::socket_cookie(fd).ok()
}

/// Tells the steering program whether the worker serves the listener.
pub(crate) fn set_ready(instance: &Instance, slot: usize, ready: bool) {
    let Some(worker) = shared(instance) else { return };
    let bit = 1u64 << LISTENERS[slot].index.load(Ordering::Relaxed);
    if ready {
        worker.ready.fetch_or(bit, Ordering::Release);
    } else {
        worker.ready.fetch_and(!bit, Ordering::Release);
    }
}

/// `epoll_ctl` of a listener.
///
/// # Safety
///
/// `event` is null or can be read.
pub(crate) unsafe fn control(epoll: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    // SAFETY: the caller's call.
    let plain = || unsafe { real::epoll_ctl(epoll, op, fd, event) };
    // nginx takes its listener out and puts it back after every sixteenth connection of a worker.
    if !is_queue_concerned(epoll, op, fd) {
        return plain();
    }
    let Some(entered) = crate::process::enter() else { return plain() };
    let Some(slot) = listener::meet(&entered, fd) else { return plain() };
    // SAFETY: handed on from the caller.
    let asked = unsafe { event.as_ref() }.copied();
    match (op, asked) {
        (libc::EPOLL_CTL_ADD, Some(asked)) => add(&entered, epoll, fd, slot, asked, plain),
        (libc::EPOLL_CTL_MOD, Some(asked)) => modify(&entered, epoll, fd, slot, asked, plain),
        (libc::EPOLL_CTL_DEL, _) => delete(&entered, epoll, fd, slot, plain),
        _ => plain(),
    }
}

/// False where the call changes nothing here, whatever the number stands for by now: the instance has no queue for the
/// listener, and gets none. One that is added while the holder is off is met by `accept()` ([`crate::adopt`]).
fn is_queue_concerned(epoll: c_int, op: c_int, fd: c_int) -> bool {
    let slot = match table::kind(fd) {
        DescriptorKind::Listener(slot) => slot,
        // It has no queue before it is met.
        _ => return op != libc::EPOLL_CTL_DEL && is_on(),
    };
    let has_queue = matches!(table::kind(epoll), DescriptorKind::Epoll(index) if entry(index, slot).is_some());
    match op {
        libc::EPOLL_CTL_ADD => has_queue || is_on(),
        libc::EPOLL_CTL_DEL => has_queue,
        _ => true,
    }
}

/// The instance that watches this listener by this number.
fn watching(epoll: c_int, fd: c_int, slot: usize) -> Option<(&'static Instance, &'static Entry)> {
    let DescriptorKind::Epoll(index) = table::kind(epoll) else { return None };
    let (instance, entry) = (&INSTANCES[index], &INSTANCES[index].entries[slot]);
    (entry.listener.load() == Some(fd)).then_some((instance, entry))
}

fn add(
    entered: &Entered,
    epoll: c_int,
    fd: c_int,
    slot: usize,
    asked: epoll_event,
    plain: impl Fn() -> c_int,
) -> c_int {
    let already = watching(epoll, fd, slot);
    if already.is_some_and(|(_, entry)| entry.inner.load().is_some()) {
        return ksf_interpose::errno::fail(libc::EEXIST);
    }
    let once = asked.events & libc::EPOLLONESHOT as u32 != 0;
    if !once {
        let result = plain();
        if result != 0 {
            return result;
        }
    }
    let errno = ksf_interpose::errno::errno();
    let result = match begin(entered, epoll, fd, slot, asked) {
        Some(index) if once => stand_in(epoll, fd, slot, &INSTANCES[index], asked).unwrap_or_else(&plain),
        Some(index) => {
            watch(&INSTANCES[index], slot, &INSTANCES[index].entries[slot]);
            0
        }
        None if once => plain(),
        None => 0,
    };
    if result == 0 {
        ksf_interpose::errno::set_errno(errno);
    }
    result
}

/// Makes the epoll instance a worker with a queue for this listener.
fn begin(entered: &Entered, epoll: c_int, fd: c_int, slot: usize, asked: epoll_event) -> Option<usize> {
    // One who waits for a blocking listener counts on accept() finding what was reported. With several queues, a
    // report may be void: another worker has taken the connection. Then accept() must not block.
    let flags = fcntl_getfl(borrow(fd)).ok()?;
    if asked.events & libc::EPOLLIN as u32 == 0 || !flags.contains(OFlags::NONBLOCK) {
        return None;
    }
    LISTENERS[slot].mode.store(1, Ordering::Relaxed);
    let index = match table::kind(epoll) {
        // The parent's, which lives: what it watches is not for the child to change.
        DescriptorKind::Epoll(index) if !entered.process.owns(index) && !is_lost(&INSTANCES[index]) => return None,
        DescriptorKind::Epoll(index) => index,
        _ => {
            let index = table::new_instance(Some(epoll))?;
            entered.process.set_owned(index, true);
            if !table::set_kind(epoll, DescriptorKind::Epoll(index)) {
                INSTANCES[index].used.store(0, Ordering::Release);
                return None;
            }
            index
        }
    };
    if is_lost(&INSTANCES[index]) {
        become_new(entered, index, slot, fd);
    }
    let entry = &INSTANCES[index].entries[slot];
    if entry.stage.load(Ordering::Relaxed) == ENTRY_ARMED && entry.listener.load() != Some(fd) {
        // Watched already, by another number of the same listener.
        return None;
    }
    entry.listener.store(Some(fd));
    remember(entry, asked);
    join(entered, index, slot, fd).then_some(index)
}

fn remember(entry: &Entry, asked: epoll_event) {
    entry.events.store(asked.events, Ordering::Relaxed);
    entry.data.store(asked.u64, Ordering::Relaxed);
}

fn modify(
    entered: &Entered,
    epoll: c_int,
    fd: c_int,
    slot: usize,
    asked: epoll_event,
    plain: impl Fn() -> c_int,
) -> c_int {
    let errno = ksf_interpose::errno::errno();
    let wants = asked.events & libc::EPOLLIN as u32 != 0;
    if let Some((instance, entry)) = watching(epoll, fd, slot)
        && let Some(inner) = entry.inner.load()
    {
        if !wants {
            set_ready(instance, slot, false);
        }
        let mut event = asked;
        // SAFETY: the event can be read and written.
        let result = unsafe { real::epoll_ctl(epoll, libc::EPOLL_CTL_MOD, inner, &mut event) };
        if result == 0 {
            remember(entry, asked);
            set_ready(instance, slot, wants);
        }
        return result;
    }
    let once = asked.events & libc::EPOLLONESHOT as u32 != 0;
    let result = plain();
    if result != 0 {
        return result;
    }
    if let Some((instance, entry)) = watching(epoll, fd, slot)
        && (!wants || once)
    {
        unwatch(instance, entry);
    }
    begin_late(entered, epoll, fd, slot, asked);
    ksf_interpose::errno::set_errno(errno);
    0
}

/// Makes the epoll instance a worker for a listener that it watches already.
pub(crate) fn begin_late(entered: &Entered, epoll: c_int, fd: c_int, slot: usize, asked: epoll_event) -> Option<usize> {
    let index = begin(entered, epoll, fd, slot, asked)?;
    let instance = &INSTANCES[index];
    if asked.events & libc::EPOLLONESHOT as u32 == 0 {
        watch(instance, slot, &instance.entries[slot]);
    } else {
        // The listener's own place in the set goes over to the inner instance.
        let _ = epoll::delete(borrow(epoll), borrow(fd));
        stand_in_or_plain(instance, slot, fd);
    }
    Some(index)
}

fn delete(_entered: &Entered, epoll: c_int, fd: c_int, slot: usize, plain: impl Fn() -> c_int) -> c_int {
    let Some((instance, entry)) = watching(epoll, fd, slot) else { return plain() };
    // Queue and place stay with the worker: a program that does this each time round (nginx with accept_mutex) comes
    // back without a word to the holder, who sees the ready bit.
    let inner = entry.inner.load();
    unwatch(instance, entry);
    entry.listener.store(None);
    match inner {
        Some(_) => 0,
        None => plain(),
    }
}

/// Watches the queue, and the rescue eventfd, beside the listener.
fn watch(instance: &Instance, slot: usize, entry: &Entry) {
    let Some(epoll) = instance.epoll.load() else { return };
    let events = entry.events.load(Ordering::Relaxed);
    let data = entry.data.load(Ordering::Relaxed);
    let mut watched = true;
    if let Some(queue) = entry.queue.load() {
        // Nobody else watches this queue, unless by the same instance.
        let events = events & !(libc::EPOLLEXCLUSIVE as u32);
        watched = set_watched(epoll, queue, events, data).is_ok();
    }
    if let Some(rescue) = entry.rescue.load() {
        let _ = epoll::delete(borrow(epoll), borrow(rescue));
        // One worker is enough. EPOLLEXCLUSIVE goes with these only (eventpoll.h, EPOLLEXCLUSIVE_OK_BITS).
        let kept = (libc::EPOLLIN | libc::EPOLLET | libc::EPOLLWAKEUP) as u32;
        let events = events & kept | libc::EPOLLEXCLUSIVE as u32;
        watched &= set_watched(epoll, rescue, events, data).is_ok();
    }
    if watched {
        entry.stage.store(ENTRY_ARMED, Ordering::Release);
        instance.armed.fetch_or(1 << slot, Ordering::Relaxed);
        set_ready(instance, slot, true);
    } else {
        unwatch(instance, entry);
    }
}

fn set_watched(epoll: c_int, fd: c_int, events: u32, data: u64) -> Result<(), Errno> {
    let (events, data) = (EventFlags::from_bits_retain(events), EventData::new_u64(data));
    match epoll::add(borrow(epoll), borrow(fd), data, events) {
        Err(Errno::EXIST) => epoll::modify(borrow(epoll), borrow(fd), data, events),
        other => other,
    }
}

/// Puts an epoll instance with queue, listener and rescue eventfd into the program's instance, under the listener's
/// name. With EPOLLONESHOT, an event of one must silence all three until the program asks again.
///
/// None: it could not be made.
fn stand_in(epoll: c_int, fd: c_int, slot: usize, instance: &Instance, asked: epoll_event) -> Option<c_int> {
    let entry = &instance.entries[slot];
    let inner = epoll::create(epoll::CreateFlags::CLOEXEC).ok()?;
    let one = |fd: c_int, events: c_int| {
        epoll::add(&inner, borrow(fd), EventData::new_u64(0), EventFlags::from_bits_retain(events as u32))
    };
    one(fd, libc::EPOLLIN).ok()?;
    if let Some(queue) = entry.queue.load() {
        one(queue, libc::EPOLLIN).ok()?;
    }
    if let Some(rescue) = entry.rescue.load() {
        one(rescue, libc::EPOLLIN | libc::EPOLLEXCLUSIVE).ok()?;
    }
    let inner = descriptor::keep(inner).ok()?;
    let mut event = asked;
    // SAFETY: the event can be read and written.
    let result = unsafe { real::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, inner, &mut event) };
    if result != 0 {
        descriptor::release(inner);
        return Some(result);
    }
    entry.inner.store(Some(inner));
    entry.stage.store(ENTRY_ARMED, Ordering::Release);
    set_ready(instance, slot, true);
    Some(0)
}

/// Ends what [`watch`] or [`stand_in`] began. The queue stays the worker's.
fn unwatch(instance: &Instance, entry: &Entry) {
    let Some(slot) = instance.entries.iter().position(|other| std::ptr::eq(other, entry)) else { return };
    if entry.stage.load(Ordering::Relaxed) != ENTRY_ARMED {
        return;
    }
    set_ready(instance, slot, false);
    entry.stage.store(ENTRY_JOINED, Ordering::Release);
    instance.armed.fetch_and(!(1 << slot), Ordering::Relaxed);
    if let Some(inner) = entry.inner.take() {
        descriptor::release(inner);
        return;
    }
    let Some(epoll) = instance.epoll.load() else { return };
    for fd in [entry.queue.load(), entry.rescue.load()].into_iter().flatten() {
        let _ = epoll::delete(borrow(epoll), borrow(fd));
    }
}

fn drop_descriptors(entry: &Entry) {
    entry.stage.store(ENTRY_NONE, Ordering::Release);
    for fd in [entry.queue.take(), entry.rescue.take(), entry.inner.take()].into_iter().flatten() {
        descriptor::release(fd);
    }
}

/// The instance serves this listener no more. Its worker, if it did and the worker is this process's.
pub(crate) fn end(entered: &Entered, index: usize, instance: &Instance, slot: usize) -> Option<u32> {
    let entry = &instance.entries[slot];
    entry.listener.store(None);
    if entry.stage.load(Ordering::Relaxed) == ENTRY_NONE {
        return None;
    }
    // The parent goes on with its instance: what is in it, and its ready bit, are not the child's to take out.
    let owned = entered.process.owns(index);
    if owned {
        unwatch(instance, entry);
    }
    drop_descriptors(entry);
    instance.armed.fetch_and(!(1 << slot), Ordering::Relaxed);
    if instance.entries.iter().all(|entry| entry.stage.load(Ordering::Relaxed) == ENTRY_NONE) {
        pin::leave(entered.process, index);
    }
    if owned { instance.worker.load(Ordering::Relaxed).checked_sub(1) } else { None }
}

/// The program is about to close an epoll instance's number, or a thread ends.
pub(crate) fn close_instance(entered: &Entered, index: usize) {
    let instance = &INSTANCES[index];
    for (slot, listener) in LISTENERS.iter().enumerate() {
        if let Some(worker) = end(entered, index, instance, slot) {
            let cookie = listener.cookie.load(Ordering::Relaxed);
            holder::ask(entered.process, &Request::Leave { cookie, worker, closed: 0 }, None);
        }
    }
    pin::leave(entered.process, index);
    if let Some(epoll) = instance.epoll.take() {
        table::set_kind(epoll, DescriptorKind::None);
    }
    instance.worker.store(0, Ordering::Release);
    entered.process.set_owned(index, false);
    instance.used.store(0, Ordering::Release);
}

/// The listener was shut down: it does not listen any more, but stays in the program's epoll instances.
pub(crate) fn end_shut(entered: &Entered, slot: usize) {
    for (index, instance) in table::instances().filter(|(index, _)| entered.process.owns(*index)) {
        let entry = &instance.entries[slot];
        let (stood_in, number) = (entry.inner.load().is_some(), entry.listener.load());
        if let Some(worker) = end(entered, index, instance, slot) {
            let cookie = LISTENERS[slot].cookie.load(Ordering::Relaxed);
            holder::ask(entered.process, &Request::Leave { cookie, worker, closed: 1 }, None);
        }
        if let Some(number) = number {
            if stood_in {
                add_plain(instance, entry, number);
            }
            // Where the program listens again and asks for events again, it begins anew.
            entry.listener.store(Some(number));
        }
    }
}

/// One of the library's own descriptors has another number now.
pub(crate) fn moved(from: c_int, to: c_int) {
    interrupt::moved(from, to);
    for listener in &LISTENERS {
        if listener.stolen.load() == Some(from) {
            listener.stolen.store(Some(to));
        }
    }
    for (_, instance) in table::instances() {
        for (slot, entry) in instance.entries.iter().enumerate() {
            if entry.inner.load() == Some(from) {
                // Its place in the set goes by file and number.
                let Some(epoll) = instance.epoll.load() else { continue };
                add_plain(instance, entry, to);
                let _ = epoll::delete(borrow(epoll), borrow(from));
                entry.inner.store(Some(to));
            }
            let Some(place) = [&entry.queue, &entry.rescue].into_iter().find(|fd| fd.load() == Some(from)) else {
                continue;
            };
            if entry.stage.load(Ordering::Relaxed) == ENTRY_ARMED && entry.inner.load().is_none() {
                unwatch(instance, entry);
                place.store(Some(to));
                watch(instance, slot, entry);
            } else {
                place.store(Some(to));
            }
        }
    }
}

/// A queue's descriptor was closed behind this library's back, or the holder has ended the queue.
#[cold]
pub(crate) fn lose_queue(index: usize, slot: usize, queue: c_int) {
    let Some(entered) = crate::process::enter() else { return };
    let entry = &INSTANCES[index].entries[slot];
    if entry.queue.load() != Some(queue) || !descriptor::is_lost(queue) {
        return;
    }
    // The number may be the program's by now: it is not taken out of the epoll instance, where it is not any more.
    entry.queue.store(None);
    descriptor::release(queue);
    rejoin(&entered, index, slot, entry.listener.load());
}

/// Clears, or sets again, all ready bits of this process's workers: `exec` closes their queues, if it succeeds.
pub(crate) fn pause_all(paused: bool) {
    let Some(process) = process() else { return };
    for (index, instance) in table::instances().filter(|(index, _)| process.owns(*index)) {
        for (slot, entry) in instance.entries.iter().enumerate() {
            if entry.stage.load(Ordering::Relaxed) == ENTRY_ARMED && INSTANCES[index].epoll.load().is_some() {
                set_ready(instance, slot, !paused);
            }
        }
    }
}
