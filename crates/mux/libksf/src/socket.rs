//! `ksf_socket`: one thread's side of a multiplexor.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ksf_mux::{
    CALL_MESSAGES_MAX, ConnectionId, Message, MessageSocket, Mux, RecvError, ReplyOrder, SendError, SendOptions,
};

use crate::boundary::{Failure, at, bytes, call, place, quiet};
use crate::options::KsfOptions;
use crate::structs::{KsfEvent, KsfStats, fill};

/// `ksf_socket`.
#[derive(Debug)]
pub struct Socket {
    mux: Mux,
    socket: MessageSocket,
    /// Where messages go that name no connection.
    order: Mutex<ReplyOrder>,
}

impl Socket {
    fn new(mux: Mux) -> Result<*mut Self, Failure> {
        let socket = mux.socket()?;
        // A socket that may be polled takes one message at a time, so that the others stay free for all threads.
        socket.poll_fd()?;
        Ok(Box::into_raw(Box::new(Self { mux, socket, order: Mutex::default() })))
    }

    /// A message, or none in time.
    fn receive(&self, timeout_ms: c_int) -> Result<Option<Message>, Failure> {
        match self.socket.recv_within(u64::try_from(timeout_ms).ok().map(Duration::from_millis)) {
            Ok(message) => Ok(Some(message)),
            Err(RecvError::WouldBlock | RecvError::TimedOut(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn order(&self) -> MutexGuard<'_, ReplyOrder> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends to the connection of the message that the calling thread answers next; in turn if there is none.
    fn send_answer(&self, body: &[u8], mut options: SendOptions) -> Result<ConnectionId, Failure> {
        let answers = self.order().next();
        options.to = answers.map(|message| message.connection);
        options.answer = true;
        let sent = self.socket.send(body, options);
        if let (Some(message), Ok(_) | Err(SendError::Gone(_))) = (answers, &sent) {
            self.order().answered(message);
        }
        sent.map_err(|error| match error {
            SendError::Gone(_) => Failure::new(libc::ECONNRESET, format!("{error}, whose message this answers")),
            error => error.into(),
        })
    }
}

/// Makes a multiplexor and its first socket.
///
/// # Safety
///
/// `options` is null or as the header demands; `socket` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_open(options: *const KsfOptions, socket: *mut *mut Socket) -> c_int {
    call(|| {
        let socket = place(socket, "socket")?;
        // SAFETY: the options are as the header demands.
        let options = unsafe { KsfOptions::read(options)?.translate()? };
        let opened = Socket::new(Mux::new(options)?)?;
        // SAFETY: the place can be written.
        unsafe { socket.write(opened) };
        Ok(0)
    })
}

/// Makes another socket of the same multiplexor.
///
/// # Safety
///
/// `socket` is null or open; `other` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_clone(socket: *mut Socket, other: *mut *mut Socket) -> c_int {
    call(|| {
        let other = place(other, "other")?;
        // SAFETY: the socket is open, and the place can be written.
        unsafe { other.write(Socket::new(at(socket, "socket")?.mux.clone())?) };
        Ok(0)
    })
}

/// Closes a socket.
///
/// # Safety
///
/// `socket` is null or open, and no other call is made on it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_close(socket: *mut Socket) {
    quiet((), || {
        if !socket.is_null() {
            // SAFETY: ksf_open and ksf_clone make it with Box::into_raw, and the caller closes it once.
            drop(unsafe { Box::from_raw(socket) });
        }
    });
}

/// Attaches a connection.
///
/// # Safety
///
/// `socket` is null or open; `connection` is null or can be written. On success `fd` is no longer the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_attach(socket: *mut Socket, fd: c_int, connection: *mut u64) -> c_int {
    call(|| {
        // SAFETY: the socket is open.
        let socket = unsafe { at(socket, "socket")? };
        // SAFETY: fcntl looks at the number only.
        if fd < 0 || unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(Failure::new(libc::EBADF, format!("{fd} is no open descriptor")));
        }
        // What fails must stay the caller's, so a duplicate is attached, and the original closed on success.
        // SAFETY: open as was just seen; the caller keeps it so during the call.
        let own = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        let id = socket.mux.attach(own)?;
        // SAFETY: on success the descriptor was given to this library, and no other code uses it.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        if !connection.is_null() {
            // SAFETY: it can be written.
            unsafe { connection.write(id.to_u64()) };
        }
        Ok(0)
    })
}

