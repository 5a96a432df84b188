//! What a world is like: all that is decided before its run begins.

use ksf::Order;
use ksf::buffers::Buffers;
use ksf::framing::{Delimiter, Endian, Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::output::FILE_RANGE_BYTES;
use ksf_test::Random;

use crate::script::ServiceAction;

/// Everything that is decided before a run begins.
#[derive(Debug)]
pub(crate) struct WorldPlan {
    pub(crate) framing: Framing,
    /// The service cuts the stream itself.
    pub(crate) custom: bool,
    pub(crate) order: Order,
    pub(crate) keeps: bool,
    pub(crate) limits: Limits,
    pub(crate) slot_bytes: u32,
    pub(crate) slots: u32,
    pub(crate) short_slots: u32,
    /// What peers ask for.
    pub(crate) actions: Vec<ServiceAction>,
    pub(crate) length_max: usize,
    pub(crate) peers: u32,
    pub(crate) places: usize,
    pub(crate) requests_max: usize,
    /// One in so many peers sends bytes that are no message, resets, reads slowly or never.
    pub(crate) misfits: usize,
    /// An answer is given once in so many turns.
    pub(crate) answer_every: usize,
    /// A connection gives way after so many messages of a turn.
    pub(crate) messages_max: u32,
    pub(crate) drain_at: Option<usize>,
    /// Some replies lie in a file.
    pub(crate) files: bool,
    /// The file may be too short.
    pub(crate) file_breaks: bool,
    /// Some replies wait for a log.
    pub(crate) logs: bool,
    /// From this turn on the log gets no further: replies wait for it until the world ends.
    pub(crate) log_stops_at: usize,
    /// The service panics at the end of this turn.
    pub(crate) log_lost_at: usize,
}

impl WorldPlan {
    pub(crate) fn random(random: &mut Random) -> Self {
        let framing = framing(random);
        let custom = matches!(framing, Framing::LengthPrefix(LengthPrefix { strip: false, .. })) && random.one_in(2);
        let narrow = matches!(framing, Framing::LengthPrefix(LengthPrefix { width: 1, .. }));
        let length_max = if narrow { 40 } else { random.pick(&[40, 300, 3000]) };
        let timeout = |random: &mut Random| if random.one_in(3) { random.within(20..=400) as u64 } else { 3_600_000 };
        let limits = Limits {
            // Who cuts the stream itself looks after the length of what is there in full.
            message_bytes_max: if custom {
                1 << 20
            } else {
                random.pick(&[length_max + 13, 2 * length_max + 64, 1 << 20])
            },
            fragments_max: random.pick(&[1, 2, 6, 4096]),
            assembly_timeout_ms: timeout(random),
            idle_timeout_ms: random.pick(&[0, 0, 100, 1000]),
            send_timeout_ms: timeout(random),
            out_queue_bytes_max: random.pick(&[0, 100, 1000, 20_000]),
            connection_bytes_max: random.pick(&[6_000, 20_000, 4 << 20]),
            shard_bytes_max: random.pick(&[10_000, 256 << 20]),
            assembly_bytes_max: random.pick(&[500, 20_000, 64 << 20]),
            pressure_timeout_ms: timeout(random),
            deferred_max: random.pick(&[1, 2, 8, 1024]),
            drain_timeout_ms: random.within(1..=300) as u64,
            ..Limits::default()
        };
        let mut actions = vec![ServiceAction::Inline, ServiceAction::Reflect, ServiceAction::Quiet];
        if !random.one_in(3) {
            actions.extend([ServiceAction::Later, ServiceAction::ReflectLater, ServiceAction::LaterQuiet]);
            if random.one_in(3) {
                actions.push(ServiceAction::Abandon);
            }
        }
        if random.one_in(3) {
            actions.push(ServiceAction::Close);
        }
        let logs = random.one_in(3);
        if logs {
            actions.extend([ServiceAction::Log, ServiceAction::Log, ServiceAction::See, ServiceAction::LogLater]);
        }
        if random.one_in(4) {
            actions.extend([ServiceAction::Panic, ServiceAction::PanicLater]);
        }
        let order = random.pick(&[Order::Requests, Order::Free]);
        let drain_at = random.one_in(4).then(|| random.within(1..=200));
        let never = usize::MAX;
        if random.one_in(2) {
            actions.push(ServiceAction::Ask);
        }
        Self {
            framing,
            custom,
            order,
            keeps: random.one_in(2),
            slot_bytes: random.pick(&[16, 64, 512, 4096, 16_384]),
            slots: random.pick(&[1, 2, 4, 24]),
            short_slots: random.pick(&[0, 1, 3, 100]),
            actions,
            length_max,
            peers: random.within(1..=12) as u32,
            places: random.within(1..=4),
            requests_max: random.pick(&[3, 12, 30]),
            misfits: random.pick(&[2, 4, 1000]),
            answer_every: random.pick(&[1, 3, 20]),
            // Without a drain, which has a time limit, peers would wait for ever.
            log_stops_at: if drain_at.is_some() && random.one_in(2) { random.within(1..=200) } else { never },
            log_lost_at: if logs && random.one_in(4) { random.within(1..=200) } else { never },
            logs,
            drain_at,
            files: random.one_in(3),
            file_breaks: random.one_in(4),
            messages_max: random.pick(&[1, 2, 5, 4096]),
            limits,
        }
    }

    pub(crate) fn defers(&self) -> bool {
        self.actions.iter().any(|action| matches!(action, ServiceAction::Later | ServiceAction::LogLater))
    }

    /// Most bytes of replies a connection may hold: the limit, what one more message adds, and what is answered late,
    /// whether there is room or not.
    pub(crate) fn queued_bytes_max(&self) -> usize {
        let reply = 2 * (12 + self.length_max) + 32 + self.range_bytes();
        let late = if self.defers() { 3 * (self.limits.deferred_max as usize).min(self.requests_max + 1) } else { 0 };
        self.limits.out_queue_bytes_max + (3 + late) * reply
    }
}

impl WorldPlan {
    /// What the two replies to a message take for ranges of files that are not read.
    fn range_bytes(&self) -> usize {
        if self.files { 4 * FILE_RANGE_BYTES } else { 0 }
    }

    /// Most bytes of unfinished input: twice the limit, the slots, what each place may put aside of one chunk, and a
    /// message for each pass, with all memory of its buffer.
    pub(crate) fn input_bytes_max(&self) -> usize {
        let message = Buffers::capacity_for(self.limits.message_bytes_max.min(1 << 16) + 1);
        let chunk = Buffers::capacity_for(self.slot_bytes as usize);
        2 * self.limits.assembly_bytes_max + self.slots as usize * chunk + self.places * (chunk + message)
    }

    /// Most bytes by which one message may exceed a budget: the message, and replies, also those whose length nobody
    /// announced.
    pub(crate) fn one_more_bytes(&self) -> usize {
        /// What a connection assumes of a deferred reply that it knows nothing of.
        const ASSUMED_BYTES: usize = 4096;
        let reply = 2 * (12 + self.length_max) + 32 + self.range_bytes();
        let message = self.length_max + 64;
        let in_work = self.limits.connection_bytes_max.min(self.limits.shard_bytes_max) / ASSUMED_BYTES + 1;
        let unannounced = reply.saturating_sub(ASSUMED_BYTES) * in_work.min(self.limits.deferred_max as usize);
        // Its place behind others, with a buffer that is not full.
        let place = 256 + 2 * reply.max(ASSUMED_BYTES);
        3 * (message + reply.max(ASSUMED_BYTES)) + unannounced + place
    }
}

fn framing(random: &mut Random) -> Framing {
    match random.within(0..=3) {
        0 => Framing::RecordMark,
        1 => {
            let bytes: &[u8] = random.pick(&[&b"\n"[..], b"\r\n", b"\r\r\n", b"ABACABAD"]);
            Framing::Delimiter(Delimiter::new(bytes).unwrap_or(Delimiter::LF))
        }
        2 => Framing::LengthPrefix(LengthPrefix::big_endian(random.pick(&[1, 2, 4, 8]))),
        _ => Framing::LengthPrefix(LengthPrefix {
            offset: random.within(0..=9) as u8,
            width: random.pick(&[2, 4, 8]),
            endian: random.pick(&[Endian::Big, Endian::Little]),
            adjust: random.within(0..=12) as i32 - 3,
            strip: false,
        }),
    }
}
