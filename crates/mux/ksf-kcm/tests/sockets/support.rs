//! Connections and messages.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ksf::framing::{Endian, Framing, LengthPrefix};
use ksf_bpf_framing::{Builtin, FramingProgram};
use ksf_kcm::{AnyMux, Backend};
use ksf_mux::backend::Multiplexor;
use ksf_mux::{ConnectionError, ConnectionId, Event, MuxOptions};

pub(crate) use crate::common::PATIENCE;

/// A length of four bytes that counts itself, kept in the message.
const PREFIX: LengthPrefix = LengthPrefix { offset: 0, width: 4, endian: Endian::Big, adjust: 0, strip: false };

pub(crate) fn options() -> MuxOptions {
    MuxOptions::new(Framing::LengthPrefix(PREFIX))
}

/// The same as a framing program, which finds the message also in AF_KCM.
pub(crate) fn program() -> Arc<FramingProgram> {
    let builtin = Builtin::LengthPrefix { offset: 0, width: 4, big_endian: true, adjust: 0 };
    Arc::new(FramingProgram::builtin(&builtin, &ksf_bpf_framing::Options::default()).unwrap())
}

pub(crate) fn open(backend: Backend, options: MuxOptions) -> AnyMux {
    let mux = AnyMux::open(backend, options).unwrap();
    assert_eq!(mux.backend(), backend);
    mux
}

/// A message: its length in network order, then a letter all through.
pub(crate) fn message(bytes: usize, letter: u8) -> Vec<u8> {
    let mut message = vec![letter; bytes];
    message[..4].copy_from_slice(&u32::try_from(bytes).unwrap().to_be_bytes());
    message
}

/// Both ends of a connection: the one to be attached, and the peer's.
pub(crate) fn connection(receive_buffer: Option<usize>) -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    if let Some(bytes) = receive_buffer {
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, bytes).unwrap();
    }
    let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    far.set_nodelay(true).unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    (listener.accept().unwrap().0.into(), far)
}

/// An attached connection.
pub(crate) struct Tcp {
    pub(crate) far: TcpStream,
    pub(crate) id: ConnectionId,
}

impl Tcp {
    pub(crate) fn put(&self, bytes: usize, letter: u8) {
        (&self.far).write_all(&message(bytes, letter)).unwrap();
    }

    /// How much the peer receives, for which it waits.
    pub(crate) fn gets(&self) -> String {
        let mut buffer = [0; 4096];
        self.far.set_nonblocking(false).unwrap();
        (&self.far).read(&mut buffer).unwrap().to_string()
    }

    pub(crate) fn gets_bytes(&self, count: usize) -> Vec<u8> {
        let mut buffer = vec![0; count];
        self.far.set_nonblocking(false).unwrap();
        (&self.far).read_exact(&mut buffer).unwrap();
        buffer
    }

    /// What the peer has received, now.
    pub(crate) fn has(&self) -> String {
        let mut buffer = [0; 4096];
        self.far.set_nonblocking(true).unwrap();
        match (&self.far).read(&mut buffer) {
            Ok(bytes) => bytes.to_string(),
            Err(error) if error.kind() == ErrorKind::WouldBlock => "nothing".into(),
            Err(error) => panic!("{error}"),
        }
    }
}

/// The end of a connection, waited for. `look`: has ksf's multiplexor read what nobody receives.
pub(crate) fn end_of(mux: &impl Multiplexor, look: impl Fn(), connection: ConnectionId) -> ConnectionError {
    let mut error = None;
    wait_until("the connection ends", || {
        look();
        while let Some(event) = mux.event() {
            match event {
                Event::Ended { connection: ended, error: why } if ended == connection => error = Some(why),
                _ => {}
            }
        }
        error.is_some()
    });
    error.unwrap()
}

/// Waits until so many bytes have come on a connection that nobody has received.
pub(crate) fn wait_for_bytes(mux: &impl Multiplexor, look: impl Fn(), connection: ConnectionId, bytes: usize) {
    wait_until("bytes arrive", || {
        look();
        let all = mux.connection_stats();
        all.iter().any(|of| of.connection == connection && of.waiting_bytes >= bytes)
    });
}

pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "waited too long until {what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}
