//! The out-queue: threads push and send, a peer makes room now and then, and the connection ends in the middle of it.

use std::collections::BTreeMap;

use ksf::framing::{Framing, LengthPrefix};
use ksf::output::SendBatch;
use rustix::io::Errno;
use shuttle::thread;

use crate::options::MessageFraming;
use crate::out_queue::{OutQueue, Pushed, Room, Sent, Transmit};
use crate::sync::{Arc, AtomicUsize, Mutex, Ordering};

/// How sending ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything is sent.
    Drained,
    /// The connection is detached while others push and send.
    Stopped,
    /// The same for a connection that failed.
    Failed,
    /// The socket refuses everything after so many bytes.
    Broken(usize),
}

/// A TCP socket with a small buffer.
#[derive(Default)]
struct Socket(Mutex<Buffer>);

#[derive(Default)]
struct Buffer {
    arrived: Vec<u8>,
    room: usize,
    /// A send found no room: the next room is an event (SOCK_NOSPACE).
    asked_for_room: bool,
    breaks_at: Option<usize>,
}

impl Transmit for Socket {
    fn transmit(&self, batch: &SendBatch) -> Result<usize, Errno> {
        let mut buffer = self.0.lock().unwrap();
        if buffer.breaks_at.is_some_and(|bytes| buffer.arrived.len() >= bytes) {
            return Err(Errno::PIPE);
        }
        if buffer.room == 0 {
            buffer.asked_for_room = true;
            return Err(Errno::AGAIN);
        }
        let mut slices = [&[][..]; 4];
        let filled = batch.slices(&mut slices);
        let most = buffer.room.min(buffer.breaks_at.map_or(usize::MAX, |bytes| bytes - buffer.arrived.len()));
        let bytes: Vec<_> = slices[..filled].iter().copied().flatten().copied().take(most).collect();
        buffer.room -= bytes.len();
        buffer.arrived.extend_from_slice(&bytes);
        Ok(bytes.len())
    }
}

const PUSHERS: usize = 2;
const MESSAGES: usize = 2;
/// Header, who pushed it, which of his it is, and one byte more, so that it can be cut in every place.
const MESSAGE_BYTES: usize = 4;

fn framing() -> MessageFraming {
    Framing::LengthPrefix(LengthPrefix::big_endian(1)).into()
}

fn body(pusher: usize, message: usize) -> [u8; MESSAGE_BYTES - 1] {
    [pusher as u8, message as u8, 0xee]
}

