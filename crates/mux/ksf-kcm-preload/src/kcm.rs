//! Message sockets: made, cloned, attached to, and told what they are.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use ksf_mux::kcm::{AttachOptions, KcmOptions, KcmSocket, Kind, Routing};
use ksf_mux::{ConnectionId, Event};
use rustix::event::{EventfdFlags, eventfd};

use crate::attached::Attached;
use crate::descriptor::keep;
use crate::signals::Blocked;
use crate::table::{self, Entry, lock};
use crate::{keeper, ownership, program};

/// A call's result: a number, or an error number.
pub(crate) type Answer<T> = Result<T, c_int>;

pub(crate) const AF_KCM: c_int = 41;
pub(crate) const SOL_KCM: c_int = 281;
const KCM_RECV_DISABLE: c_int = 1;
/// SIOCPROTOPRIVATE and what follows it (include/uapi/linux/kcm.h).
const ATTACH: u64 = 0x89e0;
const UNATTACH: u64 = 0x89e1;
const CLONE: u64 = 0x89e2;

/// A message socket.
pub(crate) struct Kcm {
    pub(crate) socket: KcmSocket,
    pub(crate) group: Arc<Group>,
    /// Always writable: what event loops ask for room.
    pub(crate) room: OwnedFd,
}

/// A multiplexor: its sockets and connections.
pub(crate) struct Group {
    sockets: Mutex<Vec<Weak<Kcm>>>,
    connections: Mutex<HashMap<ConnectionId, Weak<Attached>>>,
}

/// All of them, for /proc/net/kcm.
pub(crate) static GROUPS: Mutex<Vec<Weak<Group>>> = Mutex::new(Vec::new());

impl Group {
    /// A socket that is open, if one is.
    pub(crate) fn socket(&self) -> Option<Arc<Kcm>> {
        lock(&self.sockets).iter().find_map(Weak::upgrade)
    }

    /// Reads what came, and hands errors on.
    pub(crate) fn look(&self) {
        if let Some(kcm) = self.socket() {
            let _ = kcm.socket.look();
            self.hand_on(|| kcm.socket.event());
        }
    }

    /// Hands errors on.
    pub(crate) fn hand_on(&self, event: impl Fn() -> Option<Event>) {
        while let Some(event) = event() {
            if let Event::Ended { connection, error } = event
                && let Some(attached) = lock(&self.connections).get(&connection).and_then(Weak::upgrade)
            {
                attached.fail(error.errno());
            }
        }
    }
}

/// The list of them, locked while no handler can run.
pub(crate) type Locked = MutexGuard<'static, Vec<Weak<Group>>>;

pub(crate) fn locked() -> Locked {
    lock(&GROUPS)
}

/// In a child: forgets those of the parent.
pub(crate) fn leave(groups: &mut Locked) {
    std::mem::forget(std::mem::take(&mut **groups));
}

fn to_errno(error: &std::io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// The argument of `ksf kcm-run --send`. Called first when the library is loaded: a handler may have interrupted what
/// changes the environment.
pub(crate) fn routing() -> Routing {
    static ROUTING: OnceLock<Routing> = OnceLock::new();
    *ROUTING.get_or_init(|| match std::env::var_os(Routing::VARIABLE) {
        Some(said) if said == Routing::InTurn.name() => Routing::InTurn,
        _ => Routing::Answer,
    })
}

/// `socket(AF_KCM, ...)`.
pub(crate) fn open(socket_type: c_int, protocol: c_int) -> Answer<c_int> {
    let kind = Kind::from_raw(socket_type, protocol).map_err(|error| error.errno())?;
    if !ownership::is_owner() {
        // The keeper is in another process.
        return Err(libc::EAFNOSUPPORT);
    }
    let _blocked = Blocked::all();
    keeper::ensure_started()?;
    let make = || -> std::io::Result<c_int> {
        let mut options = KcmOptions::default();
        options.routing = routing();
        let (socket, timer) = KcmSocket::without_thread(kind, options)?;
        let group = Arc::new(Group { sockets: Mutex::default(), connections: Mutex::default() });
        keeper::add(timer, Arc::downgrade(&group));
        let mut groups = lock(&GROUPS);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&group));
        drop(groups);
        publish(socket, group, socket_type)
    };
    make().map_err(|error| to_errno(&error))
}

