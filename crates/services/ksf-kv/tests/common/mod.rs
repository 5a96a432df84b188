//! A server on a real folder, its clients, and Redis to compare with.

pub(crate) mod bound;
pub(crate) mod table;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use ksf::Server;
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf_kv::disk::{Disk, DiskOptions};
use ksf_kv::{Kv, Settings};
use ksf_test::{Folder, Running, effort, own_network, program_or_skip, stream, wait_until, working};
use tempfile::TempDir;

/// The engines that work here.
pub(crate) fn engines() -> Vec<EngineKind> {
    working([EngineKind::Epoll, EngineKind::Uring], EngineKind::probe)
}

/// One of them, and in a soak all: for what is the same on each, which other tests of this crate show on all of them.
pub(crate) fn engines_of_effort() -> Vec<EngineKind> {
    let all = engines();
    let one = all.last().copied().into_iter().collect();
    effort(one, all)
}

/// A server on a folder.
pub(crate) struct Serving {
    pub(crate) server: Server,
    service: Arc<Kv>,
    limits: Limits,
    /// Its own folder, if it has one.
    folder: Option<TempDir>,
}

impl Serving {
    /// On a new folder, in a network of the test's own.
    pub(crate) fn fresh(engine: EngineKind) -> Self {
        Self::fresh_with(engine, Limits::default())
    }

    pub(crate) fn fresh_with(engine: EngineKind, limits: Limits) -> Self {
        Self::in_new_folder(|folder| Self::start_with(engine, folder, limits))
    }

    /// A server that `start` starts on a new folder, in a network of the test's own.
    pub(crate) fn in_new_folder(start: impl FnOnce(&Path) -> Self) -> Self {
        own_network();
        let folder = tempfile::tempdir().unwrap();
        let serving = start(folder.path());
        Self { folder: Some(folder), ..serving }
    }

    pub(crate) fn start(engine: EngineKind, folder: &Path) -> Self {
        Self::start_with(engine, folder, Limits::default())
    }

    pub(crate) fn start_with(engine: EngineKind, folder: &Path, limits: Limits) -> Self {
        Self::start_set(engine, folder, limits, Settings::default())
    }

    pub(crate) fn start_set(engine: EngineKind, folder: &Path, limits: Limits, settings: Settings) -> Self {
        Self::start_on(engine, folder, limits, settings, 6)
    }

    /// With so many segments of 1 MiB in each log.
    pub(crate) fn start_on(engine: EngineKind, folder: &Path, limits: Limits, settings: Settings, places: u32) -> Self {
        let options = DiskOptions { segment_bytes: 1 << 20, places, ..DiskOptions::default() };
        Self::start_disk(engine, folder, limits, settings, options)
    }

    /// With a log for each CPU. The number of logs in the options is not looked at.
    pub(crate) fn start_disk(
        engine: EngineKind,
        folder: &Path,
        limits: Limits,
        settings: Settings,
        options: DiskOptions,
    ) -> Self {
        Self::start_cpus(engine, folder, limits, settings, options, ksf::cpus::allowed().unwrap())
    }

    /// With one log, so that what one client fills is full for all.
    pub(crate) fn start_single(engine: EngineKind, folder: &Path, settings: Settings, options: DiskOptions) -> Self {
        let cpus = ksf::cpus::allowed().unwrap().into_iter().take(1).collect();
        Self::start_cpus(engine, folder, Limits::default(), settings, options, cpus)
    }

    fn start_cpus(
        engine: EngineKind,
        folder: &Path,
        limits: Limits,
        settings: Settings,
        options: DiskOptions,
        cpus: Vec<usize>,
    ) -> Self {
        let options = DiskOptions { logs: cpus.len() as u16, ..options };
        let disk = Disk::open(folder, options).unwrap();
        let kv = Kv::new(disk, settings, |error| panic!("a write failed: {error}")).unwrap();
        let service = Arc::new(kv);
        let builder = Server::builder().engine(engine).cpus(Some(cpus)).limits(limits.clone());
        let server = builder.listen("tcp:127.0.0.1:0".parse().unwrap(), Arc::clone(&service), None).start().unwrap();
        Self { server, service, limits, folder: None }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        let ListenAddr::Tcp(address) = self.server.listeners()[0].addr else { panic!("no port") };
        address
    }

    pub(crate) fn connect(&self) -> Client {
        Client::new(self.address())
    }

    /// Does not wait for clients that are still open, which have read what they wanted.
    pub(crate) fn stop(self) {
        self.server.set_limits(&Limits { linger_timeout_ms: 0, ..self.limits }.into());
        self.server.drain().unwrap();
        drop(self.service);
        drop(self.folder);
    }
}

