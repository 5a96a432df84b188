//! One run: threads, each pinned and with connections of its own, let go together; and the server watched meanwhile.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::Duration;

use super::book::Book;
use super::counters::{Counters, time_wait};
use super::drive::{Driver, Ran};
use super::plan::{Pace, Plan, Route};
use super::server_cpu::{Used, Watch};
use crate::drive::clock::{monotonic_ns, thread_cpu_ns, thread_runqueue_wait_ns, unix_seconds};
use crate::drive::gate::{Gate, GateOpener};
use crate::drive::open::OpenRecord;
use crate::drive::pin::{allowed_cpus, pin_to};
use crate::error::LoadError;
use crate::report::tool::Io;

/// How often the server's processes are looked at.
const WATCH_INTERVAL: Duration = Duration::from_millis(200);

/// What one thread did.
#[derive(Debug)]
pub(crate) struct ThreadRan {
    pub(crate) cpu: Option<usize>,
    pub(crate) ran: Ran,
    pub(crate) elapsed_ns: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) runqueue_wait_ns: u64,
}

/// What was measured.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) started_unix_s: f64,
    pub(crate) start_ns: u64,
    /// The end of what counts for rates.
    pub(crate) end_ns: u64,
    /// In the order of the threads.
    pub(crate) threads: Vec<ThreadRan>,
    /// All threads together.
    pub(crate) book: Book,
    pub(crate) open: Option<OpenRecord>,
    pub(crate) server: Option<Used>,
    pub(crate) counters: BTreeMap<String, Option<u64>>,
    pub(crate) time_wait_before: Option<u64>,
    pub(crate) time_wait_after: Option<u64>,
}

/// Runs the plan.
pub(crate) fn run(plan: &Plan, routes: &[Route], io: &Io<'_>) -> Result<Measured, LoadError> {
    let mut server = Watch::begin(&plan.server_pids, plan.server_cgroup.as_deref())?;
    let (time_wait_before, counters) = (time_wait(), Counters::now());
    let started_unix_s = unix_seconds();
    let threads = run_threads(plan, routes, io, || {
        if let Some(server) = &mut server {
            server.look();
        }
    })?;
    let server = server.map(Watch::end).transpose()?;
    let mut book = Book::new();
    let mut open: Option<OpenRecord> = None;
    for thread in &threads {
        book.merge(&thread.ran.book);
        if let Some(record) = &thread.ran.open {
            open.get_or_insert_with(OpenRecord::new).merge(record);
        }
    }
    book.notes.sort();
    Ok(Measured {
        started_unix_s,
        start_ns: threads.iter().map(|thread| thread.ran.start_ns).min().unwrap_or(0),
        end_ns: threads.iter().map(|thread| thread.ran.end_ns).max().unwrap_or(0),
        threads,
        book,
        open,
        server,
        counters: Counters::now().since(&counters),
        time_wait_before,
        time_wait_after: time_wait(),
    })
}

fn run_threads(
    plan: &Plan,
    routes: &[Route],
    io: &Io<'_>,
    mut watch: impl FnMut(),
) -> Result<Vec<ThreadRan>, LoadError> {
    let allowed = allowed_cpus();
    let gate = Gate::default();
    let stop = io.stop;
    let (events, inbox) = mpsc::channel();
    std::thread::scope(|scope| {
        // However this closure is left, no thread may wait at the gate for ever.
        let opener = GateOpener::new(&gate);
        for thread in 0..plan.threads {
            let cpu = plan.pinning.cpu_of(thread, plan.threads, &allowed);
            let (events, gate) = (events.clone(), &gate);
            std::thread::Builder::new()
                .name(format!("http-{thread}"))
                .spawn_scoped(scope, move || {
                    let ready = prepare(plan, cpu).and_then(|()| Driver::new(plan, routes, thread, stop));
                    let driver = match ready {
                        Ok(driver) => driver,
                        Err(error) => return drop(events.send((thread, Err(error)))),
                    };
                    let _ = events.send((thread, Ok(None)));
                    if gate.wait() {
                        let _ = events.send((thread, measure(driver, cpu).map(Some)));
                    }
                })
                .map_err(|error| LoadError::system(format!("cannot start thread {thread}"), error))?;
        }
        for _ in 0..plan.threads {
            let (_, ready) = inbox.recv().expect("every thread reports, and `events` is still open");
            ready?;
        }
        opener.open(true);
        let mut threads = Vec::with_capacity(plan.threads);
        while threads.len() < plan.threads {
            match inbox.recv_timeout(WATCH_INTERVAL) {
                Ok((thread, ran)) => threads.extend(ran?.map(|ran| (thread, ran))),
                Err(_) => watch(),
            }
        }
        threads.sort_by_key(|(thread, _)| *thread);
        Ok(threads.into_iter().map(|(_, ran)| ran).collect())
    })
}

fn prepare(plan: &Plan, cpu: Option<usize>) -> Result<(), LoadError> {
    if let Some(cpu) = cpu {
        pin_to(cpu)
            .map_err(|error| LoadError::system(format!("cannot run on CPU {cpu} (see --cpu and --no-pin)"), error))?;
    }
    if matches!(plan.pace, Pace::Open { .. }) {
        // The default slack of 50 us would make every request of a schedule late.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    }
    Ok(())
}

fn measure(driver: Driver<'_>, cpu: Option<usize>) -> Result<ThreadRan, LoadError> {
    let (begin_ns, wait_ns, cpu_ns) = (monotonic_ns(), thread_runqueue_wait_ns(), thread_cpu_ns());
    let ran = driver.run()?;
    Ok(ThreadRan {
        cpu,
        ran,
        elapsed_ns: monotonic_ns() - begin_ns,
        cpu_ns: thread_cpu_ns() - cpu_ns,
        runqueue_wait_ns: thread_runqueue_wait_ns().saturating_sub(wait_ns),
    })
}
