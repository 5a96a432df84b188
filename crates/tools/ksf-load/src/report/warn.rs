//! Reasons to doubt the figures: chiefly, that the generator and not the server was the limit.

use crate::drive::plan::{DrivePlan, Pace};
use crate::drive::schedule::Lateness;
use crate::drive::spin::ClientSpin;
use crate::record::Counters;
use crate::record::run::{RunRecord, ThreadRun};
use crate::record::running::per;

/// From this share of CPU on, a thread is taken to be the bottleneck.
const BUSY_SHARE: f64 = 0.9;

/// From this share of late sends on, the schedule was not kept.
const LATE_PERCENT: f64 = 99.0;

/// A send that is later than this part of the gap between two sends disturbs the schedule...
const LATE_GAPS: f64 = 1.0;

/// ...but not if it is only this late, which is the precision of a sleep.
const LATE_NS: u64 = 100_000;

/// A reason to doubt the figures, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Warning {
    /// A stable name, for programs.
    pub(crate) code: &'static str,
    /// For people.
    pub(crate) text: String,
}

/// Several threads are bound to one CPU.
pub(crate) fn shared_cpus(plan: &DrivePlan) -> Option<Warning> {
    let mut pinned: Vec<usize> = plan.cpus().into_iter().flatten().collect();
    let bound = pinned.len();
    pinned.sort_unstable();
    pinned.dedup();
    (pinned.len() < bound).then(|| Warning {
        code: "shared-cpu",
        text: format!(
            "{bound} threads share {} CPUs and wait for each other; use fewer threads (-j), more CPUs (--cpu), \
             or read only the total rate",
            pinned.len()
        ),
    })
}

/// A thread with several requests in flight ran nearly all the time; with `waits` the time counts, too, that it waited
/// for its CPU. With one in flight a busy thread is no bottleneck: the kernel's work for the server's side runs on the
/// client's time (loopback, XDP), and the latency is what was asked for. A thread that polls is busy on purpose.
pub(crate) fn busy_generator<C: Counters>(
    plan: &DrivePlan,
    run: &RunRecord<C>,
    waits: bool,
    remedy: &str,
) -> Option<Warning> {
    if !plan.has_several_in_flight() || plan.spin != ClientSpin::Off {
        return None;
    }
    let busy_ns = |thread: &&ThreadRun<C>| thread.cpu_ns + if waits { thread.runqueue_wait_ns } else { 0 };
    let share = |thread: &ThreadRun<C>, ns: u64| per(ns as f64, thread.elapsed_ns as f64);
    let busiest = run.threads.iter().max_by_key(busy_ns)?;
    (share(busiest, busy_ns(&busiest)) > BUSY_SHARE).then(|| Warning {
        code: "generator-busy",
        text: format!(
            "a thread of this program used {:.0} % of a CPU and waited {:.0} % of the time for it: the server may be able \
             to do more than was measured; {remedy}",
            share(busiest, busiest.cpu_ns) * 100.0,
            share(busiest, busiest.runqueue_wait_ns) * 100.0
        ),
    })
}

/// Open loop: requests left late, or waited for room. `room` is what there was, `option` is what makes more.
pub(crate) fn schedule<C: Counters>(plan: &DrivePlan, run: &RunRecord<C>, room: &str, option: &str) -> Vec<Warning> {
    let (Pace::Open { rate_per_s, .. }, Some(lateness)) = (plan.pace, &run.lateness) else { return Vec::new() };
    let gap_ns = plan.threads as f64 * 1e9 / rate_per_s as f64;
    [late_schedule(lateness, gap_ns), bound_reached(lateness, room, option)].into_iter().flatten().collect()
}

