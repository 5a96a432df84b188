//! Connections closed from this side whose peers may still read what was sent last.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ksf::limits::Time;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};

use crate::connection::Connection;
use crate::sync::Arc;

/// The socket of such a connection. It is closed first, then the connection gives up its place among those of the server.
pub(crate) struct Lingering {
    socket: OwnedFd,
    conn: Arc<Connection>,
    deadline: Time,
    /// Thrown away so far.
    received_bytes: usize,
}

impl std::fmt::Debug for Lingering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lingering").field("conn", &self.conn).finish_non_exhaustive()
    }
}

impl Lingering {
    pub(crate) fn new(socket: OwnedFd, conn: &Arc<Connection>, deadline: Time) -> Self {
        Self { socket, conn: Arc::clone(conn), deadline, received_bytes: 0 }
    }

    /// Throws away what the peer sends. True when the connection is to be closed: its peer has ended, its time is over, or
    /// more than [`Limits::linger_bytes_max`](ksf::limits::Limits::linger_bytes_max) bytes came. The last of those stay in
    /// the socket, which makes the kernel reset it.
    pub(crate) fn is_over(&mut self, now: Time) -> bool {
        let mut waste = [0; 4096];
        if now >= self.deadline {
            return true;
        }
        let bytes_max = self.conn.limits().linger_bytes_max;
        for _ in 0..64 {
            let room = bytes_max.saturating_sub(self.received_bytes);
            let (len, flags) = match room {
                0 => (1, RecvFlags::DONTWAIT | RecvFlags::PEEK),
                room => (room.min(waste.len()), RecvFlags::DONTWAIT),
            };
            match recv(&self.socket, &mut waste[..len], flags) {
                Ok((0, _)) => return true,
                Ok(_) if room == 0 => {
                    self.conn.mux.counts.lingers_cut.fetch_add(1, Ordering::Relaxed);
                    return true;
                }
                Ok((bytes, _)) => self.received_bytes += bytes,
                Err(Errno::INTR) => {}
                Err(errno) => return errno != Errno::AGAIN,
            }
        }
        false
    }
}

/// Closes a connection whose replies are not all sent. After an orderly end TCP would keep what it has for minutes, and the
/// peer would take the end for that of its replies.
pub(crate) fn reset(socket: OwnedFd) {
    let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
    drop(socket);
}
