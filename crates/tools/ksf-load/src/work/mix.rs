//! What is asked of the server: the cost of each message, its connection and its time, all drawn from one seed.
//!
//! The three sequences are drawn apart, each in the order in which messages are issued. So the messages of a seed
//! cost the same whatever the server's speed, and a simulation meets the very load that a server meets.

use crate::drive::protocol::{self, Operation};
use crate::drive::random::{Random, sub_seed};

/// What a message asks for; the numbers are those of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkKind {
    /// Answered at once, with its payload
    Inline,
    /// Thrown away and answered at once, without its payload
    Discard,
    /// Sleeps for its time, then is answered
    Sleep,
    /// Computes for its time, then is answered
    Compute,
}

impl WorkKind {
    /// The first word of a request.
    pub(crate) fn how(self) -> u32 {
        match self {
            WorkKind::Inline => 0,
            WorkKind::Sleep => 1,
            WorkKind::Compute => 2,
            WorkKind::Discard => 3,
        }
    }

    /// Whether the time of a message counts.
    pub(crate) fn works(self) -> bool {
        matches!(self, WorkKind::Sleep | WorkKind::Compute)
    }
}

/// Whose latencies are kept apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Class {
    Quick,
    Slow,
}

impl Class {
    pub(crate) const ALL: [Class; 2] = [Class::Quick, Class::Slow];

    /// The name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Class::Quick => "quick",
            Class::Slow => "slow",
        }
    }
}

/// What one message asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Job {
    pub(crate) class: Class,
    pub(crate) kind: WorkKind,
    /// 0 where the kind has no use for it.
    pub(crate) work_us: u32,
}

impl Operation for Job {
    fn class(&self) -> u8 {
        self.class as u8
    }
}

/// Times between two bounds, both included; each is as likely as any other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkTime {
    /// Least, microseconds.
    pub min_us: u32,
    /// Most, microseconds.
    pub max_us: u32,
}

/// Some of the messages take longer than the others.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slow {
    /// How many of a hundred.
    pub percent: f64,
    /// How long they take, microseconds.
    pub work_us: u32,
}

/// The mix of messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mix {
    pub(crate) kind: WorkKind,
    pub(crate) work: WorkTime,
    pub(crate) slow: Option<Slow>,
}

impl Mix {
    /// What the slow ones do: they sleep, unless the others compute.
    pub(crate) fn slow_kind(&self) -> WorkKind {
        match self.kind {
            WorkKind::Compute => WorkKind::Compute,
            _ => WorkKind::Sleep,
        }
    }
}

/// The jobs of a run, in the order of their issue.
#[derive(Debug)]
pub(crate) struct Jobs {
    mix: Mix,
    random: Random,
}

impl Jobs {
    pub(crate) fn new(mix: Mix, seed: u64) -> Jobs {
        Jobs { mix, random: Random::new(sub_seed(seed, "jobs")) }
    }
}

impl protocol::Mix for Jobs {
    type Operation = Job;

    fn draw(&mut self) -> Job {
        let Mix { kind, work, slow } = self.mix;
        if let Some(slow) = slow
            && self.random.unit() * 100.0 < slow.percent
        {
            return Job { class: Class::Slow, kind: self.mix.slow_kind(), work_us: slow.work_us };
        }
        let work_us = match kind.works() {
            false => 0,
            true if work.min_us == work.max_us => work.min_us,
            true => {
                let span = u64::from(work.max_us - work.min_us) + 1;
                work.min_us + (self.random.next() % span) as u32
            }
        };
        Job { class: Class::Quick, kind, work_us }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::protocol::Mix as _;

    const MIX: Mix = Mix {
        kind: WorkKind::Compute,
        work: WorkTime { min_us: 50, max_us: 200 },
        slow: Some(Slow { percent: 20.0, work_us: 9000 }),
    };

    #[test]
    fn times_are_uniform_and_the_slow_ones_are_as_many_as_asked() {
        let mut jobs = Jobs::new(MIX, 1);
        let drawn: Vec<Job> = (0..100_000).map(|_| jobs.draw()).collect();
        let (slow, quick): (Vec<Job>, Vec<Job>) = drawn.iter().partition(|job| job.class == Class::Slow);
        assert!((19_500..20_500).contains(&slow.len()), "{}", slow.len());
        assert!(slow.iter().all(|job| job.work_us == 9000 && job.kind == WorkKind::Compute));
        let mean = quick.iter().map(|job| f64::from(job.work_us)).sum::<f64>() / quick.len() as f64;
        assert!((mean - 125.0).abs() < 1.0, "{mean}");
        assert_eq!(quick.iter().map(|job| job.work_us).min(), Some(50));
        assert_eq!(quick.iter().map(|job| job.work_us).max(), Some(200));
    }

    #[test]
    fn a_seed_reproduces_jobs() {
        let draw = |seed| {
            let mut jobs = Jobs::new(MIX, seed);
            (0..50).map(|_| jobs.draw()).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn quick_messages_that_do_not_work_have_no_time() {
        let mix = Mix { kind: WorkKind::Inline, ..MIX };
        let mut jobs = Jobs::new(mix, 3);
        for _ in 0..1000 {
            let job = jobs.draw();
            match job.class {
                Class::Quick => assert_eq!((job.kind, job.work_us), (WorkKind::Inline, 0)),
                Class::Slow => assert_eq!((job.kind, job.work_us), (WorkKind::Sleep, 9000)),
            }
        }
    }
}
