//! What a holder says about itself, and how to find the holders of this machine.
//!
//! Each holder has a socket in [`folder`] ([`ksf::status_socket`]). A request is a line `{"request":"status"}`, `pause` or
//! `resume`; the answer a line with a [`Status`], or `{"error":"..."}`.

use std::io;
use std::path::{Path, PathBuf};

use ksf::status_socket;
use serde::{Deserialize, Serialize};

use crate::{AccelError, Level, Refused};

/// One accelerated program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Of the holder.
    pub pid: u32,
    /// Its abstract socket, as in `KSF_ACCEL`; none of a program that is steered from outside.
    pub name: String,
    /// Steered from outside: what its workers accept is not counted.
    #[serde(default)]
    pub attached: bool,
    /// The command that was started.
    pub program: Vec<String>,
    /// The layout of source ports that its connections get, as [`crate::flow::Layout`] writes it. `None`: the kernel's.
    #[serde(default)]
    pub source_ports: Option<String>,
    /// False: loaded but off.
    pub on: bool,
    /// The mechanism in use.
    pub level: Level,
    /// Why not a better one.
    pub refused: Vec<Refused>,
    /// sk_lookup programs of others in this network namespace. All run, in the order of their attachment; where one
    /// of them chooses a socket, its choice stands.
    pub other_programs: Vec<String>,
    /// Processes of the program that the library has announced and that live.
    pub processes: Vec<u32>,
    /// Listeners of the program.
    pub listeners: Vec<ListenerStatus>,
    /// Workers of the program.
    pub workers: Vec<WorkerStatus>,
    /// Sums over the workers that have ended.
    pub ended_workers: WorkerCounters,
    /// How often a worker was found stalled.
    pub stalls: u64,
    /// How often workers were woken to take from a queue that nobody served.
    pub rescues: u64,
    /// Requests of the library that were refused, by reason.
    pub refused_requests: Vec<RefusedRequests>,
}

/// One listening address.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ListenerStatus {
    /// Address and port, and `%` and the index of the device where it is bound to one.
    pub address: String,
    /// The mechanism of this listener: that of the program, or plain.
    pub mechanism: Level,
    /// "Not accelerated because": `None` where it is.
    pub not_accelerated: Option<String>,
    /// What went wrong last for one worker of it, which then serves the program's own listener only.
    pub trouble: Option<String>,
    /// The program uses SO_REUSEPORT itself: its own sockets are the queues. False where such a socket was divided.
    pub own_reuseport: bool,
    /// Listeners of others on the same port that keep their connections.
    pub excluded: Vec<String>,
    /// Queues, by index of the worker.
    pub queues: Vec<QueueStatus>,
}

/// One queue.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QueueStatus {
    /// The worker's index; a queue outlives its worker.
    pub worker: u32,
    /// Its worker lives and serves this queue now.
    pub ready: bool,
    /// Connections that wait to be accepted.
    pub waiting: u32,
    /// How many may.
    pub waiting_max: u32,
}

/// One worker: an epoll instance, or a thread that blocks in `accept()`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Index in the shared state.
    pub index: u32,
    /// Its process.
    pub pid: u32,
    /// The thread that joined.
    pub tid: u32,
    /// CPU it is at home on.
    pub cpu: Option<u32>,
    /// Addresses of the listeners that it serves now.
    pub ready: Vec<String>,
    /// It has not come back to its queue, and is passed over.
    pub stalled: bool,
    /// What it has done.
    pub counters: WorkerCounters,
}

/// Counts of connections. The program can write to this memory, so they are as true as the program is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct WorkerCounters {
    /// Accepted from the worker's own queue.
    pub accepted_own: u64,
    /// Accepted from the program's own listener: the fallback.
    pub accepted_fallback: u64,
    /// Accepted from queues of others.
    pub accepted_stolen: u64,
    /// Connection requests steered to it that arrived on its CPU. Counted where the mechanism is an eBPF program;
    /// a request that is sent again counts again.
    pub steered_local: u64,
    /// Those that arrived on another CPU.
    pub steered_remote: u64,
}

