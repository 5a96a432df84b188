//! One connection: what each event means for its request, for the books, and for what is to be done next.
//!
//! No socket and no clock here: the driver brings events and times, and does what [`Next`] says.
//!
//! ```text
//!              open            established        wrote all      first byte        answer whole
//!   Closed ----------> Connecting -----> Sending ----> Waiting ---------> Receiving -----+-> Idle --ask--> Sending
//!                                                                                        +-> Ending --> Closed
//! ```

use rustix::io::Errno;

use super::answer::{Expected, Reader};
use super::book::Book;
use super::failure::{End, Failure};

/// Who closes a connection that has had its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum CloseBy {
    /// The server: the last request says `Connection: close`, and its end of the stream is awaited
    Server,
    /// This program, as soon as the last answer is whole: its ports stay in TIME_WAIT
    Client,
    /// This program, by a reset (SO_LINGER of 0): nothing stays in TIME_WAIT
    Reset,
}

impl CloseBy {
    /// The name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            CloseBy::Server => "server",
            CloseBy::Client => "client",
            CloseBy::Reset => "reset",
        }
    }
}

/// What holds for all connections.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    /// 0: no limit.
    pub(crate) requests_per_connection: u64,
    pub(crate) close: CloseBy,
    pub(crate) connect_timeout_ns: u64,
    /// For an answer, and for the close that was asked for.
    pub(crate) timeout_ns: u64,
    pub(crate) expected: Expected,
}

/// What the driver is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Wait for events.
    Wait,
    /// The connection can take another request.
    Idle,
    /// Close the socket.
    Close,
    /// Close the socket by a reset.
    Reset,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    #[default]
    Closed,
    Connecting,
    Sending,
    Waiting,
    Receiving,
    /// Between two requests.
    Idle,
    /// The server is to close.
    Ending,
}

/// One connection, or the place for one.
#[derive(Debug, Default)]
pub(crate) struct Conn {
    phase: Phase,
    reader: Reader,
    /// Requests of this connection so far.
    asked: u64,
    /// When the request was to start.
    start_ns: u64,
    /// When the phase is over at the latest.
    deadline_ns: u64,
}

impl Conn {
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether a request is under way.
    pub(crate) fn is_asking(&self) -> bool {
        matches!(self.phase, Phase::Connecting | Phase::Sending | Phase::Waiting | Phase::Receiving)
    }

    /// Whether the request under way is to ask the server to close.
    pub(crate) fn asks_to_close(&self, terms: &Terms) -> bool {
        terms.close == CloseBy::Server && self.is_last(terms)
    }

    /// A connection is opened for a request that was to start at `start_ns`.
    pub(crate) fn open(&mut self, start_ns: u64, now_ns: u64, terms: &Terms, book: &mut Book) {
        debug_assert_eq!(self.phase, Phase::Closed);
        book.attempted += 1;
        self.asked = 0;
        self.begin(start_ns, book);
        self.phase = Phase::Connecting;
        self.deadline_ns = now_ns.saturating_add(terms.connect_timeout_ns);
    }

    /// The connection stands since `now_ns`.
    pub(crate) fn established(&mut self, now_ns: u64, terms: &Terms, book: &mut Book) {
        debug_assert_eq!(self.phase, Phase::Connecting);
        book.connected(now_ns.saturating_sub(self.start_ns), now_ns);
        self.phase = Phase::Sending;
        self.deadline_ns = now_ns.saturating_add(terms.timeout_ns);
    }

    /// An idle connection is given a request.
    pub(crate) fn ask(&mut self, start_ns: u64, now_ns: u64, terms: &Terms, book: &mut Book) {
        debug_assert_eq!(self.phase, Phase::Idle);
        self.begin(start_ns, book);
        self.phase = Phase::Sending;
        self.deadline_ns = now_ns.saturating_add(terms.timeout_ns);
    }

    /// The request is sent as a whole.
    pub(crate) fn sent(&mut self) {
        if self.phase == Phase::Sending {
            self.phase = Phase::Waiting;
        }
    }