/// Gives a socket its number.
fn publish(socket: KcmSocket, group: Arc<Group>, flags: c_int) -> std::io::Result<c_int> {
    let fd = socket.poll_fd()?.try_clone_to_owned()?;
    let close_on_exec =
        if flags & libc::SOCK_CLOEXEC != 0 { rustix::io::FdFlags::CLOEXEC } else { rustix::io::FdFlags::empty() };
    rustix::io::fcntl_setfd(&fd, close_on_exec)?;
    if flags & libc::SOCK_NONBLOCK != 0 {
        rustix::fs::fcntl_setfl(&fd, rustix::fs::OFlags::NONBLOCK)?;
    }
    ownership::mark(fd.as_fd());
    let room = keep(eventfd(0, EventfdFlags::CLOEXEC)?)?;
    let kcm = Arc::new(Kcm { socket, group: Arc::clone(&group), room });
    let mut sockets = lock(&group.sockets);
    sockets.retain(|socket| socket.strong_count() > 0);
    sockets.push(Arc::downgrade(&kcm));
    drop(sockets);
    let fd = fd.into_raw_fd();
    table::insert(fd, Entry::Kcm(kcm));
    Ok(fd)
}

/// True for what only a message socket is asked for.
pub(crate) fn is_own(request: u64) -> bool {
    matches!(request, ATTACH | UNATTACH | CLONE)
}

/// `ioctl` on a message socket.
///
/// # Safety
///
/// `argument` is what the request demands.
pub(crate) unsafe fn ioctl(kcm: &Arc<Kcm>, request: u64, argument: *mut c_void) -> Option<Answer<c_int>> {
    let fault = Some(Err(libc::EFAULT));
    let words = argument.cast::<c_int>();
    match request {
        ATTACH | UNATTACH | CLONE if words.is_null() => fault,
        // SAFETY: struct kcm_attach is two ints.
        ATTACH => Some(unsafe { attach(kcm, words.read(), words.add(1).read()) }),
        // SAFETY: struct kcm_unattach is an int.
        UNATTACH => Some(unattach(kcm, unsafe { words.read() })),
        CLONE => {
            let cloned = kcm.socket.try_clone().and_then(|socket| publish(socket, Arc::clone(&kcm.group), 0));
            // SAFETY: struct kcm_clone is an int.
            Some(cloned.map(|fd| unsafe { words.write(fd) }).map(|()| 0).map_err(|error| to_errno(&error)))
        }
        libc::FIONREAD => Some(Err(libc::ENOTTY)),
        // FIONBIO and what is common to all descriptors.
        _ => None,
    }
}

/// A descriptor of the caller's, if it is open.
pub(crate) fn borrow<'a>(fd: RawFd) -> Option<BorrowedFd<'a>> {
    // SAFETY: fcntl looks at the number only.
    if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, and the caller keeps it open during its call.
    Some(unsafe { BorrowedFd::borrow_raw(fd) })
}

fn attach(kcm: &Kcm, fd: c_int, program: c_int) -> Answer<c_int> {
    let socket = borrow(fd).ok_or(libc::ENOENT)?;
    borrow(program).ok_or(libc::EBADF)?;
    let program = program::of_descriptor(program)?;
    let own = socket.try_clone_to_owned().and_then(keep).map_err(|error| to_errno(&error))?;
    // Before the lock is taken, and dropped after it: its descriptors change hands under another.
    let attached = Arc::new(Attached::new(Arc::clone(&kcm.group)).map_err(|error| to_errno(&error))?);
    // An error that came between the two would find no connection: it waits until the connection is known.
    let mut connections = lock(&kcm.group.connections);
    connections.retain(|_, attached| attached.strong_count() > 0);
    let connection = kcm.socket.attach(own, program, AttachOptions::default()).map_err(|error| error.errno())?;
    connections.insert(connection, Arc::downgrade(&attached));
    drop(connections);
    table::insert(fd, Entry::Tcp(attached));
    Ok(0)
}

