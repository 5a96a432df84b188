//! Steers a program that runs already, or that no library can be loaded into, from outside.
//!
//! ```text
//!  SYN ──► sk_lookup program ──► the listener of the process on this CPU ──► accept() there
//!               └── none, full ──► the kernel's own choice among the listeners
//! ```
//!
//! One accept queue cannot be split from outside, because nobody could accept from the parts. But a program whose
//! processes have a listener each on the same address (SO_REUSEPORT) has the queues already, and the kernel chooses among
//! them by a hash. Here each process is given a home CPU, and gets the connections that arrive there.
//!
//! From outside nothing is seen of what a process does, so nobody is passed over for being busy, and nobody else can take
//! what waits: for that the program must be started by `ksf accel run`. No descriptor of the program is kept: what it
//! closes is closed.

mod scan;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ksf::cpus::CpuSet;
use ksf::status_socket::StatusSocket;
use ksf_accel_proto::state::{LISTENERS_MAX, WORKERS_MAX};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

use crate::address::Address;
use crate::homes::{self, Homes};
use crate::network::{self, Listening};
use crate::status::{self, ListenerStatus, QueueStatus, Request, Status, WorkerCounters, WorkerStatus};
use crate::steer::{Action, Claim, QueueSteering, Rules};
use crate::{AccelError, AccelOptions, Level, sys};

/// Between two looks at the program.
const LOOK: Duration = Duration::from_secs(1);

/// Processes that are steered from outside, by a thread of this process. It ends with the last of them, or when this value
/// is dropped, and then everything is as it was.
#[derive(Debug)]
pub struct Attached {
    stop: Arc<OwnedFd>,
    status_socket: Option<PathBuf>,
    thread: Option<JoinHandle<()>>,
}

impl Attached {
    /// Steers the listeners of these processes and of all that come from them, in the network namespace of the first.
    ///
    /// Needs CAP_BPF and CAP_NET_ADMIN, and the right to trace the processes (CAP_SYS_PTRACE for those of others);
    /// CAP_SYS_ADMIN for another network namespace.
    pub fn new(pids: &[u32], options: AccelOptions) -> Result<Self, AccelError> {
        options.check()?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| AccelError::system("eventfd()", error))?;
        let stop = Arc::new(stop);
        let (told, begun) = mpsc::channel();
        let (pids, end) = (pids.to_vec(), Arc::clone(&stop));
        // A thread, because the network namespace is that of a thread.
        let thread = ksf::threads::start("ksf-accel", move || match Attachment::new(&pids, options, &end) {
            Ok(mut attachment) => {
                let _ = told.send(Ok(attachment.status_socket.as_ref().map(|it| it.path().to_owned())));
                attachment.run();
            }
            Err(error) => drop(told.send(Err(error))),
        })
        .map_err(|error| AccelError::system("starting a thread", error))?;
        let lost = || AccelError::Holder { said: "its thread ended".to_owned() };
        let status_socket = begun.recv().map_err(|_| lost())??;
        Ok(Self { stop, status_socket, thread: Some(thread) })
    }

    /// What there is to say. An error if there is no folder for status sockets.
    pub fn status(&self) -> Result<Status, AccelError> {
        match &self.status_socket {
            Some(socket) => status::of(socket),
            None => Err(AccelError::system("asking without a status socket", io::ErrorKind::NotFound)),
        }
    }

    /// True when the last process has ended.
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread owns.
struct Attachment {
    options: AccelOptions,
    roots: Vec<u32>,
    steering: QueueSteering,
    listeners: Vec<Option<Listener>>,
    workers: Vec<Option<Worker>>,
    homes: Homes,
    ended_workers: WorkerCounters,
    /// pidfds of the processes that live.
    processes: BTreeMap<u32, OwnedFd>,
    pinned: BTreeMap<u32, CpuSet>,
    status_socket: Option<StatusSocket>,
    epoll: OwnedFd,
    look_next: Instant,
}

/// One address on which the program listens.
struct Listener {
    address: Address,
    /// Worker of each socket that is steered to, by inode.
    sockets: BTreeMap<u64, usize>,
    not_accelerated: Option<String>,
    trouble: Option<String>,
    excluded: Vec<String>,
}

/// A process that serves a socket of its own.
struct Worker {
    pid: u32,
    cpu: Option<u32>,
}

const STOP: u64 = 0;
const STATUS: u64 = 1;
const PROCESS: u64 = 2;

