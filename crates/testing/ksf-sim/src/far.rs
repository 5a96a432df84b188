//! The backend of an exchange. It answers the request that was passed to it, or it refuses, resets, ends, or breaks off within its
//! answer.

use ksf::outgoing::{ExchangeRequest, Failure, Upstream};
use ksf::pool::Chunk;

use crate::script::SimRequest;
use ksf_test::Random;

/// Outcome of one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Answers,
    Refuses,
    /// Fails after this number of bytes of the answer.
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
    /// It has stopped reading, and continues in a later turn.
    full: bool,
}

/// Action of a backend in a turn.
pub(crate) enum Step {
    Nothing,
    Tells(Upstream),
    /// It stops reading, or continues.
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

    /// Performs the operations that a connection requested from its shard.
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

    /// Performs one action, which is the last if it is a failure.
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
        // The bytes that were passed on are one request, unchanged.
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

    /// True if the shard must report nothing more to its connection.
    pub(crate) fn is_over(step: &Step) -> bool {
        matches!(step, Step::Tells(Upstream::Failed(_)))
    }
}
