//! The books: every request and every connection is accounted for exactly once. No socket and no clock.

use std::collections::BTreeMap;

use super::failure::{End, Failure};
use crate::record::Latencies;
use crate::record::tally::{Kind, Tally};

/// How many failures of a thread are described in words.
const NOTES_MAX: usize = 5;

/// How many values of a field are counted apart; the others are counted as one.
const TALLIED_MAX: usize = 1024;

/// The name of the others.
const OTHERS: &str = "(others)";

/// What one thread did.
#[derive(Debug, Clone)]
pub(crate) struct Book {
    /// Requests that were begun: a connection was opened for them, or they were given one.
    pub(crate) started: u64,
    /// Requests with a right answer.
    pub(crate) answered: u64,
    pub(crate) failures: Tally<Failure>,
    /// Requests that were under way at the end, and given up.
    pub(crate) unanswered: u64,
    /// Right answers that came before `until_ns`.
    pub(crate) in_time: u64,
    /// Answers whose first byte came before `until_ns`.
    pub(crate) begun_in_time: u64,
    /// The end of what counts for rates.
    pub(crate) until_ns: u64,

    /// Connections that were begun.
    pub(crate) attempted: u64,
    pub(crate) established: u64,
    /// Connections that were established before `until_ns`.
    pub(crate) established_in_time: u64,
    pub(crate) not_established: u64,
    pub(crate) ends: Tally<End>,
    /// Connections that brought bytes nobody had asked for.
    pub(crate) surplus: u64,
    /// Connections that the server was asked to close and did not within the time limit.
    pub(crate) close_timeouts: u64,

    /// From the start of the request.
    pub(crate) connect: Latencies,
    pub(crate) first_byte: Latencies,
    pub(crate) response: Latencies,
    pub(crate) statuses: BTreeMap<u16, u64>,
    /// Whole answers by the value of the field that is counted.
    pub(crate) tallied: BTreeMap<String, u64>,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    pub(crate) body_bytes: u64,
    /// When the last request was settled.
    pub(crate) last_ns: u64,
    /// The first few failures in words, with their times.
    pub(crate) notes: Vec<(u64, String)>,
}

impl Book {
    pub(crate) fn new() -> Book {
        Book {
            started: 0,
            answered: 0,
            failures: Tally::default(),
            unanswered: 0,
            in_time: 0,
            begun_in_time: 0,
            until_ns: u64::MAX,
            attempted: 0,
            established: 0,
            established_in_time: 0,
            not_established: 0,
            ends: Tally::default(),
            surplus: 0,
            close_timeouts: 0,
            connect: Latencies::new(),
            first_byte: Latencies::new(),
            response: Latencies::new(),
            statuses: BTreeMap::new(),
            tallied: BTreeMap::new(),
            sent_bytes: 0,
            received_bytes: 0,
            body_bytes: 0,
            last_ns: 0,
            notes: Vec::new(),
        }
    }

    /// Adds what another thread did.
    pub(crate) fn merge(&mut self, other: &Book) {
        self.started += other.started;
        self.answered += other.answered;
        self.failures.merge(&other.failures);
        self.unanswered += other.unanswered;
        self.in_time += other.in_time;
        self.begun_in_time += other.begun_in_time;
        self.attempted += other.attempted;
        self.established += other.established;
        self.established_in_time += other.established_in_time;
        self.not_established += other.not_established;
        self.ends.merge(&other.ends);
        self.surplus += other.surplus;
        self.close_timeouts += other.close_timeouts;
        self.connect.merge(&other.connect);
        self.first_byte.merge(&other.first_byte);
        self.response.merge(&other.response);
        for (status, count) in &other.statuses {
            *self.statuses.entry(*status).or_default() += count;
        }
        for (value, count) in &other.tallied {
            *self.tallied.entry(value.clone()).or_default() += count;
        }
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        self.body_bytes += other.body_bytes;
        self.last_ns = self.last_ns.max(other.last_ns);
        self.notes.extend(other.notes.iter().cloned());
    }

    /// A connection stands, `latency_ns` after the start of its first request.
    pub(crate) fn connected(&mut self, latency_ns: u64, now_ns: u64) {
        self.established += 1;
        self.established_in_time += u64::from(now_ns <= self.until_ns);
        self.connect.record(latency_ns);
    }

    /// The first byte of an answer is here.
    pub(crate) fn begin_answer(&mut self, latency_ns: u64, now_ns: u64) {
        self.begun_in_time += u64::from(now_ns <= self.until_ns);
        self.first_byte.record(latency_ns);
    }

    /// The right answer is whole.
    pub(crate) fn answer(&mut self, latency_ns: u64, now_ns: u64) {
        self.answered += 1;
        self.in_time += u64::from(now_ns <= self.until_ns);
        self.last_ns = now_ns;
        self.response.record(latency_ns);
    }

    /// A request has failed.
    pub(crate) fn fail(&mut self, failure: Failure, now_ns: u64, describe: impl FnOnce() -> String) {
        self.failures.add(failure, 1);
        self.last_ns = now_ns;
        if self.notes.len() < NOTES_MAX {
            self.notes.push((now_ns, format!("{}: {}", failure.name(), describe())));
        }
    }

    /// Something was wrong that is no request's failure.
    pub(crate) fn note(&mut self, now_ns: u64, text: &str) {
        if self.notes.len() < NOTES_MAX {
            self.notes.push((now_ns, text.to_owned()));
        }
    }

    pub(crate) fn status(&mut self, status: u16) {
        *self.statuses.entry(status).or_default() += 1;
    }

    /// A whole answer had this value of the field that is counted.
    pub(crate) fn tally(&mut self, value: &[u8]) {
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

    /// Whether every request had its right answer and nothing else came.
    pub(crate) fn is_clean(&self) -> bool {
        self.failures.total() == 0 && self.unanswered == 0 && self.surplus == 0
    }

    /// Whether the books balance, with `asking` requests and `connecting` and `open` connections still under way.
    pub(crate) fn check(&self, asking: u64, connecting: u64, open: u64) -> Result<(), String> {
        let equal = |what: &str, have: u64, parts: u64| match have == parts {
            true => Ok(()),
            false => Err(format!("{what}: {have} are not {parts}")),
        };
        let failed = self.failures.total();
        equal(
            "started requests and those accounted for",
            self.started,
            self.answered + failed + self.unanswered + asking,
        )?;
        equal(
            "attempted connections and those accounted for",
            self.attempted,
            self.established + self.not_established + connecting,
        )?;
        equal("established connections and those that ended", self.established, self.ends.total() + open)?;
        equal("connections and their latencies", self.established, self.connect.count())?;
        equal("answers and their latencies", self.answered, self.response.count())?;
        match self.first_byte.count() >= self.answered {
            true => Ok(()),
            false => Err("more answers than first bytes".to_owned()),
        }
    }
}