/// Takes a connection away.
///
/// # Safety
///
/// `socket` is null or open; the other pointers are null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_detach(
    socket: *mut Socket,
    connection: u64,
    fd: *mut c_int,
    unread: *mut *mut c_void,
    unread_bytes: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the socket is open.
        let socket = unsafe { at(socket, "socket")? };
        let none = || Failure::new(libc::ENOENT, "there is no such connection");
        let detached = socket.mux.detach(ConnectionId::from_u64(connection)).ok_or_else(none)?;
        let count = detached.unread.len();
        let mut copy = std::ptr::null_mut();
        if !unread.is_null() && count > 0 {
            // SAFETY: malloc'ed for ksf_free, and as long as what is copied there.
            unsafe {
                copy = libc::malloc(count);
                if copy.is_null() {
                    return Err(Failure::new(libc::ENOMEM, "no memory for the unread bytes; they are lost"));
                }
                std::ptr::copy_nonoverlapping(detached.unread.as_ptr(), copy.cast(), count);
            }
        }
        // SAFETY: what is not null can be written.
        unsafe {
            if let Some(unread) = unread.as_mut() {
                *unread = copy;
            }
            if let Some(unread_bytes) = unread_bytes.as_mut() {
                *unread_bytes = count;
            }
            if let Some(fd) = fd.as_mut() {
                *fd = detached.socket.into_raw_fd();
            }
        }
        Ok(0)
    })
}

/// Frees what ksf_detach returned.
///
/// # Safety
///
/// `bytes` is null or comes from ksf_detach and is not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_free(bytes: *mut c_void) {
    // SAFETY: ksf_detach makes it with malloc, and the caller frees it once.
    unsafe { libc::free(bytes) };
}

/// How many connections are attached.
///
/// # Safety
///
/// `socket` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_connections(socket: *mut Socket) -> c_int {
    // SAFETY: the socket is open.
    call(|| Ok(c_int::try_from(unsafe { at(socket, "socket")? }.mux.connections().len()).unwrap_or(c_int::MAX)))
}

/// Receives a message.
///
/// # Safety
///
/// `socket` is null or open; `message` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_receive(socket: *mut Socket, timeout_ms: c_int, message: *mut *mut Message) -> c_int {
    // SAFETY: the same contract, for one.
    unsafe { ksf_receive_many(socket, timeout_ms, message, 1) }
}

/// Receives messages.
///
/// # Safety
///
/// `socket` is null or open; `messages` has room for `max` pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_receive_many(
    socket: *mut Socket,
    timeout_ms: c_int,
    messages: *mut *mut Message,
    max: usize,
) -> c_int {
    call(|| {
        // SAFETY: the socket is open.
        let socket = unsafe { at(socket, "socket")? };
        let messages = place(messages, "messages")?;
        let mut count = 0;
        while count < max.min(CALL_MESSAGES_MAX) {
            let received = socket.receive(if count == 0 { timeout_ms } else { 0 });
            let message = match received {
                Ok(Some(message)) => message,
                Ok(None) => break,
                Err(failure) if count == 0 => return Err(failure),
                // It comes again with the next call.
                Err(_) => break,
            };
            socket.order().received(message.connection(), count);
            // SAFETY: there is room for `max` of them.
            unsafe { messages.add(count).write(Box::into_raw(Box::new(message))) };
            count += 1;
        }
        Ok(count as c_int)
    })
}

/// Stops or starts receiving.
///
/// # Safety
///
/// `socket` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_set_receiving(socket: *mut Socket, receiving: c_int) -> c_int {
    call(|| {
        // SAFETY: the socket is open.
        unsafe { at(socket, "socket")? }.socket.set_receiving(receiving != 0);
        Ok(0)
    })
}

