//! Which connection a message goes to that names none: that of the message it answers. docs/kcm.md has the rule and the
//! reason for it ("Which connection a message goes to").

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::mux::ConnectionId;

/// Messages that one call may receive: what the kernel takes in one sendmmsg (UIO_MAXIOV).
pub const CALL_MESSAGES_MAX: usize = 1024;

/// Threads of one socket whose calls are kept apart. The one that received longest ago makes room for another.
const THREADS_MAX: usize = 64;

/// What the threads that use a message socket received from it with their last calls.
#[derive(Debug, Default)]
pub struct ReplyOrder {
    threads: Vec<LastCall>,
    calls: u64,
}

/// The last call of a thread that received something.
#[derive(Debug)]
struct LastCall {
    thread: u64,
    /// Its number among all calls of the socket.
    number: u64,
    /// The connections of its messages, in the order received. Never empty.
    connections: Vec<ConnectionId>,
    /// The message that is answered next.
    at: usize,
}

/// The message that is answered next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// Where the answer goes.
    pub connection: ConnectionId,
    call: u64,
    at: usize,
}

impl ReplyOrder {
    /// The calling thread has received a message of this connection, as the `at`-th one of its call, counted from 0.
    pub fn received(&mut self, connection: ConnectionId, at: usize) {
        let thread = this_thread();
        let place = self.threads.iter().position(|last| last.thread == thread).unwrap_or_else(|| self.place(thread));
        let Some(last) = self.threads.get_mut(place) else { return };
        if at > 0 && (1..CALL_MESSAGES_MAX).contains(&last.connections.len()) {
            last.connections.push(connection);
            return;
        }
        self.calls += 1;
        last.number = self.calls;
        last.at = 0;
        last.connections.clear();
        last.connections.push(connection);
    }

    /// A place for a thread that has none.
    fn place(&mut self, thread: u64) -> usize {
        if self.threads.len() < THREADS_MAX {
            self.threads.push(LastCall { thread, number: 0, connections: Vec::new(), at: 0 });
            return self.threads.len() - 1;
        }
        let oldest = self.threads.iter().enumerate().min_by_key(|(_, last)| last.number);
        let place = oldest.map_or(0, |(place, _)| place);
        self.threads[place].thread = thread;
        self.threads[place].connections.clear();
        place
    }

    /// The message that the calling thread answers next. `None`: nothing was received from this socket.
    pub fn next(&self) -> Option<Unanswered> {
        let thread = this_thread();
        let own = self.threads.iter().find(|last| last.thread == thread);
        let last = own.or_else(|| self.threads.iter().max_by_key(|last| last.number))?;
        let connection = *last.connections.get(last.at)?;
        Some(Unanswered { connection, call: last.number, at: last.at })
    }

    /// The message is answered, or its sender is known to be gone. Of the last message of a call there may be more answers.
    pub fn answered(&mut self, message: Unanswered) {
        let last = self.threads.iter_mut().find(|last| last.number == message.call);
        if let Some(last) = last.filter(|last| last.at == message.at && last.at + 1 < last.connections.len()) {
            last.at += 1;
        }
    }
}

/// A number of this thread that no other ever has. Unlike [`std::thread::current`] it costs one read, and may be asked
/// for while a thread ends.
pub(crate) fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }
    let number = NUMBER.get();
    if number != 0 {
        return number;
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    NUMBER.set(number);
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(index: u32) -> ConnectionId {
        ConnectionId { index, generation: 0 }
    }

    /// Where the next answers of this thread go.
    fn answer(order: &mut ReplyOrder, count: usize) -> Vec<u32> {
        let next = |order: &mut ReplyOrder| {
            let message = order.next().unwrap();
            order.answered(message);
            message.connection.index
        };
        (0..count).map(|_| next(order)).collect()
    }

    fn call(order: &mut ReplyOrder, connections: &[u32]) {
        connections.iter().enumerate().for_each(|(at, connection)| order.received(id(*connection), at));
    }

    #[test]
    fn answers_follow_the_last_call_in_its_order() {
        let mut order = ReplyOrder::default();
        assert_eq!(order.next(), None);
        call(&mut order, &[3]);
        assert_eq!(answer(&mut order, 3), [3, 3, 3], "one message may have several answers");
        call(&mut order, &[1, 2, 1]);
        assert_eq!(answer(&mut order, 4), [1, 2, 1, 1]);
        // Of messages without an answer nothing is left over.
        call(&mut order, &[5, 6, 7]);
        assert_eq!(answer(&mut order, 1), [5]);
        call(&mut order, &[8]);
        call(&mut order, &[9]);
        assert_eq!(answer(&mut order, 2), [9, 9]);
    }

    #[test]
    fn a_message_is_answered_once() {
        let mut order = ReplyOrder::default();
        call(&mut order, &[1, 2]);
        let first = order.next().unwrap();
        order.answered(first);
        order.answered(first);
        assert_eq!(answer(&mut order, 1), [2]);
        // Of a call that others have followed.
        call(&mut order, &[3, 4]);
        order.answered(first);
        assert_eq!(answer(&mut order, 2), [3, 4]);
    }

    #[test]
    fn threads_answer_what_they_received_themselves() {
        let mut order = ReplyOrder::default();
        call(&mut order, &[1, 2]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // It has received nothing: the last call of any thread.
                assert_eq!(answer(&mut order, 1), [1]);
                call(&mut order, &[7, 8]);
                assert_eq!(answer(&mut order, 2), [7, 8]);
            });
        });
        assert_eq!(answer(&mut order, 1), [2]);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut order = ReplyOrder::default();
        let mut peers = Vec::new();
        for thread in 0..2 * THREADS_MAX as u32 {
            let worker = std::thread::spawn(move || {
                call(&mut order, &[thread]);
                order
            });
            order = worker.join().unwrap();
            peers.push(order.threads.len());
        }
        assert_eq!(peers.iter().max(), Some(&THREADS_MAX));
        assert_eq!(answer(&mut order, 1), [2 * THREADS_MAX as u32 - 1], "the youngest are kept");
        (0..10 * CALL_MESSAGES_MAX).for_each(|at| order.received(id(1), at));
        assert!(order.threads.iter().all(|last| last.connections.len() <= CALL_MESSAGES_MAX));
    }
}