/// Open loop: requests left late although there was room. `gap_ns`: between two requests of one thread.
fn late_schedule(open: &Lateness, gap_ns: f64) -> Option<Warning> {
    let late_ns = open.lag.at_percent(LATE_PERCENT);
    (late_ns > LATE_NS && late_ns as f64 > gap_ns * LATE_GAPS).then(|| Warning {
        code: "schedule-late",
        text: format!(
            "one message in a hundred was sent {:.0} us or more after its time although there was room: this program, not \
             the server, was late; lower --rate, add threads, use --spin 100us, or give it a CPU of its own (--cpu)",
            late_ns as f64 / 1e3
        ),
    })
}

fn bound_reached(open: &Lateness, room: &str, option: &str) -> Option<Warning> {
    (open.bound_hits > 0 || open.unsent > 0).then(|| Warning {
        code: "in-flight-bound",
        text: format!(
            "{} messages found {room} and had to wait, {} were never sent: the server does not keep up with --rate, or \
             {option} is too small for its latency",
            open.bound_hits, open.unsent
        ),
    })
}

/// Datagrams were lost here.
pub(crate) fn own_drops<C: Counters>(run: &RunRecord<C>) -> Option<Warning> {
    (run.dropped() > 0).then(|| Warning {
        code: "receive-buffer-full",
        text: format!(
            "this machine dropped {} replies because the receive buffer was full; raise net.core.rmem_max and \
             --rcvbuf, or lower -a",
            run.dropped()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::pin::Pinning;
    use crate::record::run::tests::{run, thread};

    fn plan(options: &str) -> DrivePlan {
        crate::calls::args::tests::plan(&format!("localhost {options}")).unwrap().drive
    }

    fn codes(plan: &DrivePlan, run: &RunRecord<()>) -> Vec<&'static str> {
        let schedule = schedule(plan, run, "room", "-a");
        let warnings =
            busy_generator(plan, run, false, "add threads").into_iter().chain(schedule).chain(own_drops(run));
        warnings.map(|warning| warning.code).collect()
    }

    #[test]
    fn a_busy_thread_is_named_only_when_it_can_be_the_limit() {
        let mut busy = thread(0, 1000, &[1]);
        busy.cpu_ns = 950;
        let busy = run(1, vec![thread(0, 1000, &[1]), busy]);
        assert_eq!(codes(&plan("-a 8"), &busy), ["generator-busy"]);
        assert_eq!(codes(&plan("-a 1"), &busy), [""; 0]);
        let idle = run(1, vec![thread(0, 1000, &[1])]);
        assert_eq!(codes(&plan("-a 8"), &idle), [""; 0]);
    }

    #[test]
    fn an_open_loop_tells_its_own_lateness_from_the_servers() {
        let mut lateness = Lateness::new();
        for _ in 0..100 {
            lateness.lag.record(5_000_000);
        }
        let mut late = thread(0, 1000, &[1]);
        late.lateness = Some(lateness);
        assert_eq!(codes(&plan("--rate 1000"), &run(1, vec![late])), ["schedule-late"]);
        let mut bound = thread(0, 1000, &[1]);
        bound.lateness = Some(Lateness { bound_hits: 3, ..Lateness::new() });
        assert_eq!(codes(&plan("--rate 1000"), &run(1, vec![bound])), ["in-flight-bound"]);
    }

    #[test]
    fn own_drops_are_owned() {
        let mut full = thread(0, 1000, &[1]);
        full.dropped = 9;
        assert_eq!(codes(&plan("-u -a 4"), &run(1, vec![full])), ["receive-buffer-full"]);
    }

    #[test]
    fn threads_on_one_cpu_are_warned_about() {
        let on = |cpus: &[usize], threads| DrivePlan { threads, pinning: Pinning::List(cpus.to_vec()), ..plan("") };
        assert_eq!(shared_cpus(&on(&[0, 1], 3)).unwrap().code, "shared-cpu");
        assert_eq!(shared_cpus(&on(&[0, 1], 2)), None);
        assert_eq!(shared_cpus(&plan("-j 3 --no-pin")), None);
    }
}
