//! One run (the original's "iteration"): threads, each pinned and with a connection of its own, let go together.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::drive::clock::{monotonic_ns, thread_cpu_ns, thread_runqueue_wait_ns, unix_seconds};
use crate::drive::closed::ClosedLoop;
use crate::drive::exchange::{End, Exchange, Limits, Shared};
use crate::drive::gate::{Gate, GateOpener};
use crate::drive::open::{OpenLoop, OpenRecord, Schedule};
use crate::drive::pin::{allowed_cpus, pin_to};
use crate::drive::protocol::{Factory, Protocol};
use crate::drive::random::mix;
use crate::drive::table::Table;
use crate::drive::transport::Socket;
use crate::error::LoadError;
use crate::options::target::Endpoint;
use crate::options::{Pace, Plan};
use crate::record::{Record, Sink};

/// How often the watching thread looks at the progress.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);

/// What one thread did in one run.
#[derive(Debug, Clone)]
pub(crate) struct ThreadResult {
    /// From 0.
    pub(crate) index: usize,
    pub(crate) cpu: Option<usize>,
    pub(crate) peer: Endpoint,
    pub(crate) record: Record,
    pub(crate) open: Option<OpenRecord>,
    /// CLOCK_MONOTONIC.
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) cpu_ns: u64,
    pub(crate) runqueue_wait_ns: u64,
    /// Datagrams that this socket's receive buffer had no room for.
    pub(crate) dropped: u64,
    pub(crate) end: End,
}

impl ThreadResult {
    pub(crate) fn elapsed_ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }
}

/// What one run did.
#[derive(Debug, Clone)]
pub(crate) struct RunResult {
    /// From 1.
    pub(crate) number: u64,
    pub(crate) started_unix_s: f64,
    pub(crate) threads: Vec<ThreadResult>,
}

/// What the watching thread sees while a run goes on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) run: u64,
    pub(crate) settled: u64,
    pub(crate) elapsed: Duration,
}

/// Runs one iteration of the plan.
pub(crate) fn run_once<F: Factory>(
    plan: &Plan,
    factory: &F,
    endpoints: &[Endpoint],
    number: u64,
    stop: &AtomicBool,
    mut watch: impl FnMut(Progress),
) -> Result<RunResult, LoadError> {
    let allowed = allowed_cpus();
    let gate = Gate::default();
    let settled: Vec<AtomicU64> = (0..plan.threads).map(|_| AtomicU64::new(0)).collect();
    let (events, inbox) = mpsc::channel();
    std::thread::scope(|scope| {
        // However this closure is left, no thread may wait at the gate for ever.
        let opener = GateOpener::new(&gate);
        for (thread, settled) in settled.iter().enumerate() {
            let job = Job {
                plan,
                factory,
                endpoints,
                thread,
                cpu: plan.pinning.cpu_of(thread, plan.threads, &allowed),
                id_base: id_base(plan, number, thread),
                shared: Shared { stop, settled },
            };
            let (events, gate) = (events.clone(), &gate);
            std::thread::Builder::new()
                .name(format!("{}-{thread}", plan.tool))
                .spawn_scoped(scope, move || {
                    let _ = events.send(match job.run(gate, &events) {
                        Ok(result) => Event::Finished(Box::new(result)),
                        Err(error) => Event::Failed(error),
                    });
                })
                .map_err(|error| LoadError::system(format!("cannot start thread {thread}"), error))?;
        }
        for _ in 0..plan.threads {
            match inbox.recv().expect("every thread reports, and `events` is still open") {
                Event::Ready => {}
                Event::Failed(error) => return Err(error),
                Event::Finished(_) => unreachable!("no thread starts before the gate opens"),
            }
        }
        let started_unix_s = unix_seconds();
        let started_ns = monotonic_ns();
        opener.open(true);
        let mut threads = Vec::with_capacity(plan.threads);
        while threads.len() < plan.threads {
            match inbox.recv_timeout(WATCH_INTERVAL) {
                Ok(Event::Finished(result)) => threads.push(*result),
                Ok(Event::Failed(error)) => return Err(error),
                Ok(Event::Ready) | Err(_) => watch(Progress {
                    run: number,
                    settled: settled.iter().map(|n| n.load(Ordering::Relaxed)).sum(),
                    elapsed: Duration::from_nanos(monotonic_ns() - started_ns),
                }),
            }
        }
        threads.sort_by_key(|result| result.index);
        Ok(RunResult { number, started_unix_s, threads })
    })
}

