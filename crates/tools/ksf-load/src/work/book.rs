//! The books: what is in flight on which connection, and what each reply is worth.
//!
//! No socket and no clock here: the driver brings bytes and times.

use super::load::{Class, Job};
use super::message::{Codec, Name, Reply};
use crate::drive::table::{Request, Settled, Table};
use crate::record::Latencies;
use crate::record::fault::{Fault, Faults};
use crate::record::tally::Kind;

/// How many faults are described in words.
const NOTES_MAX: usize = 10;

/// One connection's part of the books.
#[derive(Debug)]
struct Account {
    table: Table,
    /// By slot of the table.
    classes: Box<[Class]>,
    answered: u64,
    sum_ns: u128,
    /// The youngest request that was answered, plus one.
    youngest: u64,
    /// It failed or ended: nothing more is sent.
    closed: bool,
}

/// What a reply was, for whoever decides what to send next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// A request is settled: there is room for another.
    Settled,
    /// Nothing is settled; the fault is counted.
    Nothing,
    /// The connection cannot be read any further.
    Unreadable,
}

/// The books of one run.
#[derive(Debug)]
pub(crate) struct Book {
    accounts: Vec<Account>,
    codec: Codec,
    issued: u64,
    /// By class.
    latencies: [Latencies; Class::ALL.len()],
    faults: Faults,
    reordered: u64,
    notes: Vec<String>,
}

impl Book {
    /// `in_flight[i]`: the most requests in flight on connection i.
    pub(crate) fn new(in_flight: &[usize], codec: Codec) -> Book {
        // The base is 0, so the low bits of an identifier are the slot of the table: see `slot`.
        let account = |&most: &usize| Account {
            table: Table::new(most, 32, 0),
            classes: vec![Class::Quick; most.next_power_of_two()].into(),
            answered: 0,
            sum_ns: 0,
            youngest: 0,
            closed: false,
        };
        Book {
            accounts: in_flight.iter().map(account).collect(),
            codec,
            issued: 0,
            latencies: Class::ALL.map(|_| Latencies::new()),
            faults: Faults::default(),
            reordered: 0,
            notes: Vec::new(),
        }
    }

    pub(crate) fn issued(&self) -> u64 {
        self.issued
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.accounts.iter().map(|account| account.table.in_flight()).sum()
    }

    /// Whether connection `at` can take another request.
    pub(crate) fn has_room(&self, at: usize) -> bool {
        let account = &self.accounts[at];
        !account.closed && account.table.has_room()
    }

    pub(crate) fn is_closed(&self, at: usize) -> bool {
        self.accounts[at].closed
    }

    /// Whether a reply was wrong or is missing.
    pub(crate) fn is_clean(&self) -> bool {
        self.faults.total() == 0
    }

    pub(crate) fn faults(&self) -> &Faults {
        &self.faults
    }

    pub(crate) fn latencies(&self, class: Class) -> &Latencies {
        &self.latencies[class as usize]
    }

    /// Correct replies on connection `at`, and their mean latency in nanoseconds.
    pub(crate) fn answered(&self, at: usize) -> (u64, f64) {
        let account = &self.accounts[at];
        (account.answered, account.sum_ns as f64 / account.answered.max(1) as f64)
    }

    /// Replies that came after the reply to a younger request of their connection.
    pub(crate) fn reordered(&self) -> u64 {
        self.reordered
    }

    pub(crate) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Appends a request of connection `at` to `out`. Only where [`Book::has_room`].
    pub(crate) fn issue(&mut self, at: usize, job: Job, start_ns: u64, out: &mut Vec<u8>) {
        let account = &mut self.accounts[at];
        let (id, index) = account.table.issue(start_ns);
        let slot = slot(&account.classes, id);
        account.classes[slot] = job.class;
        self.issued += 1;
        self.codec.put_request(out, job, Name { connection: at as u32, id, index });
    }