impl Attachment {
    fn new(pids: &[u32], options: AccelOptions, stop: &Arc<OwnedFd>) -> Result<Self, AccelError> {
        let system = |action| move |error: rustix::io::Errno| AccelError::system(action, error);
        let mut processes = BTreeMap::new();
        for &pid in pids {
            let missing =
                |error| AccelError::Unavailable { what: "cannot attach to process", why: format!("{pid}: {error}") };
            processes.insert(pid, pidfd(pid).map_err(missing)?);
            may_trace(pid).map_err(missing)?;
        }
        let first = pids
            .first()
            .ok_or_else(|| AccelError::Option { option: "processes", problem: "none is named".to_owned() })?;
        enter_network_of(*first)
            .map_err(|error| AccelError::system("entering the program's network namespace", error))?;
        let options = AccelOptions {
            level: Some(Level::SkLookup),
            program: if options.program.is_empty() { scan::command(*first) } else { options.program },
            ..options
        };
        let steering = QueueSteering::choose(&options)?;
        if steering.level() != Level::SkLookup {
            let why = steering.refused.first().map(|refused| refused.why.clone()).unwrap_or_default();
            return Err(AccelError::Unavailable { what: "steering from outside needs an sk_lookup program", why });
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create1()"))?;
        let folder = options.status_folder.clone().or_else(status::folder);
        let mut attachment = Self {
            roots: pids.to_vec(),
            steering,
            listeners: (0..LISTENERS_MAX).map(|_| None).collect(),
            workers: (0..WORKERS_MAX).map(|_| None).collect(),
            homes: Homes::default(),
            ended_workers: WorkerCounters::default(),
            processes: BTreeMap::new(),
            pinned: BTreeMap::new(),
            status_socket: folder.and_then(|folder| StatusSocket::in_folder(&folder).ok()),
            epoll,
            look_next: Instant::now(),
            options,
        };
        let watch = |fd: BorrowedFd<'_>, what| {
            epoll::add(&attachment.epoll, fd, EventData::new_u64(what), EventFlags::IN).map_err(system("epoll_ctl()"))
        };
        watch(stop.as_fd(), STOP)?;
        if let Some(socket) = &attachment.status_socket {
            watch(socket.as_fd(), STATUS)?;
        }
        for (pid, pidfd) in processes {
            attachment.watch_process(pid, pidfd);
        }
        attachment.look();
        Ok(attachment)
    }

