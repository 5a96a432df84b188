//! What unfinished messages take of memory is what is counted for them: measured, not believed. In a process of its own,
//! whose memory nothing else changes.

use ksf::buffers::Buffers;
use ksf::cutter::{Cut, Cutter, Native, Room};
use ksf::framing::Framing;
use ksf::limits::{Limits, Time};

const MIB: usize = 1 << 20;

/// Just above a size class, so the buffer for it is almost twice as large.
const MESSAGE_BYTES: usize = MIB + (64 << 10);

/// Memory that the allocator, and the kernel's own counting, may add.
const SLACK_BYTES: usize = 8 * MIB;

#[derive(Default)]
struct Counted(usize, Option<usize>);

impl Room for Counted {
    fn grow(&mut self, bytes: usize) -> bool {
        let granted = self.1.is_none_or(|limit| self.0 + bytes <= limit);
        self.0 += if granted { bytes } else { 0 };
        granted
    }

    fn shrink(&mut self, bytes: usize) {
        self.0 -= bytes;
    }
}

struct Bench {
    limits: Limits,
    buffers: Buffers,
    counted: Counted,
}

impl Bench {
    fn new(limit: Option<usize>) -> Self {
        Self { limits: Limits::default(), buffers: Buffers::default(), counted: Counted(0, limit) }
    }

    fn feed(&mut self, cutter: &mut Cutter, chunk: &[u8]) -> Cut {
        let mut rule = Native { framing: Framing::RecordMark, limits: &self.limits };
        cutter.next(chunk, &mut 0, &mut rule, &mut self.counted, &self.buffers, Time(1)).unwrap()
    }

    /// A peer that announces a message of this length, and sends nothing of it; `None` if there is no room for that.
    fn announced(&mut self, bytes: usize) -> Option<Cutter> {
        let mut cutter = Cutter::default();
        match self.feed(&mut cutter, &(0x8000_0000 | bytes as u32).to_be_bytes()) {
            Cut::More => Some(cutter),
            cut => {
                assert!(matches!(cut, Cut::NoRoom), "{cut:?}");
                None
            }
        }
    }
}

/// Memory of this process that is there.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size()
}

#[test]
fn an_announced_length_takes_what_is_counted() {
    for bytes in [20_000, 100_000, MESSAGE_BYTES] {
        let (mut bench, before) = (Bench::new(None), resident_bytes());
        let announced: Vec<_> = (0..512).map(|_| bench.announced(bytes).unwrap()).collect();
        let taken = resident_bytes().saturating_sub(before);
        let counted = bench.counted.0;
        assert!(taken <= counted + SLACK_BYTES, "{bytes} bytes announced 512 times: {taken} taken, {counted} counted");
        drop(announced);
    }

    // Memory that a whole message was received into is used again for one that is only announced.
    let (mut bench, before) = (Bench::new(Some(16 * MIB)), resident_bytes());
    let body = vec![7; MESSAGE_BYTES];
    let mut announced = Vec::new();
    for _ in 0..256 {
        // One message becomes whole while there is room for it.
        let Some(mut writer) = bench.announced(MESSAGE_BYTES) else { break };
        match bench.feed(&mut writer, &body) {
            Cut::Assembled(message) => assert!(*message == body),
            cut => {
                assert!(matches!(cut, Cut::NoRoom), "{cut:?}");
                writer.reset(&mut bench.counted);
            }
        }
        announced.extend(bench.announced(MESSAGE_BYTES));
    }
    assert!(announced.len() > 20, "{} peers", announced.len());
    let taken = resident_bytes().saturating_sub(before);
    let counted = bench.counted.0;
    let most = counted + body.len() + SLACK_BYTES;
    assert!(taken <= most, "after whole messages: {taken} taken, {counted} counted");
}