/// Two threads push two messages each and send; a peer makes room in pieces of `room_bytes`; sending ends as `end` says.
///
/// The bytes that arrived are whole messages in the order of each pusher, each once, but for one that was cut off by the
/// end; and a message that did not arrive in full is told of: returned, refused, or counted as uncertain.
pub fn accounts_for_every_message(end: End, room_bytes: usize, repeatable: bool) {
    let socket = Arc::new(Socket::default());
    if let End::Broken(bytes) = end {
        socket.0.lock().unwrap().breaks_at = Some(bytes);
    }
    let out_queue = Arc::new(OutQueue::new(Arc::clone(&socket), Arc::default()));
    let failures = Arc::new(AtomicUsize::new(0));
    let send = |out_queue: &OutQueue<Socket>, failures: &AtomicUsize| {
        if matches!(out_queue.send(), Sent::Failed(_)) {
            failures.fetch_add(1, Ordering::SeqCst);
        }
    };
    let pushers: Vec<_> = (0..PUSHERS)
        .map(|pusher| {
            let (out_queue, failures) = (Arc::clone(&out_queue), Arc::clone(&failures));
            thread::spawn(move || {
                let mut refused = Vec::new();
                for message in 0..MESSAGES {
                    let bytes = body(pusher, message);
                    if out_queue.push_movable(&framing(), Room::Reserved(0), &bytes, repeatable).unwrap()
                        != Pushed::Queued
                    {
                        refused.push(bytes.to_vec());
                    }
                    send(&out_queue, &failures);
                }
                refused
            })
        })
        .collect();
    let peer = {
        let (socket, out_queue, failures) = (Arc::clone(&socket), Arc::clone(&out_queue), Arc::clone(&failures));
        thread::spawn(move || {
            for _ in 0..(PUSHERS * MESSAGES * MESSAGE_BYTES).div_ceil(room_bytes) {
                let mut buffer = socket.0.lock().unwrap();
                buffer.room += room_bytes;
                let is_event = std::mem::take(&mut buffer.asked_for_room);
                drop(buffer);
                // As Shared::handle does for EPOLLOUT.
                if is_event && out_queue.is_blocked() {
                    send(&out_queue, &failures);
                }
            }
        })
    };
    let ender = {
        let out_queue = Arc::clone(&out_queue);
        thread::spawn(move || match end {
            End::Stopped => Leftover { rest: out_queue.stop().1, ..Leftover::default() },
            End::Failed => Leftover::of(&out_queue),
            End::Drained | End::Broken(_) => Leftover::default(),
        })
    };
    let refused: Vec<_> = pushers.into_iter().flat_map(|pusher| pusher.join().unwrap()).collect();
    peer.join().unwrap();
    let mut leftover = ender.join().unwrap();
    if let End::Broken(_) = end {
        assert_eq!(failures.load(Ordering::SeqCst), 1, "a failure is told once");
        leftover = Leftover::of(&out_queue);
    }
    assert_eq!(out_queue.bytes(), 0, "bytes stay behind");
    let arrived = socket.0.lock().unwrap().arrived.clone();
    if end == End::Drained {
        assert_eq!(arrived.len(), PUSHERS * MESSAGES * MESSAGE_BYTES, "not everything was sent");
    }
    check(end, arrived, &leftover, &refused, repeatable);
}

#[derive(Default)]
struct Leftover {
    /// Bytes that `stop` returned.
    rest: Vec<u8>,
    movable: Vec<Vec<u8>>,
    uncertain: usize,
}

impl Leftover {
    fn of(out_queue: &OutQueue<Socket>) -> Self {
        let leftover = out_queue.fail();
        let movable = leftover.movable.into_iter().map(|(body, _)| body).collect();
        Self { movable, uncertain: leftover.uncertain, ..Self::default() }
    }
}

fn check(end: End, mut arrived: Vec<u8>, leftover: &Leftover, refused: &[Vec<u8>], repeatable: bool) {
    // What `stop` returned continues what arrived.
    arrived.extend_from_slice(&leftover.rest);
    let (messages, cut) = arrived.as_chunks::<MESSAGE_BYTES>();
    let mut told: BTreeMap<Vec<u8>, usize> = BTreeMap::new();
    let mut next = [0; PUSHERS];
    for message in messages {
        assert_eq!(usize::from(message[0]), MESSAGE_BYTES - 1, "a torn message: {arrived:?}");
        let pusher = usize::from(message[1]);
        assert!(usize::from(message[2]) >= next[pusher], "out of order: {arrived:?}");
        next[pusher] = usize::from(message[2]) + 1;
        *told.entry(message[1..].to_vec()).or_default() += 1;
    }
    assert!(end != End::Stopped || cut.is_empty(), "{cut:?} of a message are missing");
    for body in leftover.movable.iter().chain(refused) {
        *told.entry(body.clone()).or_default() += 1;
    }
    // Only the message that was cut may be uncertain, and one that may be repeated never is.
    assert_eq!(leftover.uncertain, usize::from(!cut.is_empty() && !repeatable));
    assert_eq!(told.len() + leftover.uncertain, PUSHERS * MESSAGES, "not all are told of: {told:?}");
    assert!(told.values().all(|count| *count == 1), "told of twice: {told:?}");
    let is_body = |told: &Vec<u8>| (0..PUSHERS * MESSAGES).any(|at| *told == body(at / MESSAGES, at % MESSAGES));
    assert!(told.keys().all(is_body), "not what was pushed: {told:?}");
}