    /// Takes the replies at the front of `bytes`, which came on connection `at`, and tells `each` of them.
    /// Returns how many bytes they took.
    pub(crate) fn take(&mut self, at: usize, bytes: &[u8], now_ns: u64, mut each: impl FnMut(Taken)) -> usize {
        let mut used = 0;
        while let Some((reply, length)) = self.codec.take_reply(&bytes[used..]) {
            used += length;
            let taken = self.settle(at, reply, now_ns);
            each(taken);
            if taken == Taken::Unreadable {
                return bytes.len();
            }
        }
        used
    }

    fn settle(&mut self, at: usize, reply: Reply, now_ns: u64) -> Taken {
        match reply {
            Reply::Discarded => match self.accounts[at].table.settle_oldest() {
                Some(request) => self.right(at, request, Class::Quick, now_ns),
                None => self.fault(at, Fault::Unsolicited, 1, "a reply, and nothing is in flight"),
            },
            Reply::Malformed => {
                self.fault(at, Fault::Malformed, 1, "a reply of another length or status than a reply has");
                self.close(at, "it cannot be read any further");
                Taken::Unreadable
            }
            Reply::Done(name) | Reply::Busy(name) | Reply::Corrupt(name) => self.named(at, name, reply, now_ns),
        }
    }

    fn named(&mut self, at: usize, name: Name, reply: Reply, now_ns: u64) -> Taken {
        if name.connection != at as u32 {
            let what = format!("the reply to request {} of connection {}", name.index, name.connection);
            return self.fault(at, Fault::Misdirected, 1, &what);
        }
        let account = &mut self.accounts[at];
        let class = account.classes[slot(&account.classes, name.id)];
        let fault = match account.table.settle(name.id) {
            Settled::Answer(request) if request.index == name.index && matches!(reply, Reply::Done(_)) => {
                return self.right(at, request, class, now_ns);
            }
            Settled::Answer(request) => {
                let fault = match reply {
                    Reply::Busy(_) => Fault::Busy,
                    _ => Fault::Corrupt,
                };
                self.fault(at, fault, 1, &format!("a wrong reply to request {}: {}", request.index, fault.name()));
                return Taken::Settled;
            }
            Settled::Duplicate => Fault::Duplicate,
            Settled::Late => Fault::Late,
            Settled::Unknown => Fault::Unknown,
        };
        self.fault(at, fault, 1, &format!("a reply to request {}: {}", name.index, fault.name()))
    }

    #[inline]
    fn right(&mut self, at: usize, request: Request, class: Class, now_ns: u64) -> Taken {
        let latency_ns = now_ns.saturating_sub(request.start_ns);
        self.latencies[class as usize].record(latency_ns);
        let account = &mut self.accounts[at];
        account.answered += 1;
        account.sum_ns += u128::from(latency_ns);
        self.reordered += u64::from(request.index < account.youngest);
        account.youngest = account.youngest.max(request.index + 1);
        Taken::Settled
    }

    /// Counts what was sent before `deadline_ns` and has no reply as lost.
    pub(crate) fn expire(&mut self, deadline_ns: u64) -> u64 {
        let mut all = 0;
        for at in 0..self.accounts.len() {
            let lost = self.accounts[at].table.expire(deadline_ns);
            if lost > 0 {
                self.fault(at, Fault::Lost, lost, &format!("{lost} requests had no reply within the time limit"));
            }
            all += lost;
        }
        all
    }

    /// Connection `at` has ended: what is in flight on it will have no reply.
    pub(crate) fn close(&mut self, at: usize, why: &str) {
        if std::mem::replace(&mut self.accounts[at].closed, true) {
            return;
        }
        let outstanding = self.accounts[at].table.expire(u64::MAX);
        if outstanding > 0 {
            self.fault(at, Fault::Closed, outstanding, &format!("closed with {outstanding} in flight: {why}"));
        }
    }

    fn fault(&mut self, at: usize, fault: Fault, count: u64, what: &str) -> Taken {
        self.faults.add(fault, count);
        if self.notes.len() < NOTES_MAX {
            self.notes.push(format!("connection {at}: {what}"));
        }
        Taken::Nothing
    }
}

