//! Messages of the work service as a [`Client`]: every reply carries the name of its request.

use std::sync::Arc;

use crate::drive::protocol::{Client, Protocol, Ticket};
use crate::record::{Fault, Sink};

use super::message::{Codec, Name, Reply};
use super::mix::{Class, Job, Jobs, Mix};

/// The work service, as one run loads it.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) codec: Arc<Codec>,
    pub(crate) mix: Mix,
    pub(crate) seed: u64,
}

impl Protocol for Work {
    type Client = WorkClient;
    type Mix = Jobs;

    fn client(&self, connection: u32) -> WorkClient {
        WorkClient { codec: self.codec.clone(), connection, request: Vec::with_capacity(self.request_bytes()) }
    }

    fn mix(&self, _thread: usize) -> Jobs {
        Jobs::new(self.mix, self.seed)
    }

    fn operations(&self) -> usize {
        Class::ALL.len()
    }

    fn request_bytes(&self) -> usize {
        self.codec.request_bytes()
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct WorkClient {
    codec: Arc<Codec>,
    connection: u32,
    request: Vec<u8>,
}

impl WorkClient {
    fn settle(&self, reply: Reply, sink: &mut Sink<'_, ()>) {
        let name = match reply {
            Reply::Discarded => {
                return match sink.settle_oldest() {
                    Some(request) => sink.complete(request),
                    None => sink.fault(Fault::Unsolicited, || "a reply, and nothing is in flight".into()),
                };
            }
            Reply::Malformed => {
                let what = || "a reply of another length or status than a reply has".into();
                return sink.break_off(Fault::Malformed, what);
            }
            Reply::Done(name) | Reply::Corrupt(name) => name,
        };
        let Name { connection, id, index } = name;
        if connection != self.connection {
            let what = || format!("the reply to request {index} of connection {connection}");
            return sink.fault(Fault::Misdirected, what);
        }
        let Some(request) = sink.settle(id) else { return };
        match reply {
            Reply::Done(_) if request.index == index => sink.complete(request),
            _ => sink.reject(Fault::Corrupt, || format!("the reply to request {}", request.index)),
        }
    }
}

impl Client for WorkClient {
    type Operation = Job;
    type Counters = ();

    fn encode(&mut self, ticket: &Ticket, job: &Job) -> &[u8] {
        let name = Name { connection: self.connection, id: ticket.id, index: ticket.index };
        self.request.clear();
        self.codec.put_request(&mut self.request, *job, name);
        &self.request
    }

    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, ()>) -> usize {
        let mut used = 0;
        while let Some((reply, length)) = self.codec.take_reply(&bytes[used..]) {
            used += length;
            self.settle(reply, sink);
            if sink.is_broken() {
                break;
            }
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::tests::answer;
    use super::super::mix::{WorkKind, WorkTime};
    use super::*;
    use crate::drive::connection::{ClientConnection, Context, Life, Next, Terms, TimeLimit};
    use crate::drive::table::RequestTable;
    use crate::record::Record;

    const BYTES: usize = 40;
    const TERMS: Terms = Terms { life: Life::Kept, limit: TimeLimit::Request, timeout_ns: 1000 };

    /// Connections with so many requests in flight each, and their record.
    struct Case {
        connections: Vec<ClientConnection<WorkClient>>,
        record: Record<()>,
    }

    impl Case {
        fn new(in_flight: &[usize], request_bytes: usize, kind: WorkKind) -> Case {
            let mix = Mix { kind, work: WorkTime { min_us: 0, max_us: 0 }, slow: None };
            let codec = Arc::new(Codec::new(request_bytes, kind == WorkKind::Discard));
            let work = Work { codec, mix, seed: 1 };
            let connection = |(number, &most)| {
                let number = number as u32;
                ClientConnection::new(work.client(number), RequestTable::new(most, 32, 0), number)
            };
            let connections = in_flight.iter().enumerate().map(connection).collect();
            let mut case = Case { connections, record: Record::new(work.operations(), false) };
            for at in 0..in_flight.len() {
                case.on(at, 0, |connection, cx| {
                    connection.open(0, 0, cx);
                    connection.established(cx);
                });
            }
            case
        }

        fn on<T>(
            &mut self,
            at: usize,
            now_ns: u64,
            event: impl FnOnce(&mut ClientConnection<WorkClient>, &mut Context<'_, ()>) -> T,
        ) -> T {
            let mut cx = Context { now_ns, terms: &TERMS, record: &mut self.record };
            event(&mut self.connections[at], &mut cx)
        }

        fn request(&mut self, at: usize, class: Class, start_ns: u64) -> Vec<u8> {
            let kind = if self.connections.len() == 3 { WorkKind::Discard } else { WorkKind::Inline };
            let job = Job { class, kind, work_us: 0 };
            self.on(at, start_ns, |connection, cx| connection.issue(&job, start_ns, cx).to_vec())
        }

        fn receive(&mut self, at: usize, bytes: &[u8], now_ns: u64) -> (usize, Next) {
            self.on(at, now_ns, |connection, cx| connection.received(bytes, 0, false, cx))
        }

        fn faults(&self) -> String {
            self.record.faults.in_words()
        }

        fn has_room(&self, at: usize) -> bool {
            self.connections[at].has_room(&TERMS)
        }
    }

    #[test]
    fn replies_in_any_order_belong_to_their_class_and_start() {
        let mut case = Case::new(&[2, 2], BYTES, WorkKind::Inline);
        let slow = case.request(0, Class::Slow, 100);
        let quick = case.request(0, Class::Quick, 200);
        let other = case.request(1, Class::Quick, 300);
        assert!(!case.has_room(0) && case.has_room(1));
        for (at, request, now_ns) in [(0, quick, 1200), (1, other, 1300), (0, slow, 9100)] {
            assert_eq!(case.receive(at, &answer(&request), now_ns), (BYTES - 4, Next::Room));
        }
        let [quick, slow] = [0, 1].map(|class| &case.record.latencies[class]);
        assert_eq!((quick.count(), quick.max_ns, slow.count(), slow.max_ns), (2, 1000, 1, 9000));
        assert_eq!((case.record.reordered, case.record.in_flight(), case.record.started), (1, 0, 3));
        let shares = [0, 1].map(|at| case.connections[at].share());
        assert_eq!(shares.map(|share| (share.answered, share.sum_ns)), [(2, 10_000), (1, 1000)]);
        assert!(case.record.is_clean());
    }

    #[test]
    fn a_reply_counts_once() {
        let mut case = Case::new(&[4], BYTES, WorkKind::Inline);
        let reply = answer(&case.request(0, Class::Quick, 0));
        case.receive(0, &[reply.clone(), reply].concat(), 10);
        assert_eq!((case.faults().as_str(), case.record.answered), ("1 duplicate", 1));
    }

    #[test]
    fn a_reply_on_another_connection_is_none() {
        let mut case = Case::new(&[1, 1], BYTES, WorkKind::Inline);
        let (first, _) = (case.request(0, Class::Quick, 0), case.request(1, Class::Quick, 0));
        assert_eq!(case.receive(1, &answer(&first), 10).1, Next::Wait);
        assert_eq!((case.faults().as_str(), case.record.in_flight()), ("1 misdirected", 2));
    }

    #[test]
    fn a_reply_that_is_late_or_never_comes_is_lost() {
        let mut case = Case::new(&[2], BYTES, WorkKind::Inline);
        let old = case.request(0, Class::Quick, 100);
        let young = case.request(0, Class::Quick, 900);
        assert_eq!(case.on(0, 1500, |connection, cx| connection.expire(cx)), Next::Lost);
        assert_eq!(case.on(0, 1500, |connection, cx| connection.expire(cx)), Next::Wait);
        assert_eq!(case.faults(), "1 lost");
        assert_eq!(case.receive(0, &answer(&old), 1600).1, Next::Wait);
        assert_eq!(case.receive(0, &answer(&young), 1600).1, Next::Room);
        assert_eq!(case.faults(), "1 lost, 1 late");
    }

    #[test]
    fn another_requests_number_or_other_bytes_are_corrupt() {
        for at in [23, BYTES - 1] {
            let mut case = Case::new(&[2], BYTES, WorkKind::Inline);
            // A reply is four bytes shorter than its request: its payload begins four bytes earlier.
            let mut reply = answer(&case.request(0, Class::Quick, 0));
            reply[at - 4] ^= 1;
            assert_eq!(case.receive(0, &reply, 10).1, Next::Room);
            assert_eq!((case.faults().as_str(), case.record.answered), ("1 corrupt", 0), "byte {at}");
        }
    }

    #[test]
    fn what_was_never_sent_is_unknown() {
        let mut case = Case::new(&[1], BYTES, WorkKind::Inline);
        let mut reply = answer(&case.request(0, Class::Quick, 0));
        reply[15] ^= 0x40;
        assert_eq!(case.receive(0, &reply, 10).1, Next::Wait);
        assert_eq!(case.faults(), "1 unknown");
    }

    #[test]
    fn a_malformed_reply_ends_its_connection() {
        let mut case = Case::new(&[2, 1], BYTES, WorkKind::Inline);
        case.request(0, Class::Quick, 0);
        case.request(0, Class::Quick, 0);
        assert_eq!(case.receive(0, &[0, 0, 0, 9, 1, 2, 3], 10), (7, Next::Close));
        assert_eq!(case.faults(), "2 closed, 1 malformed");
        assert!(!case.has_room(0) && case.has_room(1) && !case.record.failures.is_empty());
        assert_eq!(case.record.check(0, 0, 1), Ok(()));
    }

    #[test]
    fn discarded_requests_are_settled_in_turn_and_surplus_replies_seen() {
        let mut case = Case::new(&[3, 1, 1], 5000, WorkKind::Discard);
        let requests = [0, 10].map(|start_ns| case.request(0, Class::Quick, start_ns));
        let reply = answer(&requests[0]);
        case.receive(0, &[reply.clone(), reply.clone(), reply].concat(), 30);
        let quick = &case.record.latencies[0];
        assert_eq!((quick.count(), quick.min_ns, quick.max_ns), (2, 20, 30));
        assert_eq!(case.faults(), "1 unsolicited");
    }

    #[test]
    fn half_a_reply_waits_for_the_rest() {
        let mut case = Case::new(&[1], BYTES, WorkKind::Inline);
        let reply = answer(&case.request(0, Class::Quick, 0));
        assert_eq!(case.receive(0, &reply[..20], 5), (0, Next::Wait));
        assert_eq!(case.receive(0, &reply, 10), (reply.len(), Next::Room));
    }
}
