//! Reasons to doubt the figures: chiefly, that the generator and not the server was the limit.

use crate::drive::driver::RunResult;
use crate::drive::open::OpenRecord;
use crate::options::{Pace, Plan};
use crate::record::stats::Summary;

/// From this share of CPU on, a thread is taken to be the bottleneck.
pub(crate) const BUSY_SHARE: f64 = 0.9;

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

/// What is doubtful about the set-up, before anything runs.
pub(crate) fn about_plan(plan: &Plan, allowed: &[usize]) -> Vec<Warning> {
    let pinned = (0..plan.threads).filter_map(|thread| plan.pinning.cpu_of(thread, plan.threads, allowed));
    shared_cpus(pinned.collect()).into_iter().collect()
}

/// Of the CPUs that threads are bound to: several threads have one.
pub(crate) fn shared_cpus(mut pinned: Vec<usize>) -> Option<Warning> {
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

/// What is doubtful about a run.
pub(crate) fn about_run(plan: &Plan, run: &RunResult, summary: &Summary) -> Vec<Warning> {
    let mut warnings = Vec::new();
    warnings.extend(busy_generator(plan, run));
    if let (Pace::Open { rate_per_s, .. }, Some(open)) = (plan.pace, &summary.open) {
        warnings.extend(late_schedule(open, plan.threads as f64 * 1e9 / rate_per_s as f64));
        warnings.extend(bound_reached(open, &format!("{} in flight", plan.in_flight), "-a"));
    }
    warnings.extend(own_drops(summary));
    warnings
}

/// With one message in flight a busy thread is no bottleneck: the kernel's work for the
/// server's side runs on the client's time (loopback, XDP), and the latency is what was asked for.
fn busy_generator(plan: &Plan, run: &RunResult) -> Option<Warning> {
    if plan.in_flight <= 1 {
        return None;
    }
    let busiest = run
        .threads
        .iter()
        .filter(|thread| thread.elapsed_ns() > 0)
        .map(|thread| thread.cpu_ns as f64 / thread.elapsed_ns() as f64)
        .max_by(f64::total_cmp)?;
    (busiest > BUSY_SHARE).then(|| Warning {
        code: "generator-busy",
        text: format!(
            "a thread of this program used {:.0} % of its CPU without waiting for the server: the server may be able \
             to do more than was measured; add threads (-j) on CPUs of their own (--cpu){}",
            busiest * 100.0,
            match plan.batch == 1 && !plan.socket.transport.is_datagram() {
                true => ", or several messages per send (--batch)",
                false => "",
            }
        ),
    })
}

/// Open loop: requests left late although there was room. `gap_ns`: between two requests of one thread.
pub(crate) fn late_schedule(open: &OpenRecord, gap_ns: f64) -> Option<Warning> {
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

/// Open loop: requests waited for room. `room` is what there was, `option` is what makes more.
pub(crate) fn bound_reached(open: &OpenRecord, room: &str, option: &str) -> Option<Warning> {
    (open.bound_hits > 0 || open.unsent > 0).then(|| Warning {
        code: "in-flight-bound",
        text: format!(
            "{} messages found {room} and had to wait, {} were never sent: the server does not keep up with --rate, or \
             {option} is too small for its latency",
            open.bound_hits, open.unsent
        ),
    })
}

fn own_drops(summary: &Summary) -> Option<Warning> {
    (summary.dropped > 0).then(|| Warning {
        code: "receive-buffer-full",
        text: format!(
            "this machine dropped {} replies because the receive buffer was full; raise net.core.rmem_max and \
             --rcvbuf, or lower -a",
            summary.dropped
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{CommonArgs, ToolDefaults};
    use crate::record::stats::tests::{run, thread};
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        common: CommonArgs,
    }

    fn plan(options: &str) -> Plan {
        let words = ["test", "localhost"].into_iter().chain(options.split_whitespace());
        let tool = ToolDefaults { name: "rpctest", port: 1, iterations: 1, nice: 0 };
        Program::parse_from(words).common.plan(&tool).unwrap()
    }

    fn codes(plan: &Plan, run: &RunResult) -> Vec<&'static str> {
        about_run(plan, run, &Summary::of(run)).iter().map(|warning| warning.code).collect()
    }

    #[test]
    fn a_busy_thread_is_named_only_when_it_can_be_the_limit() {
        let mut busy = thread(0, 1000, &[1]);
        busy.cpu_ns = 950;
        let run = run(1, vec![thread(0, 1000, &[1]), busy]);
        assert_eq!(codes(&plan("-a 8"), &run), ["generator-busy"]);
        assert_eq!(codes(&plan("-a 1"), &run), [""; 0]);
        let idle = crate::record::stats::tests::run(1, vec![thread(0, 1000, &[1])]);
        assert_eq!(codes(&plan("-a 8"), &idle), [""; 0]);
    }

    #[test]
    fn an_open_loop_tells_its_own_lateness_from_the_servers() {
        let mut open = OpenRecord::new();
        for _ in 0..100 {
            open.lag.record(5_000_000);
        }
        let mut late = thread(0, 1000, &[1]);
        late.open = Some(open.clone());
        assert_eq!(codes(&plan("--rate 1000"), &run(1, vec![late])), ["schedule-late"]);
        let mut bound = thread(0, 1000, &[1]);
        bound.open = Some(OpenRecord { bound_hits: 3, ..OpenRecord::new() });
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
        assert_eq!(about_plan(&plan("-j 3"), &[0, 1])[0].code, "shared-cpu");
        assert!(about_plan(&plan("-j 2"), &[0, 1]).is_empty());
        assert!(about_plan(&plan("-j 3 --no-pin"), &[0, 1]).is_empty());
    }
}