    fn run(&mut self) {
        let mut events = Vec::with_capacity(16);
        loop {
            let wait = self.look_next.saturating_duration_since(Instant::now());
            let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
            events.clear();
            let waited = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&wait));
            if waited.is_err_and(|error| error != rustix::io::Errno::INTR) {
                return;
            }
            let mut look = self.look_next <= Instant::now();
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    STATUS => self.serve_status(),
                    // A process has ended: which one is seen by the look.
                    _ => look = true,
                }
            }
            if look {
                self.look();
                self.look_next = Instant::now() + LOOK;
            }
            if self.processes.is_empty() {
                return;
            }
        }
    }

    /// Holds what is known against what is there.
    fn look(&mut self) {
        self.forget_ended();
        let family = scan::family(self.roots.iter().copied().chain(self.processes.keys().copied()));
        for pid in family {
            if !self.processes.contains_key(&pid)
                && let Ok(pidfd) = pidfd(pid)
            {
                self.watch_process(pid, pidfd);
            }
        }
        let Ok(listening) = network::listening() else { return };
        let inodes = listening.iter().map(|socket| socket.inode).collect();
        let found = scan::look(&self.processes.keys().copied().collect(), &inodes);
        let (serves, groups) = (&found.servers, self.groups(&found.servers));
        self.forget_gone(&groups);
        for (address, group) in groups {
            self.update(address, &group, serves);
        }
        self.pin();
        self.set_rules(&listening, &found.held);
    }

    /// The program's sockets by address, with the processes that serve each.
    fn groups(&self, serves: &BTreeMap<u32, scan::Serves>) -> Vec<(Address, BTreeMap<u64, Vec<u32>>)> {
        let mut by_inode: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for (&pid, one) in serves {
            for &inode in one.sockets.keys() {
                by_inode.entry(inode).or_default().push(pid);
            }
        }
        let mut groups: Vec<(Address, BTreeMap<u64, Vec<u32>>)> = Vec::new();
        for (inode, pids) in by_inode {
            let address = self.known_address(inode).or_else(|| {
                let socket = self.borrow_socket(pids[0], serves[&pids[0]].sockets[&inode], inode).ok()?;
                Address::of(socket.as_fd()).ok()
            });
            let Some(address) = address else { continue };
            match groups.iter_mut().find(|(known, _)| *known == address) {
                Some((_, group)) => drop(group.insert(inode, pids)),
                None => groups.push((address, BTreeMap::from([(inode, pids)]))),
            }
        }
        groups
    }

    fn known_address(&self, inode: u64) -> Option<Address> {
        let known = |listener: &&Listener| listener.sockets.contains_key(&inode);
        self.listeners.iter().flatten().find(known).map(|listener| listener.address)
    }

    /// A descriptor of a process's socket, for the moment.
    fn borrow_socket(&self, pid: u32, fd: i32, inode: u64) -> io::Result<OwnedFd> {
        let pidfd = self.processes.get(&pid).ok_or(io::ErrorKind::NotFound)?;
        let socket = rustix::process::pidfd_getfd(pidfd, fd, PidfdGetfdFlags::empty())?;
        // The number may have become another's since it was read.
        if rustix::fs::fstat(&socket)?.st_ino == inode { Ok(socket) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    fn forget_ended(&mut self) {
        let ended: Vec<u32> =
            self.processes.iter().filter(|(_, pidfd)| sys::has_ended(pidfd.as_fd())).map(|(&pid, _)| pid).collect();
        for pid in ended {
            if let Some(pidfd) = self.processes.remove(&pid) {
                let _ = epoll::delete(&self.epoll, &pidfd);
            }
            self.roots.retain(|root| *root != pid);
            self.pinned.remove(&pid);
        }
    }

    /// Ends workers whose socket is closed, is served by another, or was of a process that has ended.
    fn forget_gone(&mut self, groups: &[(Address, BTreeMap<u64, Vec<u32>>)]) {
        for index in 0..self.listeners.len() {
            let Some(listener) = &self.listeners[index] else { continue };
            let group = groups.iter().find(|(address, _)| *address == listener.address).map(|(_, group)| group);
            let gone = |inode: &u64, worker: usize| {
                let pid = self.workers[worker].as_ref().map(|worker| worker.pid);
                let servers = group.and_then(|group| group.get(inode)).map(Vec::as_slice);
                !matches!(servers, Some([one]) if Some(*one) == pid)
            };
            let gone: Vec<(u64, usize)> = listener
                .sockets
                .iter()
                .filter(|it| gone(it.0, *it.1))
                .map(|(&inode, &worker)| (inode, worker))
                .collect();
            for (inode, worker) in gone {
                self.steering.remove(index, worker);
                self.steering.shared.worker(worker).ready.fetch_and(!(1 << index), SeqCst);
                self.listener_mut(index).sockets.remove(&inode);
                self.free_if_idle(worker);
            }
            if group.is_none() {
                self.listeners[index] = None;
            }
        }
    }

    /// Takes in the sockets of one address.
    fn update(&mut self, address: Address, group: &BTreeMap<u64, Vec<u32>>, serves: &BTreeMap<u32, scan::Serves>) {
        let known = self.listeners.iter().position(|it| it.as_ref().is_some_and(|it| it.address == address));
        let Some(index) = known.or_else(|| self.listeners.iter().position(Option::is_none)) else { return };
        self.listeners[index].get_or_insert_with(|| Listener {
            address,
            sockets: BTreeMap::new(),
            not_accelerated: None,
            trouble: None,
            excluded: Vec::new(),
        });
        let own = own_sockets(group);
        let not_accelerated = match own {
            Ok(_) => None,
            Err(why) => Some(why.to_owned()),
        };
        self.listener_mut(index).not_accelerated = not_accelerated;
        for (inode, pid) in own.unwrap_or_default() {
            if self.listener_mut(index).sockets.contains_key(&inode) {
                continue;
            }
            if let Err(error) = self.add(index, inode, pid, serves[&pid].sockets[&inode]) {
                self.listener_mut(index).trouble = Some(format!("the listener of process {pid}: {error}"));
            }
        }
    }

    fn add(&mut self, index: usize, inode: u64, pid: u32, fd: i32) -> io::Result<()> {
        let socket = self.borrow_socket(pid, fd, inode)?;
        let worker = self.worker_of(pid).ok_or_else(|| io::Error::other("more workers than ksf accel keeps"))?;
        let added = self.steering.add(index, worker, socket.as_fd());
        let added = added.and_then(|()| self.steering.set_owner(index, worker, socket.as_fd()));
        if added.is_ok() {
            self.listener_mut(index).sockets.insert(inode, worker);
            self.steering.shared.worker(worker).ready.fetch_or(1 << index, SeqCst);
        } else {
            self.free_if_idle(worker);
        }
        added
    }

    fn worker_of(&mut self, pid: u32) -> Option<usize> {
        if let Some(known) = self.workers.iter().position(|it| it.as_ref().is_some_and(|it| it.pid == pid)) {
            return Some(known);
        }
        let index = self.workers.iter().position(Option::is_none)?;
        let affinity = homes::affinity(rustix::thread::Pid::from_raw(pid as i32)).unwrap_or_default();
        let cpu = match affinity[..] {
            [one] => Some(one),
            _ => self.homes.emptiest(&homes::allowed(self.options.cpus.as_deref(), &affinity)),
        };
        self.steering.shared.begin_worker(index, pid, cpu, 0);
        if let Some(cpu) = cpu {
            self.homes.add(cpu, index as u8);
            self.steering.shared.set_home(cpu as usize, self.homes.on(cpu));
        }
        self.workers[index] = Some(Worker { pid, cpu });
        Some(index)
    }

    fn free_if_idle(&mut self, index: usize) {
        if self.listeners.iter().flatten().any(|listener| listener.sockets.values().any(|worker| *worker == index)) {
            return;
        }
        let Some(worker) = self.workers[index].take() else { return };
        self.ended_workers.add(&self.steering.shared.end_worker(index));
        if let Some(cpu) = worker.cpu {
            self.homes.remove(cpu, index as u8);
            self.steering.shared.set_home(cpu as usize, self.homes.on(cpu));
        }
        self.unpin(worker.pid);
    }

    /// Binds the threads of each worker to its home, also those that have come since.
    fn pin(&mut self) {
        if !self.options.pin {
            return;
        }
        for worker in self.workers.iter().flatten() {
            let Some(cpu) = worker.cpu else { continue };
            let home = CpuSet::from_iter([cpu as usize]);
            for tid in scan::threads(worker.pid) {
                let tid = rustix::thread::Pid::from_raw(tid as i32);
                let Ok(before) = CpuSet::of_thread(tid) else { continue };
                // A thread that is bound to one CPU was bound by the program.
                if before.len() > 1 && home.bind(tid).is_ok() {
                    self.pinned.entry(worker.pid).or_insert(before);
                }
            }
        }
    }

    /// Lets the threads that are still where they were bound run again where they might before.
    fn unpin(&mut self, pid: u32) {
        let Some(before) = self.pinned.remove(&pid) else { return };
        for tid in scan::threads(pid) {
            let tid = rustix::thread::Pid::from_raw(tid as i32);
            if CpuSet::of_thread(tid).is_ok_and(|now| now.len() == 1) {
                let _ = before.bind(tid);
            }
        }
    }

    /// Tells the steering program its addresses, and which of the same port are somebody else's.
    fn set_rules(&mut self, listening: &[Listening], held: &BTreeSet<u64>) {
        let mut rules = Rules::new();
        for (index, listener) in self.listeners.iter().enumerate() {
            if let Some(listener) = listener.as_ref().filter(|it| it.not_accelerated.is_none()) {
                rules.extend(listener.address.keys().into_iter().map(|key| (key, Action::Steer(index))));
            }
        }
        let others: Vec<Listening> = listening.iter().filter(|it| !held.contains(&it.inode)).copied().collect();
        let claims = self.listeners.iter_mut().flatten();
        let claims = claims.map(|Listener { address, excluded, .. }| Claim { address: *address, excluded });
        if let Err(why) = self.steering.set_rules(rules, claims, &others) {
            self.listeners.iter_mut().flatten().for_each(|listener| listener.trouble = Some(why.clone()));
        }
    }

    fn watch_process(&mut self, pid: u32, pidfd: OwnedFd) {
        let _ = epoll::add(&self.epoll, &pidfd, EventData::new_u64(PROCESS), EventFlags::IN);
        self.processes.insert(pid, pidfd);
    }

    fn serve_status(&mut self) {
        if let Some(mut socket) = self.status_socket.take() {
            socket.serve(|line| status::answer(line, |request| Ok(self.act(request))));
            self.status_socket = Some(socket);
        }
    }

    fn act(&mut self, request: Request) -> Status {
        match request {
            Request::Status => {}
            Request::Pause => self.switch(false),
            Request::Resume => self.switch(true),
        }
        self.status()
    }

    fn switch(&mut self, on: bool) {
        self.options.on = on;
        self.steering.shared.state().control.on.store(on.into(), SeqCst);
    }

    fn status(&self) -> Status {
        Status {
            pid: std::process::id(),
            name: String::new(),
            attached: true,
            program: self.options.program.clone(),
            source_ports: self.options.source_ports.clone(),
            on: self.options.on,
            level: self.steering.level(),
            refused: Vec::new(),
            other_programs: self.steering.others(),
            processes: self.processes.keys().copied().collect(),
            listeners: self.listeners.iter().flatten().map(|listener| self.listener_status(listener)).collect(),
            workers: (0..self.workers.len()).filter_map(|index| self.worker_status(index)).collect(),
            ended_workers: self.ended_workers,
            stalls: 0,
            rescues: 0,
            refused_requests: Vec::new(),
        }
    }

    fn listener_status(&self, listener: &Listener) -> ListenerStatus {
        let queue = |&worker: &usize| QueueStatus { worker: worker as u32, ready: true, waiting: 0, waiting_max: 0 };
        ListenerStatus {
            address: listener.address.to_string(),
            mechanism: if listener.not_accelerated.is_some() { Level::Plain } else { self.steering.level() },
            not_accelerated: listener.not_accelerated.clone(),
            trouble: listener.trouble.clone(),
            own_reuseport: true,
            excluded: listener.excluded.clone(),
            queues: listener.sockets.values().map(queue).collect(),
        }
    }

    fn worker_status(&self, index: usize) -> Option<WorkerStatus> {
        let worker = self.workers[index].as_ref()?;
        let serves = |listener: &&Listener| listener.sockets.values().any(|it| *it == index);
        Some(WorkerStatus {
            index: index as u32,
            pid: worker.pid,
            tid: worker.pid,
            cpu: worker.cpu,
            ready: self.listeners.iter().flatten().filter(serves).map(|it| it.address.to_string()).collect(),
            stalled: false,
            counters: self.steering.shared.counters(index),
        })
    }

    fn listener_mut(&mut self, index: usize) -> &mut Listener {
        self.listeners[index].as_mut().expect("an index that was found")
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        for pid in self.pinned.keys().copied().collect::<Vec<_>>() {
            self.unpin(pid);
        }
    }
}

/// The sockets of an address that have one process each, if those are to be steered to.
fn own_sockets(group: &BTreeMap<u64, Vec<u32>>) -> Result<Vec<(u64, u32)>, &'static str> {
    if group.len() < 2 {
        return Err("all its workers share one socket: start it by ksf accel run, which gives each a queue");
    }
    let own: Vec<(u64, u32)> = group
        .iter()
        .filter_map(|(&inode, pids)| if let [pid] = pids[..] { Some((inode, pid)) } else { None })
        .collect();
    let pids: BTreeSet<u32> = own.iter().map(|(_, pid)| *pid).collect();
    if own.len() < 2 {
        return Err("each of its sockets is served by several processes");
    }
    if pids.len() < own.len() {
        return Err("one process serves several of its sockets, and from outside its threads look the same");
    }
    Ok(own)
}

fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid as i32).ok_or(io::ErrorKind::NotFound)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// An error if this thread may not look into the process, of which it would see no socket.
fn may_trace(pid: u32) -> io::Result<()> {
    match std::fs::read_link(format!("/proc/{pid}/ns/net")) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(io::Error::other(
            "not permitted to trace it: it is another user's, or more privileged; run this as root, or with CAP_SYS_PTRACE",
        )),
        result => result.map(drop),
    }
}

/// Moves this thread into the network namespace of a process, if it is another.
fn enter_network_of(pid: u32) -> io::Result<()> {
    let theirs = format!("/proc/{pid}/ns/net");
    if std::fs::read_link(&theirs)? == std::fs::read_link(Path::new("/proc/thread-self/ns/net"))? {
        return Ok(());
    }
    let namespace = File::open(theirs)?;
    sys::enter_network(namespace.as_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_with_a_process_each_are_steered_to() {
        let of = |group: &[(u64, &[u32])]| {
            own_sockets(&group.iter().map(|(inode, pids)| (*inode, pids.to_vec())).collect::<BTreeMap<_, _>>())
        };
        assert_eq!(of(&[(1, &[10]), (2, &[11])]), Ok(vec![(1, 10), (2, 11)]));
        // The parent has a third, that nobody but it serves together with a child.
        assert_eq!(of(&[(1, &[10]), (2, &[11]), (3, &[10, 11])]), Ok(vec![(1, 10), (2, 11)]));
        assert!(of(&[(1, &[10, 11])]).unwrap_err().contains("share one socket"));
        assert!(of(&[(1, &[10, 11]), (2, &[10, 11])]).unwrap_err().contains("several processes"));
        assert!(of(&[(1, &[10]), (2, &[10])]).unwrap_err().contains("threads"));
    }
}
