//! One connection: what each event means for its requests, for the record, and for what is to be done next.
//!
//! No socket and no clock here: the loops bring events and times, and do what [`Next`] says.
//!
//! ```text
//!            open              established            last reply        the server closed
//!   Closed --------> Connecting ----------> Open <-+------------> Ending ----------> Closed
//!                                            |     |
//!                                            +-----+ issue, received
//! ```

use std::time::Duration;

use rustix::io::Errno;

use crate::drive::protocol::{Client, Operation, Ticket};
use crate::drive::table::RequestTable;
use crate::record::sink::Share;
use crate::record::{End, Fault, Moment, Record, Sink};

/// Who closes a connection that has had its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloseBy {
    /// The server: the last request says `Connection: close`, and its end of the stream is awaited
    Server,
    /// This program, as soon as the last answer is whole: its ports stay in TIME_WAIT
    Client,
    /// This program, by a reset (SO_LINGER of 0): nothing stays in TIME_WAIT
    Reset,
}

/// How long a connection lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// As long as the run, which ends early where one of them does.
    Kept,
    /// For some requests, then another takes its place.
    Renewed {
        /// 0: no limit.
        requests: u64,
        close: CloseBy,
        connect_timeout_ns: u64,
    },
}

/// What a time limit holds for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimeLimit {
    /// For each request, from its start: one over it is lost, and the connection goes on.
    Request,
    /// For the next reply on a connection: when it is over, the connection is given up. So many bytes are as good as a
    /// reply.
    Reply { progress_bytes: u64 },
}

/// What holds for all connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) life: Life,
    pub(crate) limit: TimeLimit,
    /// For a reply, and for the close that was asked for.
    pub(crate) timeout_ns: u64,
}

impl Terms {
    /// How often time limits are looked at.
    pub(crate) fn tick(&self) -> Duration {
        let limit_ns = match self.life {
            Life::Kept => self.timeout_ns,
            Life::Renewed { connect_timeout_ns, .. } => self.timeout_ns.min(connect_timeout_ns),
        };
        Duration::from_nanos((limit_ns / 8).clamp(1_000_000, 100_000_000))
    }

    fn close_by(&self) -> CloseBy {
        match self.life {
            Life::Kept => CloseBy::Client,
            Life::Renewed { close, .. } => close,
        }
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.life == Life::Kept
    }
}

/// When an event happens, what holds, and where it is recorded.
pub(crate) struct Context<'a, C> {
    pub(crate) now_ns: u64,
    pub(crate) terms: &'a Terms,
    pub(crate) record: &'a mut Record<C>,
}

/// What the loop is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Wait for events.
    Wait,
    /// The connection may have room for requests.
    Room,
    /// Requests were lost; the connection goes on.
    Lost,
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
    Open,
    /// The server is to close.
    Ending,
}

/// One connection, or the place for one.
#[derive(Debug)]
pub(crate) struct ClientConnection<C> {
    client: C,
    table: RequestTable,
    share: Share,
    /// From 0, over all threads.
    number: u32,
    phase: Phase,
    /// Requests of this connection so far.
    asked: u64,
    /// A part of a request is yet to be sent.
    sending: bool,
    /// When the first request was to start.
    start_ns: u64,
    /// When the phase is over at the latest, or the next reply must have come.
    deadline_ns: u64,
    /// Bytes sent and received since the deadline was set.
    progress_bytes: u64,
}

