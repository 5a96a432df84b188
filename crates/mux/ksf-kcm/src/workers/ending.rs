//! A connection that ends: what it brought is answered, what is owed is sent, then it is closed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ksf::Service;
use ksf::error::CloseReason;
use ksf::limits::Limits;
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use super::link::{Link, Reading};
use super::{Shared, lock, write};

/// Time after which bytes are given up that the kernel does not cut: they are the beginning of a message whose rest
/// does not come. Each of its pauses ends by work it has queued already, which takes far less.
const QUIET: Duration = Duration::from_secs(1);

pub(super) struct Ending<S: Service> {
    link: Arc<Link<S>>,
    stage: Stage,
    reason: CloseReason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Messages are taken until there are none. `unread`: bytes in no message, and since when their number is the same.
    Reading {
        unread: Option<(u64, Instant)>,
    },
    /// Answers are due.
    Answering,
    /// Replies are queued: so many bytes, since then.
    Sending {
        queued: usize,
        since: Instant,
    },
    /// Closed, but for the peer's time to read what was sent.
    Lingering {
        until: Instant,
    },
    Done,
}

impl<S: Service> Ending<S> {
    pub(super) fn new(link: Arc<Link<S>>) -> Self {
        let end = link.end.get().copied();
        let stage = match end.map(|end| end.reading) {
            Some(Reading::All | Reading::Cut) => Stage::Reading { unread: None },
            _ => Stage::Answering,
        };
        Self { stage, reason: end.map_or(CloseReason::Io, |end| end.reason), link }
    }

    pub(super) fn is_of(&self, number: u64) -> bool {
        self.link.number == number
    }

    /// Goes on as far as it can without waiting; true when the connection is closed.
    pub(super) fn step(&mut self, shared: &Shared<S>, limits: &Limits) -> bool {
        let now = Instant::now();
        loop {
            let next = self.next(shared, limits, now);
            if next == Stage::Done {
                shared.open.fetch_sub(1, Ordering::SeqCst);
                return true;
            }
            // Only times and numbers changed: nothing more to do now.
            let is_same = std::mem::discriminant(&next) == std::mem::discriminant(&self.stage);
            self.stage = next;
            if is_same {
                return false;
            }
        }
    }

    fn next(&mut self, shared: &Shared<S>, limits: &Limits, now: Instant) -> Stage {
        let link = &self.link;
        let reading = link.end.get().map_or(Reading::Nothing, |end| end.reading);
        if reading == Reading::Nothing || (self.is_attached() && link.is_dead()) {
            self.leave(shared, self.reason);
            return Stage::Done;
        }
        match self.stage {
            Stage::Reading { unread } => match link.unread_bytes() {
                Ok(Some(bytes)) => {
                    let since = unread.filter(|(before, _)| *before == bytes).map_or(now, |(_, since)| since);
                    if bytes == 0 || reading == Reading::Cut || now.duration_since(since) >= QUIET {
                        if self.reason == CloseReason::PeerClosed && link.ended_inside_message() {
                            self.reason = CloseReason::PeerClosedMidMessage;
                        }
                        return Stage::Answering;
                    }
                    Stage::Reading { unread: Some((bytes, since)) }
                }
                Ok(None) => Stage::Reading { unread: None },
                Err(_) => Stage::Answering,
            },
            Stage::Answering => {
                let is_idle = !link.intake.is_active() && link.pending.load(Ordering::SeqCst) == 0;
                if is_idle { Stage::Sending { queued: usize::MAX, since: now } } else { Stage::Answering }
            }
            Stage::Sending { queued, since } => {
                shared.flush(link);
                let left = lock(&link.outbox).bytes();
                let is_stuck = now.duration_since(since) >= Duration::from_millis(limits.send_timeout_ms);
                if left > 0 && (left < queued || !is_stuck) {
                    let since = if left < queued { now } else { since };
                    return Stage::Sending { queued: left, since };
                }
                self.leave(shared, self.reason);
                if left > 0 || shutdown(link.tcp(), Shutdown::Write).is_err() {
                    return Stage::Done;
                }
                Stage::Lingering { until: now + Duration::from_millis(limits.linger_timeout_ms) }
            }
            // Closed with bytes unread, a connection is reset, and the peer may lose what it has not read yet.
            Stage::Lingering { until } => {
                if now >= until || is_read_to_its_end(link) {
                    return Stage::Done;
                }
                Stage::Lingering { until }
            }
            Stage::Done => Stage::Done,
        }
    }

    fn is_attached(&self) -> bool {
        !matches!(self.stage, Stage::Lingering { .. } | Stage::Done)
    }

    /// Gives the connection back to TCP and forgets it.
    fn leave(&self, shared: &Shared<S>, reason: CloseReason) {
        self.link.detach();
        if write(&shared.links).remove(&self.link.number).is_some() {
            shared.count_close(reason);
        }
    }
}

fn is_read_to_its_end<S: Service>(link: &Link<S>) -> bool {
    let mut bytes = [0; 4096];
    loop {
        match recv(link.tcp(), &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return true,
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return false,
            Err(_) => return true,
        }
    }
}
