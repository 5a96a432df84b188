//! `tests/c/actor.c` under the library: calls one by one, in threads and processes of its own.

use std::collections::{HashMap, VecDeque};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ksf_accel::Started;
use ksf_test::{PATIENCE, Running, wait_until};

use super::{Client, accelerated, compiled};

/// The program. Actor 0 is its main thread. Its children end with their input.
pub(crate) struct Actors {
    program: Running,
    /// Results that came while another actor's was waited for.
    early: HashMap<u32, VecDeque<String>>,
}

impl Actors {
    pub(crate) fn start(holder: &Started) -> Actors {
        Actors::start_as(accelerated(compiled("actor"), holder))
    }

    /// Programs that start it may say something first.
    pub(crate) fn start_as(mut command: Command) -> Actors {
        let program = Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let mut actors = Actors { program, early: HashMap::new() };
        assert_eq!(actors.result(0), "started");
        actors
    }

    pub(crate) fn pid(&self) -> u32 {
        self.program.pid()
    }

    /// Has an actor make a call that may take its time.
    pub(crate) fn begin(&mut self, actor: u32, command: &str) {
        self.program.tell(&format!("{actor} {command}"));
    }

    /// What the call answers.
    pub(crate) fn result(&mut self, actor: u32) -> String {
        self.result_within(actor, PATIENCE).unwrap_or_else(|| panic!("actor {actor} does not answer"))
    }

    /// None: the call has not returned so far.
    pub(crate) fn result_within(&mut self, actor: u32, limit: Duration) -> Option<String> {
        let limit = Instant::now() + limit;
        loop {
            if let Some(result) = self.early.get_mut(&actor).and_then(VecDeque::pop_front) {
                return Some(result);
            }
            let line = self.program.out.within(limit.saturating_duration_since(Instant::now()))?;
            // Else it is said by a program that starts it.
            if line.starts_with(|first: char| first.is_ascii_digit()) {
                let (from, result) = line.split_once(' ').expect("actor and result");
                let from = from.parse().expect("an actor's number");
                self.early.entry(from).or_default().push_back(result.to_owned());
            }
        }
    }

    pub(crate) fn call(&mut self, actor: u32, command: &str) -> String {
        self.begin(actor, command);
        self.result(actor)
    }

    /// A call of the main thread that must succeed.
    pub(crate) fn number(&mut self, actor: u32, command: &str) -> i64 {
        let result = self.call(actor, command);
        result.parse().unwrap_or_else(|_| panic!("{command}: {result}"))
    }

    /// A call that must succeed with 0.
    #[track_caller]
    pub(crate) fn zero(&mut self, actor: u32, command: &str) {
        assert_eq!(self.call(actor, command), "0", "{command}");
    }

    /// A non-blocking listener on a loopback address: its descriptor and its port.
    pub(crate) fn listener(&mut self) -> (i64, u16) {
        self.listener_of(libc::AF_INET, 0)
    }

    pub(crate) fn listener_of(&mut self, family: i32, reuseport: i32) -> (i64, u16) {
        let listener = self.number(0, &format!("socket {family} {reuseport}"));
        self.zero(0, &format!("listen {listener} 128"));
        self.zero(0, &format!("nonblock {listener} 1"));
        let port = self.number(0, &format!("port {listener}"));
        (listener, port as u16)
    }

    /// A listener in which calls wait: its descriptor and its port.
    pub(crate) fn blocking_listener(&mut self) -> (i64, u16) {
        let listener = self.number(0, "socket 2 0");
        self.zero(0, &format!("listen {listener} 128"));
        let port = self.number(0, &format!("port {listener}"));
        (listener, port as u16)
    }

    /// An epoll instance of this actor that watches the listener for EPOLLIN; 7 is the event's data.
    pub(crate) fn watching(&mut self, actor: u32, listener: i64) -> i64 {
        let epoll = self.number(actor, "epoll");
        self.zero(actor, &format!("add {epoll} {listener} 1 7"));
        epoll
    }

    /// A client is accepted by the actor when it waits next.
    #[track_caller]
    pub(crate) fn serves_at_once(&mut self, actor: u32, port: u16, epoll: i64, listener: i64) {
        let client = Client::connect(port, 'x');
        assert_eq!(self.call(actor, &format!("wait {epoll} -1 0")), "events 1:7");
        assert_eq!(taken(&self.call(actor, &format!("accept {listener}"))), 'x');
        assert!(client.was_served());
    }

    /// A client is accepted by the actor some time.
    #[track_caller]
    pub(crate) fn serves_soon(&mut self, actor: u32, port: u16, epoll: i64, listener: i64) {
        let client = Client::connect(port, 'x');
        wait_until("it is taken", || self.take_all(actor, epoll, listener) == "x");
        assert!(client.was_served());
    }

    /// A client is what the actor's `accept()`, which has begun, returns with.
    #[track_caller]
    pub(crate) fn accepts(&mut self, actor: u32, port: u16) {
        let client = Client::connect(port, 'x');
        assert_eq!(taken(&self.result(actor)), 'x');
        assert!(client.was_served());
    }

    /// The actor accepts so many clients, in as many turns as it takes.
    pub(crate) fn takes(&mut self, actor: u32, epoll: i64, listener: i64, count: usize) {
        let mut taken = 0;
        wait_until("all are taken", || {
            taken += self.take_all(actor, epoll, listener).len();
            taken == count
        });
    }

    /// What an actor accepts after it has waited, until there is nothing more: the clients' names.
    pub(crate) fn take_all(&mut self, actor: u32, epoll: i64, listener: i64) -> String {
        self.begin(actor, &format!("wait {epoll} 0 0"));
        let events = self.result(actor);
        assert!(events.starts_with("events"), "{events}");
        let mut names = String::new();
        loop {
            let result = self.call(actor, &format!("accept {listener}"));
            if result == "failed EAGAIN" {
                return names;
            }
            names.push(taken(&result));
        }
    }
}

/// The name of the client that was accepted.
#[track_caller]
pub(crate) fn taken(result: &str) -> char {
    let rest = result.strip_prefix("took ").unwrap_or_else(|| panic!("accept: {result}"));
    rest.chars().next().expect("a name")
}
