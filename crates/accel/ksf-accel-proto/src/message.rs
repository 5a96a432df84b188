//! What is said over the holder's socket: `SOCK_SEQPACKET` in the abstract namespace, one request and one answer at a
//! time per connection, fixed sizes, native byte order (both ends are on one machine).
//!
//! A process connects when the library is loaded into it, and again whenever it has something to say, as it likes: what
//! it owns belongs to the process (`SO_PEERCRED`), not to the connection. A connection is never used by two processes,
//! because answers would reach the wrong one.
//!
//! | request | descriptors with it | answer's descriptors |
//! |---|---|---|
//! | [`Request::Hello`] | | state map or memfd, lifetime memfd |
//! | [`Request::Listen`] | the listener | |
//! | [`Request::Join`] | the listener | queue, rescue eventfd |
//! | [`Request::Leave`] | | |
//! | [`Request::Steal`] | the listener | a queue that no worker serves, if there is one |
//!
//! Rules between the two ends:
//!
//! * The token of Hello admits a process. That of the environment is good for the holder's user and the user of the process
//!   that was started. That of the lifetime memfd (its first 16 bytes) is good for every user: a process has it only if it
//!   is a `fork()` of an admitted one, because `exec()` ends the mapping.
//! * Whoever names a listener shows its descriptor, unless the request is about the process's own worker alone.
//! * A worker ends with Leave of its last listener, with its process, or when the process begins anew ([`Request::Hello`]
//!   after `exec()`). Threads of a process share its workers; a child of `fork()` has none, and asks for its own.
//! * Join announces a listener that was never announced, so Listen is a matter of being early.
//! * The queue that Join answers with is non-blocking. It may be the listener itself (the same `SO_COOKIE`), in a program
//!   that uses `SO_REUSEPORT`: do not add it to the epoll instance twice.
//! * The rescue eventfd is read by who finds nothing more to take (own queue, listener and stolen queue empty), not by
//!   who is woken: it stays readable, and wakes others, until then.
//! * Leave with `closed` is sent after the program's `close()`: the holder looks whether the listener is still there and
//!   answers when its port is free.
//! * `accept()` of a queue that fails with `EINVAL` says that the listener is gone: drop the descriptor.
//!
//! Whatever goes wrong, the library does what the program asked for without ksf, and the holder notes why.

/// Name of the environment variable: `NAME:TOKEN`, the socket's abstract name and 32 hex digits.
pub const ENVIRONMENT: &str = "KSF_ACCEL";
/// Name of a variable: `0` keeps the library from putting its variables back where the program runs another with an
/// environment that it has cleaned.
pub const ENVIRONMENT_KEEP: &str = "KSF_ACCEL_KEEP";
/// Name of a variable: which source ports belong to which CPU, as [`crate::Layout`] writes it. The library takes those of
/// connections that the program opens from there.
pub const ENVIRONMENT_PORTS: &str = "KSF_ACCEL_PORTS";
/// Bytes of a request.
pub const REQUEST_BYTES: usize = 64;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 64;

/// What a process says to the holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// First on every connection.
    Hello {
        /// [`crate::state::VERSION`].
        version: u32,
        /// The secret from the environment, or that of the lifetime memfd.
        token: [u8; 16],
        /// Process id as the process sees it (the holder takes the true one from the socket).
        pid: u32,
        /// 1: the library has just been loaded into this process. Workers that an earlier program of the process left
        /// behind, which has become this one by `exec()`, end; their queues are inherited.
        begins: u32,
    },
    /// The program has called `listen()` on a TCP socket, with success.
    Listen {
        /// `SO_COOKIE` of the socket.
        cookie: u64,
        /// As given to `listen()`.
        backlog: i32,
    },
    /// An epoll instance, or a thread that blocks in `accept()`, begins to serve a listener.
    Join {
        /// `SO_COOKIE` of the listener.
        cookie: u64,
        /// Index of the worker it is already, for another listener; [`NO_WORKER`] if it is none yet.
        worker: u32,
        /// Thread id, for status.
        tid: u32,
        /// The CPU the thread is bound to, or -1 where it may run on several.
        cpu: i32,
    },
    /// The worker ends to serve a listener (`epoll_ctl` DEL, `close()`), its ready bit is cleared. The queue and what
    /// waits in it stay with the holder.
    Leave {
        /// `SO_COOKIE` of the listener.
        cookie: u64,
        /// The worker.
        worker: u32,
        /// 1: the program has closed its last descriptor of the listener in this process.
        closed: u32,
    },
    /// The worker was woken by the rescue eventfd, and asks for a queue to take from.
    Steal {
        /// `SO_COOKIE` of the listener.
        cookie: u64,
        /// The worker.
        worker: u32,
    },
}