/// Of several addresses, the one whose server answers. TCP finds that out by connecting; over UDP every connect
/// succeeds, so one request is tried on each.
pub(crate) fn answering_endpoints<F: Factory>(plan: &Plan, factory: &F, endpoints: Vec<Endpoint>) -> Vec<Endpoint> {
    const PATIENCE: Duration = Duration::from_millis(500);
    if !plan.socket.transport.is_datagram() || endpoints.len() < 2 {
        return endpoints;
    }
    let mut options = plan.socket.clone();
    options.tick = PATIENCE.min(plan.timeout);
    let answers = |endpoint: &&Endpoint| {
        let Ok(socket) = Socket::connect_to(endpoint, &options) else {
            return false;
        };
        let mut protocol = factory.make();
        let mut table = Table::new(1, factory.id_bits(), id_base(plan, 0, 0));
        let (id, index) = table.issue(0);
        if send(&socket, protocol.encode(id, index), SendFlags::NOSIGNAL).is_err() {
            return false;
        }
        let Ok((len, _)) = recv(&socket, protocol.window(false), RecvFlags::empty()) else {
            return false;
        };
        let mut record = Record::new();
        protocol.received(len, &mut Sink::new(&mut table, &mut record, 0));
        record.settled > 0
    };
    match endpoints.iter().find(answers) {
        Some(endpoint) => vec![endpoint.clone()],
        None => endpoints,
    }
}

/// Identifiers of a TCP connection start at 0 as in the original. UDP sockets may get the port of an earlier one,
/// with its late replies, so each has its own numbers.
fn id_base(plan: &Plan, run: u64, thread: usize) -> u32 {
    match plan.socket.transport.is_datagram() {
        true => mix(monotonic_ns() ^ run << 32 ^ thread as u64) as u32,
        false => 0,
    }
}

enum Event {
    Ready,
    Failed(LoadError),
    Finished(Box<ThreadResult>),
}

/// The work of one thread.
struct Job<'a, F> {
    plan: &'a Plan,
    factory: &'a F,
    endpoints: &'a [Endpoint],
    thread: usize,
    cpu: Option<usize>,
    id_base: u32,
    shared: Shared<'a>,
}