fn unattach(kcm: &Kcm, fd: c_int) -> Answer<c_int> {
    let socket = borrow(fd).ok_or(libc::ENOENT)?;
    let connection = kcm.socket.connection_of(socket).ok_or(libc::ENOENT)?;
    let detached = kcm.socket.unattach(connection).map_err(|error| error.errno())?;
    lock(&kcm.group.connections).remove(&connection);
    match table::tcp(fd) {
        Some(attached) if !detached.unread.is_empty() => lock(&attached.unread).extend(&detached.unread),
        _ => table::remove(fd),
    }
    Ok(0)
}

/// What SO_RCVBUF and SO_SNDBUF are said to be: the kernel's default. The limits that hold are others.
const BUFFER_BYTES: c_int = 212_992;

/// `getsockopt` on a message socket: the value's bytes.
pub(crate) fn option(kcm: &Kcm, level: c_int, name: c_int) -> Answer<Vec<u8>> {
    let number = |value: c_int| Ok(value.to_ne_bytes().to_vec());
    let time = |time: Option<Duration>| {
        let time = time.unwrap_or_default();
        let (seconds, micros) = (time.as_secs() as i64, i64::from(time.subsec_micros()));
        Ok([seconds.to_ne_bytes(), micros.to_ne_bytes()].concat())
    };
    match (level, name) {
        (SOL_KCM, KCM_RECV_DISABLE) => number(c_int::from(!kcm.socket.is_receiving())),
        (libc::SOL_SOCKET, libc::SO_TYPE) => number(kcm.socket.kind().raw()),
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => number(AF_KCM),
        (libc::SOL_SOCKET, libc::SO_PROTOCOL | libc::SO_ERROR | libc::SO_ACCEPTCONN) => number(0),
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_SNDBUF) => number(BUFFER_BYTES),
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => time(kcm.socket.receive_timeout()),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => time(kcm.socket.send_timeout()),
        _ => Err(libc::ENOPROTOOPT),
    }
}

/// `setsockopt` on a message socket.
pub(crate) fn set_option(kcm: &Kcm, level: c_int, name: c_int, value: &[u8]) -> Answer<c_int> {
    let word = |at: usize| value.get(at..at + 8)?.try_into().ok().map(i64::from_ne_bytes);
    let time = || -> Answer<Option<Duration>> {
        let (seconds, micros) = word(0).zip(word(8)).ok_or(libc::EINVAL)?;
        let time = Duration::new(u64::try_from(seconds).map_err(|_| libc::EDOM)?, 0)
            + Duration::from_micros(u64::try_from(micros).ok().filter(|micros| *micros < 1_000_000).ok_or(libc::EDOM)?);
        Ok((!time.is_zero()).then_some(time))
    };
    match (level, name) {
        (SOL_KCM, KCM_RECV_DISABLE) => {
            let disable = value.get(..4).and_then(|value| value.try_into().ok()).map(c_int::from_ne_bytes);
            kcm.socket.set_receiving(disable.ok_or(libc::EINVAL)? == 0);
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => kcm.socket.set_receive_timeout(time()?),
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => kcm.socket.set_send_timeout(time()?),
        // Buffers have other limits here; what is asked for does no harm.
        (libc::SOL_SOCKET, _) => {}
        _ => return Err(libc::ENOPROTOOPT),
    }
    Ok(0)
}

/// True if calls on this descriptor do not wait.
pub(crate) fn is_nonblocking(fd: c_int) -> bool {
    let Some(fd) = borrow(fd) else { return false };
    rustix::fs::fcntl_getfl(fd.as_fd()).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// The descriptor of the set, for event loops of our own.
pub(crate) fn readiness(kcm: &Kcm) -> RawFd {
    kcm.socket.poll_fd().map_or(-1, |fd| fd.as_raw_fd())
}