/// [`Request::Join`] of a worker without an index.
pub const NO_WORKER: u32 = u32::MAX;

/// What the holder answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Done.
    Done {
        /// Index of the listener (Listen, Join).
        listener: u32,
        /// Index of the worker (Join); of the worker whose queue it is (Steal).
        worker: u32,
        /// CPU to bind the thread to, or -1: leave it where it may run (Join).
        cpu: i32,
        /// Of the worker (Join).
        generation: u32,
        /// Connections may wait in another worker's queue; its descriptor is with this answer (Steal).
        found: u32,
    },
    /// Not accelerated; the program goes on without.
    Refused {
        /// Why.
        reason: Refusal,
    },
}

/// Why a listener or worker is not accelerated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Refusal {
    /// Library and holder are of different versions.
    Version = 1,
    /// The token is wrong.
    Token = 2,
    /// Not a listening TCP socket.
    NotListening = 3,
    /// The listener was never announced: it was made before the library was there, or came from elsewhere.
    Unknown = 4,
    /// [`crate::state::LISTENERS_MAX`] or [`crate::state::WORKERS_MAX`] is reached.
    Full = 5,
    /// The socket is in another network namespace than the holder.
    Namespace = 6,
    /// The holder could not make a queue; it says why in `ksf accel status`.
    Queue = 7,
    /// No mechanism works here (see the ladder); or switched off.
    Off = 8,
    /// The request makes no sense.
    Malformed = 9,
}

impl Refusal {
    /// In words, for status and for the library's one line on standard error.
    pub fn text(self) -> &'static str {
        match self {
            Refusal::Version => "the library and ksf are of different versions: reinstall both",
            Refusal::Token => "the holder does not know this process",
            Refusal::NotListening => "not a listening TCP socket",
            Refusal::Unknown => "the listener was not made under ksf accel",
            Refusal::Full => "more listeners or workers than ksf accel keeps",
            Refusal::Namespace => "the socket is in another network namespace",
            Refusal::Queue => "the holder could not make a queue",
            Refusal::Off => "switched off, or no mechanism works here",
            Refusal::Malformed => "the holder does not understand the request",
        }
    }

    fn from_u32(number: u32) -> Option<Refusal> {
        const ALL: [Refusal; 9] = [
            Refusal::Version,
            Refusal::Token,
            Refusal::NotListening,
            Refusal::Unknown,
            Refusal::Full,
            Refusal::Namespace,
            Refusal::Queue,
            Refusal::Off,
            Refusal::Malformed,
        ];
        ALL.into_iter().find(|reason| *reason as u32 == number)
    }
}

impl Request {
    /// As bytes. The first word says which request it is.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = Writer::new();
        match *self {
            Request::Hello { version, token, pid, begins } => {
                out.u32(1).u32(version).bytes(&token).u32(pid).u32(begins);
            }
            Request::Listen { cookie, backlog } => {
                out.u32(2).u64(cookie).u32(backlog as u32);
            }
            Request::Join { cookie, worker, tid, cpu } => {
                out.u32(3).u64(cookie).u32(worker).u32(tid).u32(cpu as u32);
            }
            Request::Leave { cookie, worker, closed } => {
                out.u32(4).u64(cookie).u32(worker).u32(closed);
            }
            Request::Steal { cookie, worker } => {
                out.u32(5).u64(cookie).u32(worker);
            }
        }
        out.bytes
    }

    /// `None`: not a request of this version.
    pub fn decode(bytes: &[u8]) -> Option<Request> {
        let mut input = Reader::new(bytes.try_into().ok()?);
        Some(match input.u32() {
            1 => Request::Hello { version: input.u32(), token: input.token(), pid: input.u32(), begins: input.u32() },
            2 => Request::Listen { cookie: input.u64(), backlog: input.u32() as i32 },
            3 => Request::Join { cookie: input.u64(), worker: input.u32(), tid: input.u32(), cpu: input.u32() as i32 },
            4 => Request::Leave { cookie: input.u64(), worker: input.u32(), closed: input.u32() },
            5 => Request::Steal { cookie: input.u64(), worker: input.u32() },
            _ => return None,
        })
    }
}

