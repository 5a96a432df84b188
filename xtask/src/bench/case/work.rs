//! Messages that cost something, of several connections on several workers: mux.

use super::super::contestant::Contestant::{self, IdealQueue, WorkLoops, WorkThreads, Workers2, Workers4};
use super::{Case, Metric, ONE, Row, Service};

/// A load for the work service.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WorkLoad {
    /// What messages ask for, as worktest calls it.
    pub(crate) kind: &'static str,
    /// Least and most time of work, microseconds.
    pub(crate) work_us: Option<[u32; 2]>,
    /// Messages in a hundred that sleep, and for how many milliseconds.
    pub(crate) slow: Option<[u32; 2]>,
    /// One for each connection: what it has in flight, or its share of the messages.
    pub(crate) weights: &'static [u32],
    pub(crate) pace: Pace,
    /// The loops of the peer with pinned connections, dealt out in the order of accept.
    pub(crate) loops: &'static str,
}

/// When a message is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// When a reply makes room on its connection.
    Connection,
    /// When a reply makes room; on a connection that is drawn by weight.
    Window,
    /// So many per second, as independent arrivals.
    Rate(u32),
}

impl WorkLoad {
    /// The share of the messages that goes to the busiest loop.
    pub(crate) fn max_share(&self) -> f64 {
        let mut sums = [0; 10];
        for (weight, digit) in self.weights.iter().zip(self.loops.bytes().cycle()) {
            sums[usize::from(digit - b'0')] += weight;
        }
        let most = sums.into_iter().max().unwrap_or(0);
        f64::from(most) / f64::from(self.weights.iter().sum::<u32>())
    }

    /// Mean time of work, microseconds.
    pub(crate) fn mean_work_us(&self) -> f64 {
        self.work_us.map_or(0.0, |[least, most]| f64::from(least + most) / 2.0)
    }

    /// Whether messages are answered at once.
    pub(crate) fn is_idle(&self) -> bool {
        self.work_us.is_none() && self.slow.is_none()
    }
}

const WORK: &[Contestant] = &[WorkThreads, WorkLoops, Workers2];
const WORK_SLEEP: &[Contestant] = &[WorkThreads, WorkLoops, Workers2, Workers4];

/// Messages in flight where they are spread by weight: enough that the busiest loop never waits for one.
const WINDOW: u32 = 32;

/// Three of four equal connections on the first of two loops.
const SPLIT: &[u32] = &[1, 1, 1, 1];
const SPLIT_LOOPS: &str = "0001";
/// One connection with most of the messages; the loops take the connections in turn.
const SKEWED: &[u32] = &[8, 1, 1, 1];
const TURNS: &str = "01";

const WORK_US: Option<[u32; 2]> = Some([50, 200]);

const fn worked(kind: &'static str, weights: &'static [u32], loops: &'static str) -> WorkLoad {
    WorkLoad { kind, work_us: WORK_US, slow: None, weights, pace: Pace::Window, loops }
}

static DISCARD: WorkLoad =
    WorkLoad { kind: "discard", work_us: None, slow: None, weights: &[1; 8], pace: Pace::Connection, loops: TURNS };
static SLEEP_SPLIT: WorkLoad = worked("sleep", SPLIT, SPLIT_LOOPS);
static SLEEP_SKEWED: WorkLoad = worked("sleep", SKEWED, TURNS);
static COMPUTE_SPLIT: WorkLoad = worked("compute", SPLIT, SPLIT_LOOPS);
static COMPUTE_SKEWED: WorkLoad = worked("compute", SKEWED, TURNS);
static PIPELINE: WorkLoad =
    WorkLoad { kind: "inline", work_us: None, slow: None, weights: &[1; 4], pace: Pace::Connection, loops: TURNS };
/// That of the probe in research on message sockets: 4 workers, of whose time the slow messages take 0.4.
static MIXED: WorkLoad =
    WorkLoad { kind: "inline", work_us: None, slow: Some([20, 20]), weights: &[1], pace: Pace::Rate(400), loops: "0" };

const fn mux(name: &'static str, title: &'static str, load: &'static WorkLoad, in_flight: u32) -> Case {
    Case {
        name,
        title,
        row: Row::Mux,
        service: Service::Work(load),
        in_flight,
        connections: load.weights.len() as u32,
        contestants: WORK,
        metric: Metric::MessagesPerS,
        ..ONE
    }
}

pub(super) const CASES: &[Case] = &[
    mux("mux-discard", "Messages of 5000 bytes that are thrown away, 8 connections with 1 in flight", &DISCARD, 1),
    Case {
        contestants: WORK_SLEEP,
        ..mux("mux-sleep-split", "Messages that sleep 50 to 200 us, connections split 3:1", &SLEEP_SPLIT, WINDOW)
    },
    Case {
        contestants: WORK_SLEEP,
        ..mux("mux-sleep-skewed", "Messages that sleep 50 to 200 us, connections 8:1:1:1", &SLEEP_SKEWED, WINDOW)
    },
    mux("mux-compute-split", "Messages that compute 50 to 200 us, connections split 3:1", &COMPUTE_SPLIT, WINDOW),
    mux("mux-compute-skewed", "Messages that compute 50 to 200 us, connections 8:1:1:1", &COMPUTE_SKEWED, WINDOW),
    mux("mux-pipeline-64", "Small messages, 4 connections with 64 in flight each", &PIPELINE, 64),
    mux("mux-pipeline-256", "Small messages, 4 connections with 256 in flight each", &PIPELINE, 256),
    // No threads or loops here: for them one connection is one thread, which this load would overload 1.6 times.
    Case {
        contestants: &[IdealQueue, Workers4],
        metric: Metric::QuickP99Us,
        ..mux("mux-mixed", "1 connection, 400 messages per second, of which 20 % sleep 20 ms", &MIXED, 1024)
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_busiest_loop() {
        assert_eq!(SLEEP_SPLIT.max_share(), 0.75);
        assert_eq!(SLEEP_SKEWED.max_share(), 9.0 / 11.0);
        assert_eq!(DISCARD.max_share(), 0.5);
    }

    /// Every run opens all connections anew: the loops must begin where they began before.
    #[test]
    fn loops_are_dealt_alike_in_every_run() {
        for case in CASES {
            if let Service::Work(load) = case.service {
                assert_eq!(load.weights.len() % load.loops.len(), 0, "{}", case.name);
            }
        }
    }
}
