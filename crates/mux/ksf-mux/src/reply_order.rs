//! Which connection a message goes to that names none: that of the message it answers. docs/kcm.md has the rule and the
//! reason for it ("Which connection a message goes to").

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::thread::gettid;

use crate::mux::ConnectionId;

/// Messages that one call may receive: what the kernel takes in one sendmmsg (UIO_MAXIOV).
pub const CALL_MESSAGES_MAX: usize = 1024;

/// Calls that are kept before the first search for threads that have ended.
const FIRST_SEARCH: usize = 64;

/// What the threads that use a message socket received from it with their last calls. Each thread has a place as long as
/// it lives, so that none answers what another one received; the number of threads bounds their memory.
#[derive(Debug)]
pub struct ReplyOrder {
    /// In the order of their threads' numbers.
    threads: Vec<LastCall>,
    calls: u64,
    /// The thread that made the last of them.
    youngest: u64,
    /// So many places are reached before the places of threads that have ended are looked for again.
    search_at: usize,
}

impl Default for ReplyOrder {
    fn default() -> Self {
        Self { threads: Vec::new(), calls: 0, youngest: 0, search_at: FIRST_SEARCH }
    }
}

/// The last call of a thread that received something.
#[derive(Debug)]
struct LastCall {
    thread: u64,
    /// The kernel's number of it, which another thread may get when this one has ended.
    tid: Pid,
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
    /// The thread that received it, and the number of the call.
    thread: u64,
    call: u64,
    at: usize,
}

impl ReplyOrder {
    /// The calling thread has received a message of this connection, as the `at`-th one of its call, counted from 0.
    pub fn received(&mut self, connection: ConnectionId, at: usize) {
        let thread = this_thread();
        let place = self.find(thread).unwrap_or_else(|_| self.make_place(thread, gettid()));
        let last = &mut self.threads[place];
        if at > 0 && (1..CALL_MESSAGES_MAX).contains(&last.connections.len()) {
            last.connections.push(connection);
            return;
        }
        self.calls += 1;
        self.youngest = thread;
        last.number = self.calls;
        last.at = 0;
        last.connections.clear();
        last.connections.push(connection);
    }

    /// The place of a thread, or where it belongs if it has none.
    fn find(&self, thread: u64) -> Result<usize, usize> {
        self.threads.binary_search_by_key(&thread, |last| last.thread)
    }

    /// Makes a place for the calling thread, which has none.
    fn make_place(&mut self, thread: u64, tid: Pid) -> usize {
        // It receives now: no thread answers an earlier call of another one.
        self.threads.retain(|last| last.tid != tid);
        if self.threads.len() >= self.search_at {
            // A thread that has received nothing answers the last call of all, whether its thread has ended or not.
            self.threads.retain(|last| is_alive(last.tid) || last.thread == self.youngest);
            self.search_at = FIRST_SEARCH.max(2 * self.threads.len());
        }
        let at = self.threads.partition_point(|last| last.thread < thread);
        self.threads.insert(at, LastCall { thread, tid, number: 0, connections: Vec::new(), at: 0 });
        at
    }

    /// The message that the calling thread answers next. `None`: nothing was received from this socket.
    pub fn next(&self) -> Option<Unanswered> {
        let place = self.find(this_thread()).or_else(|_| self.find(self.youngest)).ok()?;
        let last = &self.threads[place];
        let connection = *last.connections.get(last.at)?;
        Some(Unanswered { connection, thread: last.thread, call: last.number, at: last.at })
    }

    /// The message is answered, or its sender is known to be gone. Of the last message of a call there may be more answers.
    pub fn answered(&mut self, message: Unanswered) {
        let Ok(place) = self.find(message.thread) else { return };
        let last = &mut self.threads[place];
        if last.number == message.call && last.at == message.at && last.at + 1 < last.connections.len() {
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

/// False if no thread of the machine has this number. A variable of the thread would know its end exactly, but to make it
/// libc allocates, which a signal handler may not cause.
fn is_alive(tid: Pid) -> bool {
    test_kill_process(tid) != Err(Errno::SRCH)
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

    /// Runs a call in a thread of its own. The kernel forgets its number some time after join returns.
    fn call_of_a_thread(order: &mut ReplyOrder, connections: &[u32]) {
        let call = || {
            call(order, connections);
            gettid()
        };
        let tid = std::thread::scope(|scope| scope.spawn(call).join()).unwrap();
        while is_alive(tid) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_replaces_one_that_had_its_number() {
        let mut order = ReplyOrder::default();
        call(&mut order, &[1]);
        let others = Pid::from_raw(gettid().as_raw_nonzero().get() + 1).unwrap();
        order.make_place(this_thread() + 1, others);
        assert_eq!(order.make_place(this_thread() + 2, gettid()), 1);
        assert_eq!(order.threads.iter().map(|last| last.tid).collect::<Vec<_>>(), [others, gettid()]);
    }

    #[test]
    fn what_threads_received_that_have_ended_is_forgotten() {
        let mut order = ReplyOrder::default();
        call(&mut order, &[1000, 1001]);
        let mut most = 0;
        for thread in 0..4 * FIRST_SEARCH as u32 {
            call_of_a_thread(&mut order, &[thread]);
            most = most.max(order.threads.len());
        }
        assert_eq!(most, FIRST_SEARCH);
        assert_eq!(answer(&mut order, 2), [1000, 1001], "this thread lives");
        // Nothing was received since the last one ended.
        let of_another = std::thread::scope(|scope| scope.spawn(|| answer(&mut order, 1)).join()).unwrap();
        assert_eq!(of_another, [4 * FIRST_SEARCH as u32 - 1]);
    }

    #[test]
    fn the_call_of_a_thread_that_has_ended_is_kept_while_it_is_the_youngest() {
        let mut order = ReplyOrder::default();
        for thread in 0..FIRST_SEARCH as u32 {
            call_of_a_thread(&mut order, &[thread]);
        }
        let place = order.make_place(this_thread(), gettid());
        assert_eq!((place, order.threads.len()), (1, 2));
        assert_eq!(order.threads[0].connections, [id(FIRST_SEARCH as u32 - 1)]);
    }

    #[test]
    fn a_call_receives_a_bounded_number_of_messages() {
        let mut order = ReplyOrder::default();
        (0..10 * CALL_MESSAGES_MAX).for_each(|at| order.received(id(1), at));
        assert!(order.threads.iter().all(|last| last.connections.len() <= CALL_MESSAGES_MAX));
    }
}
