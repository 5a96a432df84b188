//! Clients of a request-response server on message sockets: requests cut at random bytes, every answer checked.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ksf_mux::kcm::{Flags, KcmSocket, KcmSocketError, RecvBuffer};
use ksf_test::{PATIENCE, Random};

/// Connections of a test, and sockets that serve them.
pub(crate) const CONNECTIONS: usize = 8;
pub(crate) const SOCKETS: usize = 4;
/// Requests of a connection without an answer so far.
const WINDOW: usize = 256;

/// A request: its length, the client, its number, filling. The answer is the same.
fn request(client: usize, number: usize) -> Vec<u8> {
    let length = 12 + (client * 7 + number * 5) % 24;
    let mut bytes = vec![client as u8; length];
    for (at, word) in [length, client, number].into_iter().enumerate() {
        bytes[at * 4..][..4].copy_from_slice(&(word as u32).to_be_bytes());
    }
    bytes
}

/// One client: what it has been sent, and which of its requests are answered.
struct Client<'a> {
    stream: &'a TcpStream,
    name: usize,
    unread: Vec<u8>,
    answered: Vec<bool>,
    answers: usize,
}

impl Client<'_> {
    /// Reads answers, of which one may be waited for.
    fn read(&mut self, wait: bool) {
        self.stream.set_nonblocking(!wait).unwrap();
        let mut bytes = [0; 16 << 10];
        match self.stream.read(&mut bytes) {
            Ok(0) => panic!("client {}: the server hung up", self.name),
            Ok(count) => self.unread.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => panic!("client {}: {error}", self.name),
        }
        self.stream.set_nonblocking(false).unwrap();
        let mut at = 0;
        while let Some(answer) = self.unread.get(at..).and_then(|rest| {
            let length = u32::from_be_bytes(rest.get(..4)?.try_into().unwrap());
            rest.get(..length as usize)
        }) {
            at += answer.len();
            let number = u32::from_be_bytes(answer[8..12].try_into().unwrap()) as usize;
            assert_eq!(answer, request(self.name, number), "client {} got another one's answer", self.name);
            assert!(!std::mem::replace(&mut self.answered[number], true), "request {number} answered twice");
            self.answers += 1;
        }
        self.unread.drain(..at);
    }
}

/// Eight clients, four sockets in a thread each, as Documentation/networking/kcm.rst has it. `attach` gives the first
/// socket a connection, and returns the client's end; `work` receives and answers.
pub(crate) fn serve(
    first: &KcmSocket,
    requests: usize,
    attach: impl Fn() -> TcpStream,
    work: impl Fn(&KcmSocket) -> Result<(), KcmSocketError> + Sync,
) {
    let clients: Vec<_> = (0..CONNECTIONS).map(|_| attach()).collect();
    // The first one serves, too: AF_KCM deals messages out to every socket.
    let clones: Vec<_> = (1..SOCKETS).map(|_| first.try_clone().unwrap()).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for socket in [first].into_iter().chain(&clones) {
            // Only to look whether the clients have ended.
            socket.set_receive_timeout(Some(Duration::from_millis(50)));
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    match work(socket) {
                        Ok(()) | Err(KcmSocketError::WouldBlock) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        let ask = |(name, client)| scope.spawn(move || ask(client, name, requests));
        let asking: Vec<_> = clients.iter().enumerate().map(ask).collect();
        let ended: Vec<_> = asking.into_iter().map(|client| client.join()).collect();
        stop.store(true, Ordering::SeqCst);
        assert!(ended.iter().all(Result::is_ok), "a client failed");
    });
}

/// Receives a message, and answers it.
pub(crate) fn answer_one(socket: &KcmSocket) -> Result<(), KcmSocketError> {
    let mut buffer = [0; 64];
    let received = socket.recv(&mut buffer, Flags::NONE)?;
    assert_eq!(socket.send(&buffer[..received.bytes], Flags::EOR)?, received.bytes);
    Ok(())
}

/// Receives several with one call, and answers them with one, or as many as it takes.
pub(crate) fn answer_many(socket: &KcmSocket) -> Result<(), KcmSocketError> {
    let mut buffers = [[0; 64]; 16];
    let mut parts: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
    let mut slots: Vec<_> = parts.iter_mut().map(|parts| RecvBuffer { parts, received: None }).collect();
    let count = socket.recvmmsg(&mut slots, Flags::WAITFORONE, None)?;
    let lengths: Vec<_> = slots[..count].iter().map(|slot| slot.received.unwrap().bytes).collect();
    let answers: Vec<_> =
        buffers.iter().zip(&lengths).map(|(buffer, length)| [IoSlice::new(&buffer[..*length])]).collect();
    let messages: Vec<_> = answers.iter().map(|parts| (&parts[..], Flags::EOR)).collect();
    let mut sent = 0;
    while sent < messages.len() {
        sent += socket.sendmmsg(&messages[sent..], Flags::NONE)?;
    }
    Ok(())
}

/// Asks until every request of one connection is answered. Panics at the first answer that is another client's.
fn ask(stream: &TcpStream, name: usize, requests: usize) {
    let mut random = Random::new(0x51ce + name as u64);
    let mut client = Client { stream, name, unread: Vec::new(), answered: vec![false; requests], answers: 0 };
    // Where another client fails, this one does not wait for ever.
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut sent = 0;
    while sent < requests {
        let burst = random.within(1..=32).min(requests - sent);
        let bytes: Vec<u8> = (sent..sent + burst).flat_map(|number| request(name, number)).collect();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(random.within(1..=200).min(rest.len()));
            client.stream.write_all(now).unwrap();
            rest = later;
        }
        sent += burst;
        client.read(false);
        while sent - client.answers > WINDOW {
            client.read(true);
        }
    }
    while client.answers < requests {
        client.read(true);
    }
    assert!(client.unread.is_empty());
}
