//! The holder: one thread that owns all queues of a program and oversees who serves them.
//!
//! ```text
//!  program socket ── requests ──► listeners, workers ──► steering (maps, groups), shared state
//!  pidfds ── deaths ────────────► workers freed, their queues rescued or inherited
//!  looks ── poll(queues) ───────► stalls, rescue eventfds
//!  once a second ───────────────► listeners of others, listeners that are gone; who is ready
//! ```
//!
//! While nothing happens it sleeps: queues are then armed to wake it once (`EPOLLONESHOT`), and the only cost is to
//! ask the kernel each second who listens, and to read who is ready. While something happens it looks at all queues every
//! [`AccelOptions::look_ms`].

mod conn;
mod lifetime;
mod listener;
mod look;
mod report;
mod request;
mod watch;
mod worker;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ksf::status_socket::StatusSocket;
use ksf_accel_proto::message::Refusal;
use ksf_accel_proto::state::{LISTENERS_MAX, WORKERS_MAX};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::io::Errno;

use crate::homes::Homes;
use crate::status::{self, Status, WorkerCounters};
use crate::steer::QueueSteering;
use crate::{AccelError, AccelOptions, Level, Refused};
use conn::{ConnectedProcess, ProgramSocket};
use lifetime::Lifetime;
use listener::Listener;
use worker::Worker;

/// The queues of one program and everything around them. It makes no promise that needs it to live: without it the
/// program's own listeners take all connections.
pub struct Holder {
    options: AccelOptions,
    steering: QueueSteering,
    listeners: Vec<Option<Listener>>,
    workers: Vec<Option<Worker>>,
    homes: Homes,
    ended_workers: WorkerCounters,
    displaced: Vec<Displaced>,
    conns: HashMap<u64, ConnectedProcess>,
    conn_next: u64,
    /// Users whose processes are admitted by the token of the environment.
    trusted_users: BTreeSet<u32>,
    /// Counts workers: [`Worker::generation`].
    generations: u32,
    lifetime: Lifetime,
    program_socket: ProgramSocket,
    status_socket: Option<StatusSocket>,
    epoll: OwnedFd,
    stop: Arc<OwnedFd>,
    refused_requests: BTreeMap<u32, (Refusal, u64)>,
    stalls: u64,
    rescues: u64,
    look_timer: look::LookTimer,
    watch_next: Instant,
}

/// A worker that was given up although it lives, and is called until it joins the listener anew.
struct Displaced {
    listener: usize,
    tid: u32,
    requests_left: u32,
}

/// How often it is called: the first call wakes it, unless another takes it. Who does not come by then comes when it
/// accepts again.
const DISPLACED_REQUESTS: u32 = 200;

/// What an event is about; the number says which of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
enum EventSource {
    Program = 1,
    Status,
    Conn,
    Process,
    Queue,
    Stop,
}