    /// Bytes have come; `ended` if the stream has ended behind them.
    pub(crate) fn received(&mut self, bytes: &[u8], ended: bool, now_ns: u64, terms: &Terms, book: &mut Book) -> Next {
        book.received_bytes += bytes.len() as u64;
        let next = match self.phase {
            Phase::Sending | Phase::Waiting | Phase::Receiving => self.read(bytes, ended, now_ns, terms, book),
            Phase::Idle | Phase::Ending => self.surplus(now_ns, book),
            Phase::Connecting | Phase::Closed => Next::Wait,
        };
        match (next, ended) {
            (Next::Wait | Next::Idle, true) => self.ended(now_ns, terms, book),
            (next, _) => next,
        }
    }

    /// The stream has ended.
    pub(crate) fn ended(&mut self, now_ns: u64, terms: &Terms, book: &mut Book) -> Next {
        match self.phase {
            Phase::Sending | Phase::Waiting | Phase::Receiving => {
                if self.reader.end() {
                    return self.whole(now_ns, true, true, terms, book);
                }
                let (failure, what) = match (self.phase == Phase::Receiving, self.is_reused()) {
                    (true, _) => (Failure::ClosedEarly, "closed in the middle of the answer"),
                    (false, true) => (Failure::Stale, "closed where there had been answers before"),
                    (false, false) => (Failure::ClosedUnanswered, "closed before the answer"),
                };
                self.fail(failure, now_ns, book, || what.to_owned())
            }
            Phase::Idle | Phase::Ending => self.close(End::Server, book),
            Phase::Connecting => self.error(Errno::CONNRESET, now_ns, book),
            Phase::Closed => Next::Close,
        }
    }

    /// A call failed.
    pub(crate) fn error(&mut self, errno: Errno, now_ns: u64, book: &mut Book) -> Next {
        let reset = matches!(errno, Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN);
        let failure = match self.phase {
            Phase::Closed => return Next::Close,
            Phase::Idle | Phase::Ending => return self.close(End::Server, book),
            Phase::Connecting => Failure::of_connecting(errno),
            Phase::Sending | Phase::Waiting if reset && self.is_reused() => Failure::Stale,
            Phase::Sending if reset => Failure::SendReset,
            Phase::Waiting | Phase::Receiving if reset => Failure::ReceiveReset,
            _ if errno == Errno::TIMEDOUT => Failure::ResponseTimeout,
            _ => Failure::Other,
        };
        self.fail(failure, now_ns, book, || std::io::Error::from(errno).to_string())
    }

    /// Looks whether the time of the phase is over.
    pub(crate) fn expire(&mut self, now_ns: u64, book: &mut Book) -> Next {
        if now_ns < self.deadline_ns {
            return Next::Wait;
        }
        match self.phase {
            Phase::Closed | Phase::Idle => Next::Wait,
            Phase::Connecting => {
                self.fail(Failure::ConnectTimeout, now_ns, book, || "no connection within the time limit".into())
            }
            Phase::Sending | Phase::Waiting | Phase::Receiving => {
                let phase = self.phase;
                self.fail(Failure::ResponseTimeout, now_ns, book, || {
                    format!("the answer was not whole within the time limit ({})", phase.in_words())
                })
            }
            Phase::Ending => {
                book.close_timeouts += 1;
                self.close(End::Client, book)
            }
        }
    }

    /// The end of the run: whatever is under way is given up.
    pub(crate) fn give_up(&mut self, terms: &Terms, book: &mut Book) -> Next {
        book.unanswered += u64::from(self.is_asking());
        match self.phase {
            Phase::Closed => Next::Close,
            Phase::Connecting => {
                book.not_established += 1;
                self.phase = Phase::Closed;
                Next::Close
            }
            _ => self.close_ourselves(terms, book),
        }
    }

    fn begin(&mut self, start_ns: u64, book: &mut Book) {
        book.started += 1;
        self.asked += 1;
        self.start_ns = start_ns;
        self.reader.start();
    }

    fn is_last(&self, terms: &Terms) -> bool {
        terms.requests_per_connection != 0 && self.asked >= terms.requests_per_connection
    }