impl Answer {
    /// As bytes. The first word says which answer it is.
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut out = Writer::new();
        match *self {
            Answer::Done { listener, worker, cpu, generation, found } => {
                out.u32(1).u32(listener).u32(worker).u32(cpu as u32).u32(generation).u32(found);
            }
            Answer::Refused { reason } => {
                out.u32(2).u32(reason as u32);
            }
        }
        out.bytes
    }

    /// `None`: not an answer of this version.
    pub fn decode(bytes: &[u8]) -> Option<Answer> {
        let mut input = Reader::new(bytes.try_into().ok()?);
        Some(match input.u32() {
            1 => Answer::Done {
                listener: input.u32(),
                worker: input.u32(),
                cpu: input.u32() as i32,
                generation: input.u32(),
                found: input.u32(),
            },
            2 => Answer::Refused { reason: Refusal::from_u32(input.u32())? },
            _ => return None,
        })
    }
}

/// Puts numbers one after the other into a message. All messages fit by construction (see the test).
struct Writer {
    bytes: [u8; REQUEST_BYTES],
    at: usize,
}

impl Writer {
    fn new() -> Writer {
        Writer { bytes: [0; REQUEST_BYTES], at: 0 }
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Writer {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
        self
    }

    fn u32(&mut self, number: u32) -> &mut Writer {
        self.bytes(&number.to_ne_bytes())
    }

    fn u64(&mut self, number: u64) -> &mut Writer {
        self.bytes(&number.to_ne_bytes())
    }
}

/// Takes numbers one after the other out of a message.
struct Reader {
    bytes: [u8; REQUEST_BYTES],
    at: usize,
}

impl Reader {
    fn new(bytes: [u8; REQUEST_BYTES]) -> Reader {
        Reader { bytes, at: 0 }
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        out.copy_from_slice(&self.bytes[self.at..self.at + N]);
        self.at += N;
        out
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_ne_bytes(self.array())
    }

    fn token(&mut self) -> [u8; 16] {
        self.array()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_comes_out_as_it_went_in() {
        let requests = [
            Request::Hello { version: 7, token: [0xab; 16], pid: u32::MAX, begins: 1 },
            Request::Listen { cookie: u64::MAX - 1, backlog: -1 },
            Request::Join { cookie: 3, worker: NO_WORKER, tid: 9, cpu: -1 },
            Request::Leave { cookie: 1 << 40, worker: 255, closed: 1 },
            Request::Steal { cookie: 5, worker: 6 },
        ];
        for request in requests {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
    }

    #[test]
    fn every_answer_comes_out_as_it_went_in() {
        let done = Answer::Done { listener: 1, worker: 2, cpu: -1, generation: 4, found: 5 };
        assert_eq!(Answer::decode(&done.encode()), Some(done));
        for number in 1..=9 {
            let reason = Refusal::from_u32(number).expect("nine reasons");
            assert_eq!(reason as u32, number);
            let refused = Answer::Refused { reason };
            assert_eq!(Answer::decode(&refused.encode()), Some(refused));
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        assert_eq!(Request::decode(&[0; REQUEST_BYTES]), None);
        assert_eq!(Request::decode(&[1; REQUEST_BYTES - 1]), None);
        assert_eq!(Answer::decode(&[0xff; ANSWER_BYTES]), None);
        let unknown_reason = [2u32.to_ne_bytes(), 10u32.to_ne_bytes()].concat();
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..8].copy_from_slice(&unknown_reason);
        assert_eq!(Answer::decode(&bytes), None);
    }
}
