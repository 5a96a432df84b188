//! GET requests as a [`Client`]: one after the other on a connection, each response checked.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::drive::connection::CloseBy;
use crate::drive::protocol::{Client, Protocol, Ticket};
use crate::record::{Counters, Fault, Sink};

use super::response::{Expected, Reader};

/// How many values of a field are counted apart; the others are counted as one.
const TALLIED_MAX: usize = 1024;

/// The name of the others.
const OTHERS: &str = "(others)";

/// What is asked for, and what a response must be.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// By route: the request that keeps the connection, and the one that asks the server to close it.
    pub(crate) requests: Vec<[Box<[u8]>; 2]>,
    pub(crate) close: CloseBy,
    pub(crate) expected: Expected,
}

/// What is counted beside requests.
#[derive(Debug, Clone, Default)]
pub(crate) struct HttpCounters {
    /// Whole responses by status.
    pub(crate) statuses: BTreeMap<u16, u64>,
    /// Whole responses by the value of the field that is counted.
    pub(crate) tallied: BTreeMap<String, u64>,
    /// Bodies of whole responses.
    pub(crate) body_bytes: u64,
}

impl HttpCounters {
    fn tally(&mut self, value: &[u8]) {
        let value = String::from_utf8_lossy(value);
        let value = match self.tallied.len() < TALLIED_MAX || self.tallied.contains_key(value.as_ref()) {
            true => value.as_ref(),
            false => OTHERS,
        };
        match self.tallied.get_mut(value) {
            Some(count) => *count += 1,
            None => drop(self.tallied.insert(value.to_owned(), 1)),
        }
    }
}

impl Counters for HttpCounters {
    fn merge(&mut self, other: &HttpCounters) {
        for (status, count) in &other.statuses {
            *self.statuses.entry(*status).or_default() += count;
        }
        for (value, count) in &other.tallied {
            *self.tallied.entry(value.clone()).or_default() += count;
        }
        self.body_bytes += other.body_bytes;
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct HttpClient {
    exchange: Arc<Exchange>,
    route: usize,
    reader: Reader,
    /// The server keeps the connection after the last response.
    keeps: bool,
}

impl HttpClient {
    /// A response is whole.
    fn judge(&mut self, sink: &mut Sink<'_, HttpCounters>) {
        let (reader, expected) = (&mut self.reader, &self.exchange.expected);
        let (status, body_bytes) = (reader.status(), reader.body_bytes());
        let counters = sink.counters();
        *counters.statuses.entry(status).or_default() += 1;
        if expected.tally.is_some() {
            counters.tally(reader.tally());
        }
        counters.body_bytes += body_bytes;
        let Some(request) = sink.settle_oldest() else { return };
        if !expected.is_right_status(status) {
            sink.reject(Fault::UnexpectedStatus, || format!("status {status}"));
        } else if !reader.is_right_body(expected) {
            sink.reject(Fault::WrongBody, || format!("a body of {body_bytes} bytes is not the expected one"));
        } else {
            sink.complete(request);
        }
        self.keeps = reader.keeps();
        reader.start();
    }
}

impl Client for HttpClient {
    type Operation = ();
    type Counters = HttpCounters;

    fn open(&mut self, route: usize) {
        self.route = route;
        self.keeps = true;
        self.reader.start();
    }

    fn encode(&mut self, ticket: &Ticket, _operation: &()) -> &[u8] {
        let asks_to_close = ticket.is_last && self.exchange.close == CloseBy::Server;
        &self.exchange.requests[self.route][usize::from(asks_to_close)]
    }

    fn read(&mut self, bytes: &[u8], sink: &mut Sink<'_, HttpCounters>) -> usize {
        let mut used = 0;
        while used < bytes.len() && sink.is_awaiting() {
            sink.begin_reply();
            match self.reader.read(&bytes[used..], &self.exchange.expected) {
                Ok(more) => used += more,
                Err(reason) => {
                    sink.break_off(Fault::BadResponse, || reason.to_owned());
                    return bytes.len();
                }
            }
            if self.reader.is_done() {
                self.judge(sink);
            }
        }
        used
    }

    fn end(&mut self, sink: &mut Sink<'_, HttpCounters>) {
        if self.reader.end() {
            self.judge(sink);
        }
    }

    fn keeps(&self) -> bool {
        self.keeps
    }
}

impl Protocol for Arc<Exchange> {
    type Client = HttpClient;
    type Mix = ();

    fn client(&self, _connection: u32) -> HttpClient {
        HttpClient { exchange: self.clone(), route: 0, reader: Reader::default(), keeps: true }
    }

    fn mix(&self, _thread: usize) {}

    fn request_bytes(&self) -> usize {
        self.requests.iter().map(|[_, last]| last.len()).max().unwrap_or(0)
    }
}