impl WorkerCounters {
    /// Adds another worker's.
    pub fn add(&mut self, other: &WorkerCounters) {
        self.accepted_own = self.accepted_own.saturating_add(other.accepted_own);
        self.accepted_fallback = self.accepted_fallback.saturating_add(other.accepted_fallback);
        self.accepted_stolen = self.accepted_stolen.saturating_add(other.accepted_stolen);
        self.steered_local = self.steered_local.saturating_add(other.steered_local);
        self.steered_remote = self.steered_remote.saturating_add(other.steered_remote);
    }
}

/// Requests refused for one reason.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RefusedRequests {
    /// In words.
    pub why: String,
    /// How many.
    pub count: u64,
}

/// What a holder is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "lowercase")]
pub(crate) enum Request {
    /// What it says about itself.
    Status,
    /// Loaded but off.
    Pause,
    /// On again.
    Resume,
}

/// Its answer.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Answer {
    Refused { error: String },
    Status(Box<Status>),
}

/// The line that answers a line. `act`: does what is asked, or says why not.
pub(crate) fn answer(line: &str, act: impl FnOnce(Request) -> Result<Status, String>) -> String {
    let request = serde_json::from_str(line).map_err(|error| error.to_string());
    let answer = match request.and_then(act) {
        Ok(status) => Answer::Status(Box::new(status)),
        Err(error) => Answer::Refused { error },
    };
    serde_json::to_string(&answer).expect("a status has names for keys")
}

/// Folder of the sockets: `/run/ksf/accel` for root, else `$XDG_RUNTIME_DIR/ksf/accel`. `None`: there is none.
pub fn folder() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some("/run/ksf/accel".into());
    }
    std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()).map(|path| Path::new(&path).join("ksf/accel"))
}

/// All holders that answer, by process id. Sockets that nobody listens on any more are removed.
pub fn all(folder: &Path) -> Result<Vec<Status>, AccelError> {
    Ok(all_with_sockets(folder)?.into_iter().map(|(_, status)| status).collect())
}

/// As [`all`], each with the path of its socket.
pub fn all_with_sockets(folder: &Path) -> Result<Vec<(PathBuf, Status)>, AccelError> {
    let sockets = status_socket::sockets(folder);
    let sockets = sockets.map_err(|error| AccelError::system("reading the folder of status sockets", error))?;
    let mut found = Vec::new();
    for path in sockets {
        match of(&path) {
            Ok(status) => found.push((path, status)),
            Err(AccelError::System { error, .. }) if error.kind() == io::ErrorKind::ConnectionRefused => {
                let _ = std::fs::remove_file(&path);
            }
            // It ended between the look and the question.
            Err(AccelError::System { error, .. }) if is_end(&error) => {}
            Err(error) => return Err(error),
        }
    }
    found.sort_by_key(|(_, status)| status.pid);
    Ok(found)
}

/// True if there is no holder behind the socket any more: its socket is gone, or it ended instead of answering.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotFound, UnexpectedEof};
    matches!(error.kind(), NotFound | BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// What one holder says.
pub fn of(socket: &Path) -> Result<Status, AccelError> {
    ask(socket, Request::Status)
}

/// Loaded but off: all connections go to the program's own listener. Those in queues are still accepted.
pub fn pause(socket: &Path) -> Result<Status, AccelError> {
    ask(socket, Request::Pause)
}

/// On again.
pub fn resume(socket: &Path) -> Result<Status, AccelError> {
    ask(socket, Request::Resume)
}

fn ask(socket: &Path, request: Request) -> Result<Status, AccelError> {
    let strange = |error: serde_json::Error| AccelError::Status {
        socket: socket.display().to_string(),
        problem: error.to_string(),
    };
    let line = status_socket::ask(socket, &serde_json::to_string(&request).map_err(strange)?)
        .map_err(|error| AccelError::system("asking a holder", error))?;
    match serde_json::from_str(&line).map_err(strange)? {
        Answer::Refused { error } => Err(AccelError::Unavailable { what: "the holder refuses", why: error }),
        Answer::Status(status) => Ok(*status),
    }
}