/// The slot of the table that an identifier names.
fn slot(classes: &[Class], id: u32) -> usize {
    id as usize & (classes.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::super::load::Kind;
    use super::super::message::tests::answer;
    use super::*;

    const BYTES: usize = 40;

    fn job(class: Class) -> Job {
        Job { class, kind: Kind::Inline, work_us: 0 }
    }

    fn request(book: &mut Book, at: usize, class: Class, start_ns: u64) -> Vec<u8> {
        let mut out = Vec::new();
        book.issue(at, job(class), start_ns, &mut out);
        out
    }

    fn take(book: &mut Book, at: usize, bytes: &[u8], now_ns: u64) -> Vec<Taken> {
        let mut taken = Vec::new();
        assert_eq!(book.take(at, bytes, now_ns, |what| taken.push(what)), bytes.len());
        taken
    }

    /// All faults that were counted.
    fn faults(book: &Book) -> Vec<(String, u64)> {
        book.faults().by_name(Fault::OF_WORK).into_iter().filter(|(_, count)| *count > 0).collect()
    }

    fn one(fault: &str, count: u64) -> Vec<(String, u64)> {
        vec![(fault.to_owned(), count)]
    }

    #[test]
    fn replies_in_any_order_belong_to_their_class_and_start() {
        let mut book = Book::new(&[2, 2], Codec::new(BYTES, false));
        let slow = request(&mut book, 0, Class::Slow, 100);
        let quick = request(&mut book, 0, Class::Quick, 200);
        let other = request(&mut book, 1, Class::Quick, 300);
        assert!(!book.has_room(0) && book.has_room(1));
        assert_eq!(take(&mut book, 0, &answer(&quick), 1200), [Taken::Settled]);
        assert_eq!(take(&mut book, 1, &answer(&other), 1300), [Taken::Settled]);
        assert_eq!(take(&mut book, 0, &answer(&slow), 9100), [Taken::Settled]);
        assert_eq!((book.latencies(Class::Quick).count(), book.latencies(Class::Quick).max_ns), (2, 1000));
        assert_eq!((book.latencies(Class::Slow).count(), book.latencies(Class::Slow).max_ns), (1, 9000));
        assert_eq!((book.reordered(), book.in_flight(), book.issued()), (1, 0, 3));
        assert_eq!((book.answered(0), book.answered(1)), ((2, 5000.0), (1, 1000.0)));
        assert!(book.is_clean());
    }

    #[test]
    fn a_reply_counts_once() {
        let mut book = Book::new(&[4], Codec::new(BYTES, false));
        let reply = answer(&request(&mut book, 0, Class::Quick, 0));
        assert_eq!(take(&mut book, 0, &[reply.clone(), reply].concat(), 10), [Taken::Settled, Taken::Nothing]);
        assert_eq!(faults(&book), one("duplicate", 1));
        assert_eq!(book.latencies(Class::Quick).count(), 1);
    }

    #[test]
    fn a_reply_on_another_connection_is_none() {
        let mut book = Book::new(&[1, 1], Codec::new(BYTES, false));
        let (first, _) = (request(&mut book, 0, Class::Quick, 0), request(&mut book, 1, Class::Quick, 0));
        assert_eq!(take(&mut book, 1, &answer(&first), 10), [Taken::Nothing]);
        assert_eq!(faults(&book), one("misdirected", 1));
        assert_eq!(book.in_flight(), 2);
    }

    #[test]
    fn a_reply_that_is_late_or_never_comes_is_lost() {
        let mut book = Book::new(&[2], Codec::new(BYTES, false));
        let old = request(&mut book, 0, Class::Quick, 100);
        let young = request(&mut book, 0, Class::Quick, 900);
        assert_eq!(book.expire(500), 1);
        assert_eq!(book.expire(500), 0);
        assert_eq!(faults(&book), one("lost", 1));
        assert_eq!(take(&mut book, 0, &answer(&old), 1000), [Taken::Nothing]);
        assert_eq!(take(&mut book, 0, &answer(&young), 1000), [Taken::Settled]);
        assert_eq!(faults(&book), [("late".to_owned(), 1), ("lost".to_owned(), 1)]);
    }

    #[test]
    fn another_requests_number_or_other_bytes_are_corrupt() {
        for at in [23, BYTES - 1] {
            let mut book = Book::new(&[2], Codec::new(BYTES, false));
            // A reply is four bytes shorter than its request: its payload begins four bytes earlier.
            let mut reply = answer(&request(&mut book, 0, Class::Quick, 0));
            reply[at - 4] ^= 1;
            assert_eq!(take(&mut book, 0, &reply, 10), [Taken::Settled]);
            assert_eq!(faults(&book), one("corrupt", 1), "byte {at}");
            assert_eq!(book.latencies(Class::Quick).count(), 0);
        }
    }

    #[test]
    fn a_busy_server_is_a_fault_and_frees_the_request() {
        let mut book = Book::new(&[1], Codec::new(BYTES, false));
        let mut reply = answer(&request(&mut book, 0, Class::Quick, 0));
        reply[7] = 1;
        assert_eq!(take(&mut book, 0, &reply, 10), [Taken::Settled]);
        assert_eq!(faults(&book), one("busy", 1));
        assert!(book.has_room(0));
    }

    #[test]
    fn what_was_never_sent_is_unknown() {
        let mut book = Book::new(&[1], Codec::new(BYTES, false));
        let mut reply = answer(&request(&mut book, 0, Class::Quick, 0));
        reply[15] ^= 0x40;
        assert_eq!(take(&mut book, 0, &reply, 10), [Taken::Nothing]);
        assert_eq!(faults(&book), one("unknown", 1));
    }

    #[test]
    fn a_malformed_reply_ends_its_connection() {
        let mut book = Book::new(&[2, 1], Codec::new(BYTES, false));
        request(&mut book, 0, Class::Quick, 0);
        request(&mut book, 0, Class::Quick, 0);
        assert_eq!(take(&mut book, 0, &[0, 0, 0, 9, 1, 2, 3], 10), [Taken::Unreadable]);
        assert_eq!(faults(&book), [("closed".to_owned(), 2), ("malformed".to_owned(), 1)]);
        assert!(!book.has_room(0) && book.has_room(1) && book.is_closed(0));
        assert!(book.notes()[0].starts_with("connection 0: "), "{:?}", book.notes());
        book.close(0, "again");
        assert_eq!(book.faults().count(Fault::Closed), 2);
    }

    #[test]
    fn discarded_requests_are_settled_in_turn_and_surplus_replies_seen() {
        let mut book = Book::new(&[3], Codec::new(5000, true));
        let mut requests = Vec::new();
        for start_ns in [0, 10] {
            let quick = Job { class: Class::Quick, kind: Kind::Discard, work_us: 0 };
            book.issue(0, quick, start_ns, &mut requests);
        }
        let reply = answer(&requests[..5000]);
        let three = [reply.clone(), reply.clone(), reply].concat();
        assert_eq!(take(&mut book, 0, &three, 30), [Taken::Settled, Taken::Settled, Taken::Nothing]);
        assert_eq!((book.latencies(Class::Quick).min_ns, book.latencies(Class::Quick).max_ns), (20, 30));
        assert_eq!(faults(&book), one("unsolicited", 1));
    }

    #[test]
    fn half_a_reply_waits_for_the_rest() {
        let mut book = Book::new(&[1], Codec::new(BYTES, false));
        let reply = answer(&request(&mut book, 0, Class::Quick, 0));
        assert_eq!(book.take(0, &reply[..20], 5, |_| panic!("nothing is whole")), 0);
        assert_eq!(take(&mut book, 0, &reply, 10), [Taken::Settled]);
    }
}
