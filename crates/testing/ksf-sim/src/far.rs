//! The other end of an exchange: a backend that answers a request that was passed to it, or refuses, resets, ends, or
//! breaks off in the middle of its answer.

use ksf::outgoing::{ExchangeRequest, Failure, Upstream};
use ksf::pool::Chunk;

use crate::script::SimRequest;
use ksf_test::Random;

/// What comes of one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Answers,
    Refuses,
    /// Fails with so many bytes of the answer given.
    BreaksOff {
        at: usize,
        ends: bool,
    },
}

/// A backend in an exchange.
#[derive(Debug)]
pub(crate) struct Far {
    fate: Fate,
    connected: bool,
    passed: Vec<u8>,
    given: usize,
    /// It was told to take no more, and takes again in a later turn.
    full: bool,
}

/// What a backend does in a turn.
pub(crate) enum Step {
    Nothing,
    Tells(Upstream),
    /// It takes no more bytes, or does again.
    Full(bool),
}

impl Far {
    fn new(random: &mut Random) -> Self {
        let fate = match random.within(0..=3) {
            0 => Fate::Refuses,
            1 => Fate::BreaksOff { at: random.length(60), ends: random.one_in(2) },
            _ => Fate::Answers,
        };
        Self { fate, connected: false, passed: Vec::new(), given: 0, full: false }
    }

    /// Carries out what a connection asked of its shard.
    pub(crate) fn carry_out(far: &mut Option<Self>, order: ExchangeRequest, random: &mut Random) -> Result<(), String> {
        match (order, far) {
            (ExchangeRequest::Dial { .. }, far) => *far = Some(Self::new(random)),
            (ExchangeRequest::Pass(bytes), Some(far)) => far.passed.extend_from_slice(&bytes),
            (ExchangeRequest::HangUp(_), far @ Some(_)) => *far = None,
            (order, None) => return Err(format!("{order:?} without an exchange")),
            (order, _) => return Err(format!("an unknown order: {order:?}")),
        }
        Ok(())
    }

    /// One thing that happens; the last if it is a failure.
    pub(crate) fn step(&mut self, random: &mut Random) -> Step {
        if random.one_in(2) {
            return Step::Nothing;
        }
        if self.full || random.one_in(8) {
            self.full = !self.full;
            return Step::Full(self.full);
        }
        if !self.connected {
            if self.fate == Fate::Refuses {
                return Step::Tells(Upstream::Failed(Failure::Refused));
            }
            self.connected = true;
            return Step::Tells(Upstream::Connected { reused: random.one_in(2) });
        }
        // What was passed on is one request, as it was sent.
        let Some(request) = SimRequest::from_text(&self.passed) else { return Step::Nothing };
        let answer = request.reply(0);
        let left = match self.fate {
            Fate::BreaksOff { at, .. } => at.min(answer.len()) - self.given,
            _ => answer.len() - self.given,
        };
        if left > 0 {
            let piece = &answer[self.given..][..random.within(1..=left)];
            self.given += piece.len();
            return Step::Tells(Upstream::Received(Chunk::from_vec(piece.to_vec())));
        }
        match self.fate {
            Fate::BreaksOff { ends: false, .. } => Step::Tells(Upstream::Failed(Failure::Reset)),
            Fate::BreaksOff { ends: true, .. } => Step::Tells(Upstream::Ended),
            _ => Step::Nothing,
        }
    }

    /// True when its connection may not be told of anything more.
    pub(crate) fn is_over(step: &Step) -> bool {
        matches!(step, Step::Tells(Upstream::Failed(_)))
    }
}
