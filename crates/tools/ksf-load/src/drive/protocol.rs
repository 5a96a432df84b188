//! What the drive needs to know of a protocol. No socket and no clock in here.
//!
//! A protocol has a folder of its own: the requests and replies as bytes ([`Client`]), what requests ask for ([`Mix`]),
//! what it counts ([`Counters`](crate::record::Counters)), its options and its report. The drive knows connections,
//! how many requests are in flight on each, time limits and latencies.

use std::io::{self, Read, Write};

use crate::record::{Counters, Sink};

/// A connection to the server, on which every call blocks.
pub(crate) trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}

/// What one request asks for: which operation, with which arguments, how long a payload.
pub(crate) trait Operation: Copy {
    /// Which histogram its latency goes to, from 0.
    fn class(&self) -> u8;
}

impl Operation for () {
    fn class(&self) -> u8 {
        0
    }
}

/// Draws what the requests of a thread ask for, in the order in which they are sent.
pub(crate) trait Mix: Send {
    type Operation: Operation;

    fn draw(&mut self) -> Self::Operation;
}

/// All requests are the same.
impl Mix for () {
    type Operation = ();

    fn draw(&mut self) {}
}

/// Which request of its connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// What stands for the request on the wire, if the protocol has room for it.
    pub(crate) id: u32,
    /// From 0.
    pub(crate) index: u64,
    /// None will follow on this connection.
    pub(crate) is_last: bool,
}

/// The client side of one connection: makes requests, cuts replies out of the stream and checks them.
pub(crate) trait Client: Send {
    type Operation: Operation;
    type Counters: Counters;

    /// A connection begins, on this one of the routes.
    fn open(&mut self, _route: usize) {}

    /// Agrees with the server on what requests need, message by message, on a new connection that is to last. Nothing of it is
    /// measured.
    ///
    /// # Errors
    ///
    /// The connection is of no use, which ends the run.
    fn greet(&mut self, _stream: &mut dyn Stream) -> io::Result<()> {
        Ok(())
    }

    /// The bytes of a request. Called with `index` 0, 1, 2, ...
    fn encode(&mut self, ticket: &Ticket, operation: &Self::Operation) -> &[u8];

    /// The most that the next receive on a stream may bring behind `held`, so that it completes at most one reply. A
    /// datagram always comes alone.
    fn window(&self, _held: &[u8]) -> usize {
        usize::MAX
    }

    /// Reads replies from bytes of a stream, or one datagram, and tells the sink. Returns how many bytes were used; of
    /// a stream the others come again, with more behind them.
    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, Self::Counters>) -> usize;

    /// The stream has ended, which may complete a reply.
    fn end(&mut self, _sink: &mut Sink<'_, Self::Counters>) {}

    /// Whether the server keeps the connection after the last reply.
    fn keeps(&self) -> bool {
        true
    }
}

/// What a protocol counts.
pub(crate) type CountersOf<P> = <<P as Protocol>::Client as Client>::Counters;

/// A protocol as one run speaks it.
pub(crate) trait Protocol: Sync {
    type Client: Client;
    type Mix: Mix<Operation = <Self::Client as Client>::Operation>;

    /// The client side of one connection.
    fn client(&self, connection: u32) -> Self::Client;

    /// What the requests of a thread ask for.
    fn mix(&self, thread: usize) -> Self::Mix;

    /// How many operations have a histogram of their own.
    fn operations(&self) -> usize {
        1
    }

    /// Bits of a request's identifier on the wire.
    fn id_bits(&self) -> u32 {
        32
    }

    /// Length of the longest request in bytes as it goes to the socket.
    fn request_bytes(&self) -> usize;
}

/// A protocol whose requests are all the same: `client` makes the client side of each connection.
pub(crate) struct Uniform<F> {
    pub(crate) client: F,
    pub(crate) id_bits: u32,
    pub(crate) request_bytes: usize,
}

impl<C: Client<Operation = ()>, F: Fn() -> C + Sync> Protocol for Uniform<F> {
    type Client = C;
    type Mix = ();

    fn client(&self, _connection: u32) -> C {
        (self.client)()
    }

    fn mix(&self, _thread: usize) {}

    fn id_bits(&self) -> u32 {
        self.id_bits
    }

    fn request_bytes(&self) -> usize {
        self.request_bytes
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::drive::table::RequestTable;
    use crate::record::sink::Share;
    use crate::record::{Moment, Record};

    /// A client with all that its connection has, but for the connection.
    pub(crate) struct Bench<C: Client> {
        pub(crate) client: C,
        pub(crate) table: RequestTable,
        pub(crate) share: Share,
        pub(crate) record: Record<C::Counters>,
        /// Whether the stream cannot be read any further.
        pub(crate) broken: bool,
        held: Vec<u8>,
    }

    impl<C: Client<Operation = ()>> Bench<C> {
        pub(crate) fn new(client: C, in_flight: usize) -> Bench<C> {
            Bench::with_table(client, RequestTable::new(in_flight, 32, 77))
        }

        pub(crate) fn of<P: Protocol<Client = C>>(protocol: &P, in_flight: usize) -> Bench<C> {
            Bench::with_table(protocol.client(0), RequestTable::new(in_flight, protocol.id_bits(), 3))
        }

        /// Sends so many requests; returns their bytes.
        pub(crate) fn send(&mut self, n: usize) -> Vec<Vec<u8>> {
            let mut request = || {
                self.record.started += 1;
                let (id, index) = self.table.issue(1, 0);
                self.client.encode(&Ticket { id, index, is_last: false }, &()).to_vec()
            };
            (0..n).map(|_| request()).collect()
        }
    }

    impl<C: Client> Bench<C> {
        pub(crate) fn with_table(client: C, table: RequestTable) -> Bench<C> {
            let (share, record) = (Share::default(), Record::new(4, false));
            Bench { client, table, share, record, broken: false, held: Vec::new() }
        }

        /// Receives bytes behind those that were not used; returns how many replies they completed.
        pub(crate) fn receive(&mut self, bytes: &[u8]) -> u64 {
            let before = self.record.settled();
            self.held.extend_from_slice(bytes);
            let moment = Moment { now_ns: 10, connection: 0 };
            let mut sink = Sink::new(&mut self.table, &mut self.share, &mut self.record, moment);
            let used = self.client.read(&self.held, &mut sink);
            self.broken |= sink.is_broken();
            self.held.drain(..used);
            self.record.settled() - before
        }

        /// Receives as much as the client asks for at a time, and at most `most` bytes; returns the replies of each
        /// receive.
        pub(crate) fn feed(&mut self, mut bytes: &[u8], most: usize) -> Vec<u64> {
            let mut replies = Vec::new();
            while !bytes.is_empty() && !self.broken {
                let window = self.client.window(&self.held);
                assert!(window > 0);
                let (now, rest) = bytes.split_at(window.min(most).min(bytes.len()));
                replies.push(self.receive(now));
                bytes = rest;
            }
            replies
        }

        /// "2 corrupt".
        pub(crate) fn faults(&self) -> String {
            self.record.faults.in_words()
        }
    }
}