/// A descriptor for event loops.
///
/// # Safety
///
/// `socket` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_fd(socket: *mut Socket) -> c_int {
    // SAFETY: the socket is open.
    call(|| Ok(unsafe { at(socket, "socket")? }.socket.poll_fd()?.as_raw_fd()))
}

const REPEATABLE: c_uint = 1;
const MORE: c_uint = 2;
const TO: c_uint = 4;
const IN_TURN: c_uint = 8;

/// Sends a message: an answer, or in turn, or on the connection that is named.
///
/// # Safety
///
/// `socket` is null or open; there are `count` bytes; `connection` is null or can be written, and read if it names one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_send(
    socket: *mut Socket,
    body: *const c_void,
    count: usize,
    flags: c_uint,
    timeout_ms: c_int,
    connection: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: the pointers are as the header demands.
        let (socket, body) = unsafe { (at(socket, "socket")?, bytes(body, count)?) };
        if flags & !(REPEATABLE | MORE | TO | IN_TURN) != 0 {
            return Err(Failure::new(libc::EINVAL, "flags that this version does not know"));
        }
        let mut options = SendOptions::default();
        options.repeatable = flags & REPEATABLE != 0;
        options.more = flags & MORE != 0;
        if flags & TO != 0 && flags & IN_TURN != 0 {
            return Err(Failure::new(libc::EINVAL, "KSF_TO names a connection, KSF_IN_TURN does not"));
        }
        if flags & TO != 0 {
            // SAFETY: the header demands that it can be read then.
            options.to = Some(ConnectionId::from_u64(*unsafe { at(connection, "connection")? }));
        }
        options.wait = match u64::try_from(timeout_ms) {
            // Longer than any program runs, and within the clock.
            Err(_) => Some(Duration::from_secs(1 << 32)),
            Ok(0) => None,
            Ok(timeout_ms) => Some(Duration::from_millis(timeout_ms)),
        };
        let id = match flags & (TO | IN_TURN) {
            0 => socket.send_answer(body, options)?,
            _ => socket.socket.send(body, options)?,
        };
        if !connection.is_null() {
            // SAFETY: it can be written.
            unsafe { connection.write(id.to_u64()) };
        }
        Ok(0)
    })
}

/// Sends a message on this connection.
///
/// # Safety
///
/// `socket` is null or open; there are `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_send_to(socket: *mut Socket, connection: u64, body: *const c_void, count: usize) -> c_int {
    call(|| {
        // SAFETY: the pointers are as the header demands.
        let (socket, body) = unsafe { (at(socket, "socket")?, bytes(body, count)?) };
        socket.socket.send_to(ConnectionId::from_u64(connection), body)?;
        Ok(0)
    })
}

/// The next event of a connection.
///
/// # Safety
///
/// `socket` is null or open; `event` is null or begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_event_next(socket: *mut Socket, event: *mut KsfEvent) -> c_int {
    call(|| {
        // SAFETY: the socket is open.
        let socket = unsafe { at(socket, "socket")? };
        // A wrong size must not cost an event.
        let empty = KsfEvent { size: 0, kind: 0, error: 0, connection: u64::MAX, count: 0, text: [0; 128] };
        // SAFETY: the struct begins with its size.
        unsafe { fill(event, &empty)? };
        let Some(next) = socket.mux.event() else { return Ok(0) };
        // SAFETY: as before.
        unsafe { fill(event, &next.into())? };
        Ok(1)
    })
}

/// A descriptor for event loops, of events.
///
/// # Safety
///
/// `socket` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_event_fd(socket: *mut Socket) -> c_int {
    // SAFETY: the socket is open.
    call(|| Ok(unsafe { at(socket, "socket")? }.mux.event_fd().as_raw_fd()))
}

/// Counters.
///
/// # Safety
///
/// `socket` is null or open; `stats` is null or begins with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_stats_read(socket: *mut Socket, stats: *mut KsfStats) -> c_int {
    call(|| {
        // SAFETY: the socket is open, and the struct begins with its size.
        unsafe { fill(stats, &at(socket, "socket")?.mux.kcm_stats().into())? };
        Ok(0)
    })
}
