//! One run: threads, each pinned and with connections of its own, let go together.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use crate::drive::clock::{monotonic_ns, unix_seconds};
use crate::drive::plan::{DrivePlan, Pace};
use crate::drive::protocol::{CountersOf, Protocol};
use crate::drive::worker::{RunControl, Worker};
use crate::error::LoadError;
use crate::record::run::RunRecord;

/// How often the watching thread looks.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// What the watching thread sees while a run goes on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) run: u64,
    pub(crate) settled: u64,
    pub(crate) elapsed: Duration,
}

/// Runs the plan once, as run `number`. Sets `stop` where a thread fails: what the others do is for nothing.
pub(crate) fn run<P: Protocol>(
    plan: &DrivePlan,
    protocol: &P,
    number: u64,
    stop: &AtomicBool,
    mut watch: impl FnMut(Progress),
) -> Result<RunRecord<CountersOf<P>>, LoadError> {
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
                    let ready = or_panicked(thread, || {
                        prepare(plan, thread, cpu)?;
                        Worker::new(plan, protocol, number, thread, cpu, RunControl { stop, settled })
                    });
                    let worker = match ready {
                        Ok(worker) => worker,
                        Err(error) => return drop(reports.send((thread, Err(error)))),
                    };
                    let _ = reports.send((thread, Ok(None)));
                    if wait.recv().is_ok() {
                        let _ = reports.send((thread, or_panicked(thread, || worker.run()).map(Some)));
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
                Ok((thread, ran)) => {
                    // This scope ends with its threads, which may have no end of their own.
                    let ran = ran.inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
                    threads.extend(ran.map(|ran| (thread, ran)));
                }
                Err(_) => watch(Progress {
                    run: number,
                    settled: settled.iter().map(|n| n.load(Ordering::Relaxed)).sum(),
                    elapsed: Duration::from_nanos(monotonic_ns() - started_ns),
                }),
            }
        }
        threads.sort_by_key(|(thread, _)| *thread);
        Ok(RunRecord::new(number, started_unix_s, threads.into_iter().map(|(_, ran)| ran).collect()))
    })
}

/// Does the work of a thread. A panic is an error of it: of a thread that reports nothing the run would wait for ever.
fn or_panicked<T>(thread: usize, work: impl FnOnce() -> Result<T, LoadError>) -> Result<T, LoadError> {
    // Unwind safe: the work owns what it changes, but for a counter that it only stores to.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(LoadError::Panicked { thread }))
}

fn prepare(plan: &DrivePlan, thread: usize, cpu: Option<usize>) -> Result<(), LoadError> {
    if let Some(cpu) = cpu {
        ksf::cpus::pin_to(cpu).map_err(|error| {
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::panic::resume_unwind;

    use ksf_test::PATIENCE;

    use super::*;
    use crate::drive::connection::{Life, Terms, TimeLimit};
    use crate::drive::plan::Destination;
    use crate::drive::protocol::{Client, Ticket};
    use crate::drive::socket::{SocketOptions, Transport};
    use crate::options::target::{Endpoint, Target};
    use crate::record::Sink;

    /// Where the client of the first connection panics.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Step {
        Prepare,
        Run,
    }

    struct Broken(Step);

    struct BrokenClient {
        panics: bool,
    }

    impl Client for BrokenClient {
        type Operation = ();
        type Counters = ();

        fn encode(&mut self, _: &Ticket, (): &()) -> &[u8] {
            if self.panics {
                // Without the message of `panic!`, which would look like a failure of the test.
                resume_unwind(Box::new("on purpose"));
            }
            b"?"
        }

        fn read(&mut self, bytes: &[u8], _: &mut Sink<'_, ()>) -> usize {
            bytes.len()
        }
    }

    impl Protocol for Broken {
        type Client = BrokenClient;
        type Mix = ();

        fn client(&self, connection: u32) -> BrokenClient {
            let panics = |step| connection == 0 && self.0 == step;
            if panics(Step::Prepare) {
                resume_unwind(Box::new("on purpose"));
            }
            BrokenClient { panics: panics(Step::Run) }
        }

        fn mix(&self, _: usize) {}

        fn request_bytes(&self) -> usize {
            1
        }
    }

    #[test]
    fn a_thread_that_panics_ends_the_run_with_an_error() {
        for step in [Step::Prepare, Step::Run] {
            // Nobody answers: the other thread waits until it is stopped.
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let addr = listener.local_addr().unwrap();
            let destination = Destination::Kept {
                target: Target::parse(&addr.to_string(), 0).unwrap(),
                endpoints: vec![Endpoint::Inet(addr)],
                socket: SocketOptions::new(Transport::Tcp, PATIENCE),
            };
            let terms = Terms { life: Life::Kept, limit: TimeLimit::Request, timeout_ns: u64::MAX >> 8 };
            let plan = DrivePlan { connections: 2, threads: 2, ..DrivePlan::new("test", destination, terms) };
            let (sender, result) = mpsc::channel();
            std::thread::spawn(move || {
                let stop = AtomicBool::new(false);
                let _ = sender.send(run(&plan, &Broken(step), 1, &stop, |_| {}).map(drop));
            });
            match result.recv_timeout(PATIENCE) {
                Ok(Err(error @ LoadError::Panicked { thread: 0 })) => assert_eq!(error.exit_code(), 70),
                other => panic!("{step:?}: {other:?}"),
            }
        }
    }
}
