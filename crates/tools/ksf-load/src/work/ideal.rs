//! One queue before N workers, on paper: the best that any server without knowledge of the future can do with the
//! messages of an open loop, when it knows nothing of their cost and its own costs are nothing.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::mix::{Class, Jobs};
use crate::drive::protocol::Mix as _;
use crate::drive::schedule::Schedule;
use crate::record::Latencies;

/// Latencies by class, and the time at which the last worker was done.
#[derive(Debug)]
pub(crate) struct Ideal {
    pub(crate) latencies: Vec<Latencies>,
    pub(crate) end_ns: u64,
}

/// Runs all messages that are due before `until_ns`, at most `messages` of them, first in, first out.
pub(crate) fn simulate(
    schedule: &mut Schedule,
    jobs: &mut Jobs,
    workers: usize,
    messages: u64,
    until_ns: u64,
) -> Ideal {
    let mut ideal = Ideal { latencies: Class::ALL.map(|_| Latencies::new()).into(), end_ns: 0 };
    let mut free_ns: BinaryHeap<Reverse<u64>> = (0..workers).map(|_| Reverse(0)).collect();
    for _ in 0..messages {
        let due_ns = schedule.due_ns();
        if due_ns >= until_ns {
            break;
        }
        schedule.advance();
        let job = jobs.draw();
        let Reverse(worker_ns) = free_ns.pop().expect("there is a worker");
        let done_ns = worker_ns.max(due_ns) + u64::from(job.work_us) * 1000;
        free_ns.push(Reverse(done_ns));
        ideal.latencies[job.class as usize].record(done_ns - due_ns);
        ideal.end_ns = ideal.end_ns.max(done_ns);
    }
    ideal
}

#[cfg(test)]
mod tests {
    use super::super::mix::{Mix, Slow, WorkKind, WorkTime};
    use super::*;
    use crate::drive::schedule::Arrival;

    fn run(workers: usize, work_us: u32, slow: Option<Slow>, arrival: Arrival, rate: f64, messages: u64) -> Ideal {
        let work = WorkTime { min_us: work_us, max_us: work_us };
        let mut jobs = Jobs::new(Mix { kind: WorkKind::Sleep, work, slow }, 1);
        simulate(&mut Schedule::new(arrival, rate, 0.0, 1), &mut jobs, workers, messages, u64::MAX)
    }

    #[test]
    fn without_waiting_a_message_takes_its_own_time() {
        let ideal = run(2, 1500, None, Arrival::Constant, 1000.0, 100);
        let quick = &ideal.latencies[Class::Quick as usize];
        assert_eq!((quick.count(), quick.min_ns, quick.max_ns), (100, 1_500_000, 1_500_000));
    }

    #[test]
    fn an_overloaded_worker_falls_behind_by_what_is_too_much() {
        // Every millisecond two milliseconds of work: message n waits n ms.
        let ideal = run(1, 2000, None, Arrival::Constant, 1000.0, 10);
        assert_eq!(ideal.latencies[Class::Quick as usize].max_ns, 11_000_000);
        assert_eq!(ideal.end_ns, 20_000_000);
    }

    #[test]
    fn poisson_arrivals_and_one_worker_wait_as_theory_says() {
        // M/D/1 at load 0.5: the mean wait is rho / (2 (1 - rho)) = half a service time (Pollaczek and Khinchine).
        let ideal = run(1, 1000, None, Arrival::Poisson, 500.0, 300_000);
        let mean = ideal.latencies[Class::Quick as usize].mean_ns();
        assert!((mean - 1_500_000.0).abs() < 20_000.0, "{mean}");
    }

    #[test]
    fn slow_messages_are_a_class_of_their_own() {
        let slow = Some(Slow { percent: 20.0, work_us: 20_000 });
        let ideal = run(4, 0, slow, Arrival::Poisson, 400.0, 20_000);
        let (quick, slow) = (&ideal.latencies[0], &ideal.latencies[1]);
        assert!(slow.min_ns >= 20_000_000 && quick.min_ns == 0);
        assert!(quick.at_percent(99.0) > 0 && quick.count() > 15_000);
    }
}