impl Holder {
    /// Takes the best mechanism that works in the network namespace of this thread. Nothing is steered before the
    /// program listens.
    ///
    /// `start`: a pidfd of the process that will become the program. With one the holder ends by itself, when that
    /// process and everything that came from it have ended; without, when it is asked to stop.
    pub fn new(options: AccelOptions, socket: ProgramAddress, start: Option<OwnedFd>) -> Result<Self, AccelError> {
        options.check()?;
        let steering = QueueSteering::choose(&options)?;
        let system = |action, error: Errno| AccelError::system(action, error);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| system("epoll_create1()", error))?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| system("eventfd()", error))?;
        let lifetime =
            Lifetime::new(start).map_err(|error| AccelError::system("making the lifetime's memfd", error))?;
        let folder = options.status_folder.clone().or_else(status::folder);
        // Without a status socket the program is accelerated all the same.
        let status_socket = folder.and_then(|folder| StatusSocket::in_folder(&folder).ok());
        let holder = Self {
            steering,
            listeners: (0..LISTENERS_MAX).map(|_| None).collect(),
            workers: (0..WORKERS_MAX).map(|_| None).collect(),
            homes: Homes::default(),
            ended_workers: WorkerCounters::default(),
            displaced: Vec::new(),
            conns: HashMap::new(),
            conn_next: 1,
            trusted_users: BTreeSet::from([rustix::process::geteuid().as_raw()]),
            generations: 0,
            lifetime,
            program_socket: ProgramSocket::new(socket),
            status_socket,
            epoll,
            stop: Arc::new(stop),
            refused_requests: BTreeMap::new(),
            stalls: 0,
            rescues: 0,
            look_timer: look::LookTimer::new(Duration::from_millis(options.look_ms.into())),
            watch_next: Instant::now(),
            options,
        };
        let watch = |fd: BorrowedFd<'_>, kind| {
            epoll::add(&holder.epoll, fd, data(kind, 0), EventFlags::IN).map_err(|error| system("epoll_ctl()", error))
        };
        watch(holder.program_socket.as_fd(), EventSource::Program)?;
        watch(holder.stop.as_fd(), EventSource::Stop)?;
        if let Some(socket) = &holder.status_socket {
            watch(socket.as_fd(), EventSource::Status)?;
        }
        if let Some(start) = holder.lifetime.start() {
            watch(start, EventSource::Process)?;
        }
        Ok(holder)
    }

    /// Starts a holder in a thread of this process, in the network namespace of the calling thread.
    pub fn start(options: AccelOptions) -> Result<Started, AccelError> {
        let address = ProgramAddress::new().map_err(|error| AccelError::system("making the holder's socket", error))?;
        Self::start_with(options, address, None)
    }

    /// As [`Holder::start`], on a socket that is there already, until the process behind the pidfd `start` and all that
    /// came from it have ended.
    pub fn start_with(
        options: AccelOptions,
        address: ProgramAddress,
        start: Option<OwnedFd>,
    ) -> Result<Started, AccelError> {
        let (name, token) = (address.name.clone(), address.token);
        let mut holder = Self::new(options, address, start)?;
        let (stop, level, refused) = (Arc::clone(&holder.stop), holder.level(), holder.refused().to_vec());
        let status_socket = holder.status_socket().map(Path::to_path_buf);
        let thread = ksf::threads::start("ksf-accel", move || holder.run())
            .map_err(|error| AccelError::system("starting a thread", error))?;
        Ok(Started { name, token, level, refused, status_socket, stop, thread: Some(thread) })
    }

    /// The mechanism in use.
    pub fn level(&self) -> Level {
        self.steering.level()
    }

    /// Why not a better one.
    pub fn refused(&self) -> &[Refused] {
        &self.steering.refused
    }

    /// Path of the status socket; `None` where there is no folder for one.
    pub fn status_socket(&self) -> Option<&Path> {
        self.status_socket.as_ref().map(StatusSocket::path)
    }

    /// Serves until the program has ended or a caller stops it. Then it removes all that it created.
    pub fn run(&mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            let timeout = self
                .timeout()
                .map(|wait| Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) });
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                // The descriptor is ours and the buffer too: nothing else is left to do.
                Err(_) => return,
            }
            for event in &events {
                if !self.handle(event.data.u64()) {
                    return;
                }
            }
            let now = Instant::now();
            if self.look_timer.is_due(now) {
                self.look(now);
            }
            if self.watch_next <= now {
                self.watch();
                // A worker becomes ready without a request, and the looks may have ended: where no worker was ready, no
                // connection gets into a queue that would wake this thread.
                self.tell_all();
                self.watch_next = now + watch::INTERVAL;
            }
            if self.lifetime.is_over(now) {
                return;
            }
        }
    }

    /// False: stop.
    fn handle(&mut self, data: u64) -> bool {
        let number = data & NUMBER_MASK;
        match data >> NUMBER_BITS {
            kind if kind == EventSource::Program as u64 => self.accept_conns(),
            kind if kind == EventSource::Conn as u64 => self.serve(number),
            // The id may have got a new owner since the kernel said so.
            kind if kind == EventSource::Process as u64 && (number == 0 || self.lifetime.has_ended(number as u32)) => {
                self.process_ended(number as u32);
            }
            kind if kind == EventSource::Process as u64 => {}
            kind if kind == EventSource::Queue as u64 => self.look_timer.activity(Instant::now()),
            kind if kind == EventSource::Status as u64 => self.serve_status(),
            _ => return false,
        }
        true
    }

    /// How long it may sleep; `None`: until something happens.
    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        let watch = self.listeners.iter().any(Option::is_some).then_some(self.watch_next);
        [self.look_timer.next(), watch, self.lifetime.next()]
            .into_iter()
            .flatten()
            .min()
            .map(|next| next.saturating_duration_since(now))
    }

    fn note_refusal(&mut self, reason: Refusal) {
        self.refused_requests.entry(reason as u32).or_insert((reason, 0)).1 += 1;
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        for index in 0..self.listeners.len() {
            self.close_listener(index);
        }
    }
}

/// Bits of an event's data that say which one; the kind is above.
const NUMBER_BITS: u32 = 56;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;

fn data(kind: EventSource, number: u64) -> EventData {
    EventData::new_u64((kind as u64) << NUMBER_BITS | number & NUMBER_MASK)
}

pub use conn::ProgramAddress;

/// A holder that runs in a thread of this process. It stops when this value is dropped.
#[derive(Debug)]
pub struct Started {
    name: String,
    token: [u8; 16],
    level: Level,
    refused: Vec<Refused>,
    status_socket: Option<PathBuf>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Started {
    /// The abstract name of the holder's socket.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The secret.
    pub fn token(&self) -> [u8; 16] {
        self.token
    }

    /// Value of the environment variable `ksf_accel_proto::message::ENVIRONMENT`.
    pub fn environment(&self) -> String {
        conn::environment(&self.name, &self.token)
    }

    /// The mechanism in use.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Why not a better one.
    pub fn refused(&self) -> &[Refused] {
        &self.refused
    }

    /// What it says about itself.
    pub fn status(&self) -> Result<Status, AccelError> {
        self.ask(status::of)
    }

    /// Loaded but off.
    pub fn pause(&self) -> Result<Status, AccelError> {
        self.ask(status::pause)
    }

    /// On again.
    pub fn resume(&self) -> Result<Status, AccelError> {
        self.ask(status::resume)
    }

    /// True when it has ended by itself.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends it, and everything it made with it.
    pub fn stop(mut self) {
        self.end();
    }

    fn ask(&self, question: fn(&Path) -> Result<Status, AccelError>) -> Result<Status, AccelError> {
        match &self.status_socket {
            Some(socket) => question(socket),
            None => Err(AccelError::system("asking a holder without a status socket", io::ErrorKind::NotFound)),
        }
    }

    fn end(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.end();
    }
}
