//! Which connections are attached.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use ksf::Order;
use ksf::limits::Limits;
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::{ConnectionId, Detached, Shared, Shortage};
use crate::connection::{Attachment, Connection};
use crate::error::AttachError;
use crate::options::MessageFraming;
use crate::sync::{Arc, Mutex, MutexGuard};
use crate::timer_thread;

/// Cookies of attached sockets, of all multiplexors of this process.
static ATTACHED: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

/// Holds the lock of the list of attached sockets. A process that forks while other threads attach holds it during the fork,
/// or it may be locked for ever in the child.
#[derive(Debug)]
pub struct AttachedLocked {
    _list: MutexGuard<'static, Option<HashSet<u64>>>,
}

impl AttachedLocked {
    /// Waits for the lock.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self { _list: ATTACHED.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

fn with_attached<R>(f: impl FnOnce(&mut HashSet<u64>) -> R) -> R {
    f(ATTACHED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

#[derive(Default)]
pub(crate) struct Table {
    places: Vec<Place>,
    free: Vec<u32>,
    /// Attached connections, in no order: messages for any connection go round here.
    pub(crate) all: Vec<Arc<Connection>>,
}

#[derive(Default)]
struct Place {
    generation: u32,
    /// Where its connection is in [`Table::all`].
    at: usize,
    conn: Option<Arc<Connection>>,
}

impl Shared {
    pub(crate) fn attach(
        self: &Arc<Self>,
        socket: OwnedFd,
        framing: MessageFraming,
        ordering: Order,
        attachment: Option<Attachment>,
    ) -> Result<ConnectionId, AttachError> {
        self.attach_limited(socket, framing, ordering, attachment, None)
    }

    /// The same, with limits of its own; those of the multiplexor as a whole stay.
    pub(crate) fn attach_limited(
        self: &Arc<Self>,
        socket: OwnedFd,
        framing: MessageFraming,
        ordering: Order,
        attachment: Option<Attachment>,
        limits: Option<Limits>,
    ) -> Result<ConnectionId, AttachError> {
        let system = |step| move |errno: Errno| AttachError::System { step, source: errno.into() };
        check_stream(&socket)?;
        let cookie = sockopt::socket_cookie(&socket).map_err(system("SO_COOKIE"))?;
        if !with_attached(|attached| attached.insert(cookie)) {
            return Err(AttachError::Already);
        }
        let forget = |error| {
            with_attached(|attached| attached.remove(&cookie));
            error
        };
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let limit = self.limits().connections_max;
        if table.all.len() >= limit {
            return Err(forget(AttachError::TooMany { limit }));
        }
        let index = table.free.pop().unwrap_or_else(|| {
            table.places.push(Place::default());
            table.places.len() as u32 - 1
        });
        let id = ConnectionId { index, generation: table.places[index as usize].generation };
        let conn = Arc::new(Connection::new(id, Arc::clone(self), socket, framing, ordering, limits));
        if let Some(attachment) = attachment {
            let _ = conn.attachment.set(attachment);
        }
        table.places[index as usize].conn = Some(Arc::clone(&conn));
        table.places[index as usize].at = table.all.len();
        table.all.push(Arc::clone(&conn));
        // Read by workers from here on. What is there to read already is an event, too.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let reader = conn.reader.lock();
        let data = epoll::EventData::new_u64(id.to_u64());
        let added = reader.socket.as_ref().map_or(Ok(()), |socket| epoll::add(&self.epoll, socket, data, flags));
        drop(reader);
        if let Err(errno) = added {
            table.remove(id);
            return Err(forget(system("epoll_ctl")(errno)));
        }
        self.counts.attach.fetch_add(1, Ordering::Relaxed);
        if conn.limits().idle_timeout_ms > 0 {
            self.timer.schedule_check(&conn, timer_thread::IDLE_TICK);
        }
        Ok(id)
    }

    pub(crate) fn detach(&self, connection: ConnectionId) -> Option<Detached> {
        let conn = self.table.write().unwrap_or_else(PoisonError::into_inner).remove(connection)?;
        conn.detached.store(true, Ordering::SeqCst);
        self.return_pass(&conn, Shortage::Input);
        self.return_pass(&conn, Shortage::Room);
        let mut reader = conn.reader.lock();
        let socket = reader.socket.take();
        let unread = reader.input.take_unread(&mut conn.input_room());
        drop(reader);
        let (for_sending, unsent) = conn.out_queue.stop();
        drop(for_sending);
        // Its messages can be received still.
        self.resume(&conn);
        let socket = socket?;
        if let Ok(cookie) = sockopt::socket_cookie(&socket) {
            with_attached(|attached| attached.remove(&cookie));
        }
        let _ = epoll::delete(&self.epoll, &socket);
        self.counts.unattach.fetch_add(1, Ordering::Relaxed);
        self.counts.retired.add(&conn.counts);
        // Both sides let go of it under their locks, so this is the last holder; a duplicate would do as well.
        let socket = Arc::try_unwrap(socket).or_else(|shared| shared.try_clone()).ok()?;
        Some(Detached { socket, unread, unsent })
    }

    pub(crate) fn find(&self, connection: ConnectionId) -> Option<Arc<Connection>> {
        let table = self.read_table();
        let place = table.places.get(connection.index as usize)?;
        place.conn.as_ref().filter(|conn| conn.id == connection).map(Arc::clone)
    }

    /// The `at`-th connection, counted round.
    pub(crate) fn nth(&self, at: usize) -> Option<(Arc<Connection>, usize)> {
        let table = self.read_table();
        let count = table.all.len();
        (count > 0).then(|| (Arc::clone(&table.all[at % count]), count))
    }

    /// Every connection.
    pub(crate) fn all(&self) -> Vec<Arc<Connection>> {
        self.read_table().all.clone()
    }

    pub(crate) fn read_table(&self) -> std::sync::RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn remove(&mut self, id: ConnectionId) -> Option<Arc<Connection>> {
        let place = self.places.get_mut(id.index as usize)?;
        let conn = place.conn.take_if(|conn| conn.id == id)?;
        // The signal's number is not given out, nor is any twice within four billion connections of one place.
        place.generation = (place.generation + 1) % (u32::MAX - 1);
        self.free.push(id.index);
        let at = place.at;
        self.all.swap_remove(at);
        if let Some(moved) = self.all.get(at) {
            self.places[moved.id.index as usize].at = at;
        }
        Some(conn)
    }
}

/// Refuses what is no connected TCP or Unix stream socket.
fn check_stream(socket: &OwnedFd) -> Result<(), AttachError> {
    let not = |what| Err(AttachError::NotAStream { what });
    match sockopt::socket_type(socket) {
        Err(_) => return not("no socket"),
        Ok(SocketType::STREAM) => {}
        Ok(_) => return not("of another type"),
    }
    let domain = sockopt::socket_domain(socket).unwrap_or(AddressFamily::UNSPEC);
    let tcp = [AddressFamily::INET, AddressFamily::INET6].contains(&domain)
        && sockopt::socket_protocol(socket).is_ok_and(|protocol| protocol == Some(rustix::net::ipproto::TCP));
    if !tcp && domain != AddressFamily::UNIX {
        return not("of another protocol");
    }
    if sockopt::socket_acceptconn(socket).unwrap_or(false) {
        return not("listening");
    }
    match rustix::net::getpeername(socket) {
        Ok(Some(_)) => Ok(()),
        Ok(None) if domain == AddressFamily::UNIX => Ok(()),
        _ => not("not connected"),
    }
}
