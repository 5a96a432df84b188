//! One run: threads, each pinned and with connections of its own, let go together.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use crate::drive::clock::{monotonic_ns, unix_seconds};
use crate::drive::pin::pin_to;
use crate::drive::plan::{Pace, Plan};
use crate::drive::protocol::{CountersOf, Protocol};
use crate::drive::worker::{Shared, Worker};
use crate::error::LoadError;
use crate::record::run::Run;

/// How often the watching thread looks.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// What the watching thread sees while a run goes on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) run: u64,
    pub(crate) settled: u64,
    pub(crate) elapsed: Duration,
}

/// Runs the plan once, as run `number`.
pub(crate) fn run<P: Protocol>(
    plan: &Plan,
    protocol: &P,
    number: u64,
    stop: &AtomicBool,
    mut watch: impl FnMut(Progress),
) -> Result<Run<CountersOf<P>>, LoadError> {
    let settled: Vec<AtomicU64> = (0..plan.threads).map(|_| AtomicU64::new(0)).collect();
    let (reports, inbox) = mpsc::channel();
    std::thread::scope(|scope| {
        let mut gates = Vec::with_capacity(plan.threads);
        for (thread, (cpu, settled)) in plan.cpus().into_iter().zip(&settled).enumerate() {
            // However this closure is left, the threads at their gates go: its other end is dropped.
            let (gate, wait) = mpsc::channel::<()>();
            gates.push(gate);
            let reports = reports.clone();
            std::thread::Builder::new()
                .name(format!("{}-{thread}", plan.tool))
                .spawn_scoped(scope, move || {
                    let ready = prepare(plan, thread, cpu)
                        .and_then(|()| Worker::new(plan, protocol, number, thread, cpu, Shared { stop, settled }));
                    let worker = match ready {
                        Ok(worker) => worker,
                        Err(error) => return drop(reports.send((thread, Err(error)))),
                    };
                    let _ = reports.send((thread, Ok(None)));
                    if wait.recv().is_ok() {
                        let _ = reports.send((thread, worker.run().map(Some)));
                    }
                })
                .map_err(|error| LoadError::system(format!("cannot start thread {thread}"), error))?;
        }
        for _ in 0..plan.threads {
            let (_, ready) = inbox.recv().expect("every thread reports, and `reports` is still open");
            ready?;
        }
        let started_unix_s = unix_seconds();
        let started_ns = monotonic_ns();
        gates.iter().for_each(|gate| gate.send(()).expect("every thread is at its gate"));
        let mut threads = Vec::with_capacity(plan.threads);
        while threads.len() < plan.threads {
            match inbox.recv_timeout(WATCH_INTERVAL) {
                Ok((thread, ran)) => threads.extend(ran?.map(|ran| (thread, ran))),
                Err(_) => watch(Progress {
                    run: number,
                    settled: settled.iter().map(|n| n.load(Ordering::Relaxed)).sum(),
                    elapsed: Duration::from_nanos(monotonic_ns() - started_ns),
                }),
            }
        }
        threads.sort_by_key(|(thread, _)| *thread);
        Ok(Run::new(number, started_unix_s, threads.into_iter().map(|(_, ran)| ran).collect()))
    })
}

fn prepare(plan: &Plan, thread: usize, cpu: Option<usize>) -> Result<(), LoadError> {
    if let Some(cpu) = cpu {
        pin_to(cpu).map_err(|error| {
            LoadError::system(format!("cannot run thread {thread} on CPU {cpu} (see --cpu and --no-pin)"), error)
        })?;
    }
    if let Some(nice) = plan.nice {
        // As the originals do; without the right to it (CAP_SYS_NICE) the priority stays as it is. On Linux the
        // call changes the calling thread only (setpriority(2), notes).
        let _ = rustix::process::setpriority_process(None, nice);
    }
    if matches!(plan.pace, Pace::Open { .. }) {
        // The default slack of 50 us would make every request of a schedule late.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    }
    Ok(())
}