/// Starts a server on the folder three times, which must each time answer the questions as it did.
pub(crate) fn assert_the_same_after_starts(engine: EngineKind, folder: &Path, questions: &[&str], was: &[String]) {
    assert_eq!(questions.len(), was.len());
    for start in 0..3 {
        let serving = Serving::start(engine, folder);
        let mut client = serving.connect();
        for (question, was) in questions.iter().zip(was) {
            assert_eq!(&client.ask(question), was, "{engine}, start {start}: {question}");
        }
        serving.stop();
    }
}

/// A client that prints replies as one line.
pub(crate) struct Client<S = TcpStream>(pub(crate) BufReader<S>);

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self(BufReader::new(stream::connect(address)))
    }
}

impl<S: Read + Write> Client<S> {
    pub(crate) fn send(&mut self, words: &[&str]) {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
        }
        self.0.get_mut().write_all(&bytes).unwrap();
    }

    pub(crate) fn reply(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        let line = line.trim_end();
        let (kind, rest) = line.split_at(1);
        match kind {
            "$" if rest == "-1" => "nil".into(),
            "$" | "=" => {
                let mut body = vec![0; rest.parse::<usize>().unwrap() + 2];
                self.0.read_exact(&mut body).unwrap();
                body.truncate(body.len() - 2);
                // That a text is for people, it says in RESP3.
                format!("{}{}", kind.trim_start_matches('$'), String::from_utf8(body).unwrap())
            }
            "*" if rest == "-1" => "no array".into(),
            "*" | "%" | "~" => {
                let count = rest.parse::<usize>().unwrap() * if kind == "%" { 2 } else { 1 };
                let parts: Vec<String> = (0..count).map(|_| self.reply()).collect();
                format!("{}[{}]", kind.trim_start_matches(['*', '%']), parts.join(" "))
            }
            _ => line.to_owned(),
        }
    }

    pub(crate) fn ask(&mut self, words: &str) -> String {
        let words: Vec<&str> = words.split(' ').collect();
        self.send(&words);
        self.reply()
    }
}

/// Redis, and a client of it.
pub(crate) struct Redis {
    pub(crate) client: Client<UnixStream>,
    _running: Running,
    /// What it works in.
    pub(crate) folder: Folder,
}

impl Redis {
    /// `None`: it is not installed, and that is said.
    pub(crate) fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// With more options.
    pub(crate) fn start_with(options: &[&str]) -> Option<Self> {
        let redis = program_or_skip("redis-server")?;
        let folder = Folder::new();
        let socket = folder.path("redis");
        let mut command = Command::new(redis);
        command.args(["--port", "0", "--save", "", "--databases", "1", "--dir"]).arg(folder.path(""));
        command.arg("--unixsocket").arg(&socket).args(options);
        let running = Running::start(command.stdout(Stdio::null()));
        wait_until("Redis listens", || UnixStream::connect(&socket).is_ok());
        let client = Client(BufReader::new(UnixStream::connect(&socket).unwrap()));
        Some(Self { client, _running: running, folder })
    }
}

/// A server on a new folder, and Redis, each with a client.
pub(crate) struct Compared {
    pub(crate) serving: Serving,
    pub(crate) client: Client,
    pub(crate) redis: Redis,
}

impl Compared {
    /// `None`: Redis is not installed; the test reports that it was skipped.
    pub(crate) fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// With more options for Redis.
    pub(crate) fn start_with(options: &[&str]) -> Option<Self> {
        let redis = Redis::start_with(options)?;
        let serving = Serving::fresh(EngineKind::Epoll);
        let client = serving.connect();
        Some(Self { serving, client, redis })
    }

    /// Sends a command to both. Returns the reply of the server, then that of Redis.
    pub(crate) fn ask(&mut self, question: &str) -> [String; 2] {
        [self.client.ask(question), self.redis.client.ask(question)]
    }

    /// Sends commands to both. Lists all that have different replies; `KEYS` may return the keys in any order.
    pub(crate) fn assert_same(&mut self, questions: &[&str]) {
        let mut different = Vec::new();
        for question in questions {
            let [is, wanted] = self.ask(question).map(|reply| {
                let mut words: Vec<&str> = reply.trim_matches(['[', ']']).split(' ').collect();
                words.sort_unstable();
                if question.starts_with("KEYS ") { words.join(" ") } else { reply }
            });
            if is != wanted {
                different.push(format!("{question}\n  is     {is}\n  wanted {wanted}"));
            }
        }
        assert!(different.is_empty(), "{}", different.join("\n"));
    }
}

/// A counter of the service's own.
pub(crate) fn counter(serving: &Serving, name: &str) -> u64 {
    let counters = serving.server.service_counters().remove(0).1;
    counters.into_iter().find(|(known, _)| *known == name).unwrap().1
}