impl<C: Client> ClientConnection<C> {
    pub(crate) fn new(client: C, table: RequestTable, number: u32) -> ClientConnection<C> {
        ClientConnection {
            client,
            table,
            share: Share::default(),
            number,
            phase: Phase::Closed,
            asked: 0,
            sending: false,
            start_ns: 0,
            deadline_ns: 0,
            progress_bytes: 0,
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    pub(crate) fn share(&self) -> Share {
        self.share
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.table.in_flight()
    }

    /// Whether another request can be sent.
    #[inline]
    pub(crate) fn has_room(&self, terms: &Terms) -> bool {
        self.phase == Phase::Open && self.table.has_room() && !self.has_had_all(terms)
    }

    /// The most that the next receive may bring behind the bytes that were not used.
    #[inline]
    pub(crate) fn window(&self, held: &[u8]) -> usize {
        self.client.window(held)
    }

    /// A connection is opened for a request that was to start at `start_ns`.
    pub(crate) fn open(&mut self, route: usize, start_ns: u64, cx: &mut Context<'_, C::Counters>) {
        debug_assert_eq!(self.phase, Phase::Closed);
        cx.record.connections.attempted += 1;
        self.client.open(route);
        self.table.reset();
        self.share = Share::default();
        self.asked = 0;
        self.start_ns = start_ns;
        self.phase = Phase::Connecting;
        self.deadline_ns = match cx.terms.life {
            Life::Kept => u64::MAX,
            Life::Renewed { connect_timeout_ns, .. } => cx.now_ns.saturating_add(connect_timeout_ns),
        };
    }

    /// The connection stands since `now_ns`.
    pub(crate) fn established(&mut self, cx: &mut Context<'_, C::Counters>) {
        debug_assert_eq!(self.phase, Phase::Connecting);
        cx.record.connected(cx.now_ns.saturating_sub(self.start_ns), cx.now_ns);
        self.phase = Phase::Open;
        self.set_deadline(cx);
    }

    /// A request begins whose latency counts from `start_ns`. The caller has checked for room.
    #[inline]
    pub(crate) fn issue(
        &mut self,
        operation: &C::Operation,
        start_ns: u64,
        cx: &mut Context<'_, C::Counters>,
    ) -> &[u8] {
        if self.phase == Phase::Open && self.table.in_flight() == 0 {
            self.set_deadline(cx);
        }
        cx.record.started += 1;
        self.asked += 1;
        self.sending = true;
        let (id, index) = self.table.issue(start_ns, operation.class());
        let ticket = Ticket { id, index, is_last: self.has_had_all(cx.terms) };
        self.client.encode(&ticket, operation)
    }

    /// So many bytes of requests were sent; `all`: nothing is left unsent.
    #[inline]
    pub(crate) fn sent(&mut self, bytes: usize, all: bool, cx: &mut Context<'_, C::Counters>) {
        cx.record.sent_bytes += bytes as u64;
        self.progress_bytes += bytes as u64;
        self.sending = !all;
    }

    /// Bytes of a stream have come, or a datagram; of a stream the first `held` are those that were not used before.
    /// `ended`: the stream has ended behind them. Returns how many were used, too.
    #[inline]
    pub(crate) fn received(
        &mut self,
        bytes: &[u8],
        held: usize,
        ended: bool,
        cx: &mut Context<'_, C::Counters>,
    ) -> (usize, Next) {
        cx.record.received_bytes += (bytes.len() - held) as u64;
        self.progress_bytes += (bytes.len() - held) as u64;
        let (used, next) = match self.phase {
            Phase::Closed | Phase::Connecting => (bytes.len(), Next::Wait),
            Phase::Open | Phase::Ending => self.read(bytes, ended, cx),
        };
        match (next, ended) {
            (Next::Wait | Next::Room, true) => (used, self.ended(cx)),
            (next, _) => (used, next),
        }
    }

    /// The stream has ended.
    pub(crate) fn ended(&mut self, cx: &mut Context<'_, C::Counters>) -> Next {
        match self.phase {
            Phase::Closed => return Next::Close,
            Phase::Connecting => return self.error(Errno::CONNRESET, cx),
            Phase::Ending => return self.close(End::Server, cx),
            Phase::Open => {}
        }
        if self.in_flight() > 0 {
            let moment = self.moment(cx);
            self.client.end(&mut Sink::new(&mut self.table, &mut self.share, cx.record, moment));
        }
        if cx.terms.is_kept() {
            return self.fail(Fault::Closed, cx, |_| "the peer closed the connection".into());
        }
        if self.in_flight() == 0 {
            return self.close(End::Server, cx);
        }
        let (fault, what) = match (self.share.begun, self.is_reused()) {
            (true, _) => (Fault::ClosedEarly, "closed in the middle of the response"),
            (false, true) => (Fault::Stale, "closed where there had been responses before"),
            (false, false) => (Fault::ClosedUnanswered, "closed before the response"),
        };
        self.fail(fault, cx, |_| what.into())
    }

    /// A call failed.
    pub(crate) fn error(&mut self, errno: Errno, cx: &mut Context<'_, C::Counters>) -> Next {
        let reset = matches!(errno, Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN);
        let begun = self.share.begun;
        let fault = match self.phase {
            Phase::Closed => return Next::Close,
            Phase::Ending => return self.close(End::Server, cx),
            Phase::Connecting => Fault::of_connecting(errno),
            Phase::Open if cx.terms.is_kept() => Fault::Closed,
            Phase::Open if self.in_flight() == 0 => return self.close(End::Server, cx),
            Phase::Open if reset && !begun && self.is_reused() => Fault::Stale,
            Phase::Open if reset && !begun && self.sending => Fault::SendReset,
            Phase::Open if reset => Fault::ReceiveReset,
            Phase::Open if errno == Errno::TIMEDOUT => Fault::ResponseTimeout,
            Phase::Open => Fault::Other,
        };
        self.fail(fault, cx, |_| std::io::Error::from(errno).to_string())
    }

    /// Looks whether a time limit is over.
    pub(crate) fn expire(&mut self, cx: &mut Context<'_, C::Counters>) -> Next {
        let seconds = cx.terms.timeout_ns as f64 / 1e9;
        match (self.phase, cx.terms.limit) {
            (Phase::Open, TimeLimit::Request) => {
                let lost = self.table.expire(cx.now_ns.saturating_sub(cx.terms.timeout_ns));
                cx.record.fail(Fault::Lost, lost, self.moment(cx), || format!("{lost} unanswered for {seconds} s"));
                return if lost > 0 { Next::Lost } else { Next::Wait };
            }
            (Phase::Open, TimeLimit::Reply { progress_bytes }) if self.progress_bytes >= progress_bytes => {
                self.set_deadline(cx);
            }
            _ => {}
        }
        if cx.now_ns < self.deadline_ns {
            return Next::Wait;
        }
        match self.phase {
            Phase::Open if self.in_flight() > 0 => {}
            Phase::Closed | Phase::Open => return Next::Wait,
            Phase::Connecting => {
                let what = |_: &Self| "no connection within the time limit".to_owned();
                return self.fail(Fault::ConnectTimeout, cx, what);
            }
            Phase::Ending => {
                cx.record.connections.close_timeouts += 1;
                return self.close(End::Client, cx);
            }
        }
        if cx.terms.is_kept() {
            return self.fail(Fault::Lost, cx, |_| format!("no reply for {seconds} s"));
        }
        self.fail(Fault::ResponseTimeout, cx, |connection| {
            let what = match (connection.sending, connection.share.begun) {
                (_, true) => "a part came",
                (true, false) => "the request could not be sent",
                (false, false) => "nothing came",
            };
            format!("the response was not whole within the time limit ({what})")
        })
    }

    /// The end of the run on a connection that was to last: no more requests, what is still sent is surplus. Returns
    /// whether it stands.
    pub(crate) fn begin_end(&mut self) -> bool {
        let stands = self.phase == Phase::Open && self.in_flight() == 0;
        if stands {
            (self.phase, self.deadline_ns) = (Phase::Ending, u64::MAX);
        }
        stands
    }

    /// The end of the run: what is in flight is given up.
    pub(crate) fn give_up(&mut self, cx: &mut Context<'_, C::Counters>) -> Next {
        cx.record.unanswered += self.table.expire(u64::MAX);
        match self.phase {
            Phase::Closed => Next::Close,
            Phase::Connecting => {
                cx.record.connections.not_established += 1;
                self.phase = Phase::Closed;
                Next::Close
            }
            Phase::Open | Phase::Ending => self.close_ourselves(cx),
        }
    }

    fn read(&mut self, bytes: &[u8], ended: bool, cx: &mut Context<'_, C::Counters>) -> (usize, Next) {
        if !cx.terms.is_kept() && self.in_flight() == 0 && !bytes.is_empty() {
            return (bytes.len(), self.surplus(cx));
        }
        let before = cx.record.settled();
        let moment = self.moment(cx);
        let mut sink = Sink::new(&mut self.table, &mut self.share, cx.record, moment);
        let used = self.client.read(bytes, &mut sink);
        if sink.is_broken() {
            return (bytes.len(), self.unreadable(cx));
        }
        let replies = cx.record.settled() - before;
        let next = match replies {
            0 => Next::Wait,
            _ => {
                cx.record.calls.replies_per_receive_max = cx.record.calls.replies_per_receive_max.max(replies);
                self.set_deadline(cx);
                self.settled(ended, cx)
            }
        };
        if cx.terms.is_kept() || used == bytes.len() || self.in_flight() > 0 {
            return (used, next);
        }
        match next {
            Next::Wait | Next::Room => (bytes.len(), self.surplus(cx)),
            next => {
                self.note_surplus(cx);
                (bytes.len(), next)
            }
        }
    }

    /// Replies are whole: chooses how the connection goes on.
    fn settled(&mut self, ended: bool, cx: &mut Context<'_, C::Counters>) -> Next {
        if cx.terms.is_kept() || self.in_flight() > 0 {
            return Next::Room;
        }
        if ended {
            return self.close(End::Server, cx);
        }
        // A connection that was answered before its request was sent has half a request in it: nothing can follow.
        match (self.sending, cx.terms.close_by()) {
            (false, _) if self.client.keeps() && !self.has_had_all(cx.terms) => Next::Room,
            (false, CloseBy::Server) => {
                self.phase = Phase::Ending;
                Next::Wait
            }
            _ => self.close_ourselves(cx),
        }
    }

    #[inline]
    fn has_had_all(&self, terms: &Terms) -> bool {
        matches!(terms.life, Life::Renewed { requests, .. } if requests != 0 && self.asked >= requests)
    }

    /// Whether an earlier request of this connection was answered.
    fn is_reused(&self) -> bool {
        self.asked > self.in_flight() as u64
    }

    /// The next reply has the whole time limit.
    #[inline]
    pub(crate) fn set_deadline(&mut self, cx: &Context<'_, C::Counters>) {
        self.deadline_ns = cx.now_ns.saturating_add(cx.terms.timeout_ns);
        self.progress_bytes = 0;
    }

    fn moment(&self, cx: &Context<'_, C::Counters>) -> Moment {
        Moment { now_ns: cx.now_ns, connection: self.number }
    }

    /// Bytes for which nothing was outstanding: whose reply they are cannot be told, so the connection is of no more
    /// use.
    fn surplus(&mut self, cx: &mut Context<'_, C::Counters>) -> Next {
        self.note_surplus(cx);
        self.close(End::Client, cx)
    }

    fn note_surplus(&self, cx: &mut Context<'_, C::Counters>) {
        cx.record.connections.surplus += 1;
        cx.record.note(self.moment(cx), || "surplus: bytes came that no request had asked for".into());
    }

    /// The stream cannot be read any further, which has been counted as a fault.
    fn unreadable(&mut self, cx: &mut Context<'_, C::Counters>) -> Next {
        if cx.terms.is_kept() {
            let what = |_: &Self| "the replies cannot be read any further".to_owned();
            return self.fail(Fault::Closed, cx, what);
        }
        // The fault was that of the oldest request.
        let outstanding = self.table.expire(u64::MAX);
        cx.record.failed += outstanding;
        cx.record.last_ns = cx.now_ns;
        cx.record.faults.add(Fault::ClosedUnanswered, outstanding.saturating_sub(1));
        self.close(End::Failed, cx)
    }

    /// The connection has failed, and all its requests with it.
    #[cold]
    fn fail(
        &mut self,
        fault: Fault,
        cx: &mut Context<'_, C::Counters>,
        describe: impl FnOnce(&Self) -> String,
    ) -> Next {
        let mut what = describe(self);
        let outstanding = self.table.expire(u64::MAX);
        if cx.terms.is_kept() {
            what += &format!(", {outstanding} replies outstanding");
            cx.record.failures.push(what.clone());
        }
        cx.record.fail(fault, outstanding, self.moment(cx), || what);
        if self.phase == Phase::Connecting {
            cx.record.connections.not_established += 1;
            self.phase = Phase::Closed;
            return Next::Close;
        }
        self.close(End::Failed, cx)
    }

    fn close_ourselves(&mut self, cx: &mut Context<'_, C::Counters>) -> Next {
        match cx.terms.close_by() {
            CloseBy::Reset => {
                self.close(End::Reset, cx);
                Next::Reset
            }
            CloseBy::Server | CloseBy::Client => self.close(End::Client, cx),
        }
    }

    fn close(&mut self, end: End, cx: &mut Context<'_, C::Counters>) -> Next {
        cx.record.connections.ends.add(end, 1);
        self.phase = Phase::Closed;
        Next::Close
    }
}

#[cfg(test)]
mod tests;
