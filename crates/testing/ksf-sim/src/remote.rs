//! Peers, each with its half of the network.

use ksf_test::Random;

use crate::ideal::{Ideal, decode, encode};
use crate::plan::WorldPlan;
use crate::script::SimRequest;

/// A peer, and its half of the network.
pub(crate) struct Remote {
    pub(crate) number: u32,
    /// Everything it will send; the network is how far into it each stage has come.
    pub(crate) stream: Vec<u8>,
    pub(crate) ideal: Ideal,
    pub(crate) written: usize,
    pub(crate) arrived: usize,
    pub(crate) received: usize,
    /// It ends its direction behind the stream; otherwise it stays, and is silent.
    pub(crate) half_closes: bool,
    /// It resets when this much is written.
    pub(crate) resets_at: Option<usize>,
    pub(crate) reads: Reads,
    /// Room for replies between the connection and its program.
    pub(crate) window: usize,
    pub(crate) unread: usize,
    pub(crate) taken: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    Fast,
    Slowly,
    Never,
}

impl Remote {
    pub(crate) fn random(number: u32, plan: &WorldPlan, random: &mut Random) -> Self {
        let mut stream = Vec::new();
        for at in 0..random.within(0..=plan.requests_max) {
            let request = SimRequest::random(number, at as u32, &plan.actions, plan.length_max, random);
            let cuts: Vec<_> = (0..random.within(0..=3)).map(|_| random.within(0..=20)).collect();
            stream.extend(encode(plan.framing, &request.to_text(), &cuts));
        }
        if random.one_in(plan.misfits) {
            stream.extend((0..random.length(40)).map(|_| random.bits() as u8));
        }
        if random.one_in(plan.misfits) {
            stream.truncate(stream.len() - random.length(stream.len()));
        }
        let ideal = decode(plan.framing, &plan.limits, &stream);
        let patient = plan.limits.send_timeout_ms > 1000;
        let reads = match random.within(0..=2) {
            _ if !random.one_in(plan.misfits) => Reads::Fast,
            0 if !patient => Reads::Never,
            _ => Reads::Slowly,
        };
        let leaves = plan.limits.idle_timeout_ms > 0 && plan.limits.assembly_timeout_ms < 1000;
        Self {
            number,
            ideal,
            written: 0,
            arrived: 0,
            received: 0,
            half_closes: !(leaves && random.one_in(plan.misfits)),
            resets_at: random.one_in(2 * plan.misfits).then(|| random.within(0..=stream.len())),
            reads,
            window: random.pick(&[1, 50, 1000, 100_000]),
            unread: 0,
            taken: Vec::new(),
            stream,
        }
    }

    /// The program sends and reads, and the network carries.
    pub(crate) fn proceed(&mut self, random: &mut Random) {
        let burst = if random.one_in(3) { self.stream.len() } else { random.within(0..=100) };
        self.written = (self.written + burst).min(self.stream.len());
        if let Some(at) = self.resets_at {
            self.written = self.written.min(at);
        }
        self.arrived += random.within(0..=self.written - self.arrived);
        if random.one_in(2) {
            self.arrived = self.written;
        }
        self.unread -= match self.reads {
            Reads::Fast => self.unread,
            Reads::Slowly => random.within(0..=self.unread.min(40)),
            Reads::Never => 0,
        };
    }
}