impl<F: Factory> Job<'_, F> {
    fn run(self, gate: &Gate, events: &mpsc::Sender<Event>) -> Result<ThreadResult, LoadError> {
        let plan = self.plan;
        self.prepare_thread()?;
        let socket = Socket::connect(&plan.target, self.endpoints, &plan.socket)?;
        let limits = Limits {
            messages: plan.messages.unwrap_or(u64::MAX),
            until_ns: u64::MAX,
            batch: plan.batch,
            timeout_ns: plan.timeout.as_nanos() as u64,
        };
        let mut exchange = Exchange::new(&socket, self.shared, self.factory, plan.in_flight, self.id_base, limits);
        let mut open = match plan.pace {
            Pace::Open { .. } => Some(OpenRecord::new()),
            Pace::Closed { .. } => None,
        };
        let schedule = self.schedule();
        let _ = events.send(Event::Ready);
        if !gate.wait() {
            // Another thread could not connect; its error is the one that is reported.
            return Err(LoadError::Usage("not started".into()));
        }
        let runqueue_before = thread_runqueue_wait_ns();
        let cpu_before = thread_cpu_ns();
        exchange.start();
        let start_ns = exchange.now_ns;
        if let Some(duration) = plan.duration {
            exchange.limits.until_ns = start_ns + duration.as_nanos() as u64;
        }
        let end = match (plan.pace, schedule, &mut open) {
            (Pace::Open { spin, .. }, Some(schedule), Some(record)) => {
                OpenLoop { schedule, record, tick: plan.socket.tick, spin }.run(&mut exchange)
            }
            (Pace::Open { .. }, ..) => unreachable!("an open pace has a schedule and a record"),
            (Pace::Closed { synchronous }, ..) => {
                ClosedLoop { wait_all: synchronous, tick: plan.socket.tick }.run(&mut exchange)
            }
        };
        let end_ns = monotonic_ns();
        let cpu_ns = thread_cpu_ns() - cpu_before;
        let runqueue_wait_ns = thread_runqueue_wait_ns().saturating_sub(runqueue_before);
        match end {
            End::Done | End::Interrupted => exchange.finish(),
            End::Failed(_) => {}
            End::Refused => {
                return Err(LoadError::Unreachable {
                    target: plan.target.to_string(),
                    reasons: format!("{}: no UDP socket on this port", socket.peer),
                });
            }
        }
        Ok(ThreadResult {
            index: self.thread,
            cpu: self.cpu,
            peer: socket.peer.clone(),
            dropped: socket.dropped_datagrams().unwrap_or(0),
            record: exchange.record,
            open,
            start_ns,
            end_ns,
            cpu_ns,
            runqueue_wait_ns,
            end,
        })
    }

    fn prepare_thread(&self) -> Result<(), LoadError> {
        if let Some(cpu) = self.cpu {
            pin_to(cpu).map_err(|error| {
                LoadError::system(
                    format!("cannot run thread {} on CPU {cpu} (see --cpu and --no-pin)", self.thread),
                    error,
                )
            })?;
        }
        // As the originals do; without the right to it (CAP_SYS_NICE) the priority stays as it is. On Linux the
        // call changes the calling thread only (setpriority(2), notes).
        let _ = rustix::process::setpriority_process(None, self.plan.nice);
        if matches!(self.plan.pace, Pace::Open { .. }) {
            // The default slack of 50 us would make every message of a schedule late.
            let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        }
        Ok(())
    }

    fn schedule(&self) -> Option<Schedule> {
        let Pace::Open { rate_per_s, arrival, seed, .. } = self.plan.pace else {
            return None;
        };
        let threads = self.plan.threads as f64;
        Some(Schedule::new(
            arrival,
            rate_per_s as f64 / threads,
            self.thread as f64 / threads,
            seed.wrapping_add(self.thread as u64),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::echo::client::EchoDatagramFactory;
    use crate::echo::pattern::Pattern;
    use crate::options::{CommonArgs, ToolDefaults};
    use clap::Parser;
    use std::net::UdpSocket;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        common: CommonArgs,
    }

    #[test]
    fn over_udp_the_address_that_answers_is_chosen() {
        let tool = ToolDefaults { name: "echotest", port: 1, iterations: 1, nice: 0 };
        let plan = Program::parse_from(["echotest", "localhost", "-u"]).common.plan(&tool).unwrap();
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let open = Endpoint::Inet(server.local_addr().unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            let (len, peer) = server.recv_from(&mut buffer).unwrap();
            server.send_to(&buffer[..len], peer).unwrap();
        });
        // A port that was free a moment ago.
        let closed = Endpoint::Inet(UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
        let factory = EchoDatagramFactory(Pattern::new(16));
        let chosen = answering_endpoints(&plan, &factory, vec![closed.clone(), open.clone()]);
        assert_eq!(chosen, [open]);
        let none = vec![closed.clone(), closed];
        assert_eq!(answering_endpoints(&plan, &factory, none.clone()), none);
    }
}