    fn is_reused(&self) -> bool {
        self.asked > 1
    }

    fn read(&mut self, bytes: &[u8], ended: bool, now_ns: u64, terms: &Terms, book: &mut Book) -> Next {
        let was_sent = self.phase != Phase::Sending;
        if self.phase != Phase::Receiving && !bytes.is_empty() {
            book.begin_answer(now_ns.saturating_sub(self.start_ns), now_ns);
            self.phase = Phase::Receiving;
        }
        let used = match self.reader.read(bytes, &terms.expected) {
            Ok(used) => used,
            Err(reason) => return self.fail(Failure::BadResponse, now_ns, book, || reason.to_owned()),
        };
        if !self.reader.is_done() {
            return Next::Wait;
        }
        let next = self.whole(now_ns, ended, was_sent, terms, book);
        match (used < bytes.len(), next) {
            (true, Next::Wait | Next::Idle) => self.surplus(now_ns, book),
            (true, next) => {
                note_surplus(now_ns, book);
                next
            }
            (false, next) => next,
        }
    }

    /// The answer is whole: judges it, and chooses how the connection goes on.
    fn whole(&mut self, now_ns: u64, ended: bool, was_sent: bool, terms: &Terms, book: &mut Book) -> Next {
        let status = self.reader.status();
        book.status(status);
        if terms.expected.tally.is_some() {
            book.tally(self.reader.tally());
        }
        book.body_bytes += self.reader.body_bytes();
        if !terms.expected.is_right_status(status) {
            book.fail(Failure::UnexpectedStatus, now_ns, || format!("status {status}"));
        } else if !self.reader.is_right_body(&terms.expected) {
            let bytes = self.reader.body_bytes();
            book.fail(Failure::WrongBody, now_ns, || format!("a body of {bytes} bytes is not the expected one"));
        } else {
            book.answer(now_ns.saturating_sub(self.start_ns), now_ns);
        }
        self.phase = Phase::Idle;
        if ended {
            return self.close(End::Server, book);
        }
        // A connection that was answered before its request was sent has half a request in it: nothing can follow.
        match (was_sent, terms.close) {
            (true, _) if self.reader.keeps() && !self.is_last(terms) => Next::Idle,
            (true, CloseBy::Server) => {
                self.phase = Phase::Ending;
                self.deadline_ns = now_ns.saturating_add(terms.timeout_ns);
                Next::Wait
            }
            _ => self.close_ourselves(terms, book),
        }
    }

    /// Bytes that nobody asked for: whose answer they are cannot be told, so the connection is of no more use.
    fn surplus(&mut self, now_ns: u64, book: &mut Book) -> Next {
        note_surplus(now_ns, book);
        self.close(End::Client, book)
    }

    /// The request has failed, and its connection with it.
    fn fail(&mut self, failure: Failure, now_ns: u64, book: &mut Book, describe: impl FnOnce() -> String) -> Next {
        book.fail(failure, now_ns, describe);
        match self.phase {
            Phase::Connecting => {
                book.not_established += 1;
                self.phase = Phase::Closed;
                Next::Close
            }
            _ => self.close(End::Failed, book),
        }
    }

    fn close_ourselves(&mut self, terms: &Terms, book: &mut Book) -> Next {
        match terms.close {
            CloseBy::Reset => {
                self.close(End::Reset, book);
                Next::Reset
            }
            CloseBy::Server | CloseBy::Client => self.close(End::Client, book),
        }
    }

    fn close(&mut self, end: End, book: &mut Book) -> Next {
        book.ends.add(end, 1);
        self.phase = Phase::Closed;
        Next::Close
    }
}

fn note_surplus(now_ns: u64, book: &mut Book) {
    book.surplus += 1;
    book.note(now_ns, "surplus: bytes came that no request had asked for");
}

impl Phase {
    fn in_words(self) -> &'static str {
        match self {
            Phase::Sending => "the request could not be sent",
            Phase::Waiting => "nothing came",
            _ => "a part came",
        }
    }
}

#[cfg(test)]
mod tests;
