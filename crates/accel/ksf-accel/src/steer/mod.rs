//! The ladder: mechanisms that bring a connection to a worker on its CPU, the best first.
//!
//! Each is tried with what it really needs (a program that loads and attaches, a socket that takes the option), not by
//! the kernel's version. Why one did not work is kept in words, for status.

mod classic;
mod load;
mod lookup;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketType, ipproto};
use serde::{Deserialize, Serialize};

pub(crate) use classic::Choice;
pub(crate) use load::explain;
pub(crate) use lookup::{Action, Rules};

use crate::address::{Address, Key};
use crate::network::Listening;
use crate::shared::SharedMemory;
use crate::{AccelError, AccelOptions, sys};

/// A mechanism, from the best to none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// An `sk_lookup` program on the network namespace (kernel 5.9; CAP_BPF and CAP_NET_ADMIN). Sees who is ready and
    /// who is busy; what it cannot place goes to the program's own listener, which is left as it is.
    SkLookup,
    /// A classic program that knows the CPU only (kernel 4.5; no privilege). The holder makes it anew when a worker
    /// becomes ready or ends, so it is late by one look, or by a second where nothing happened before. The program's
    /// listener becomes a member of a reuseport group, so its port is free only when the queues are closed too.
    ClassicBpf,
    /// Nothing: all workers share the program's listener.
    Plain,
}

impl Level {
    /// From the best to none.
    pub const ALL: [Level; 3] = [Level::SkLookup, Level::ClassicBpf, Level::Plain];

    /// As it is written in options and in status.
    pub fn name(self) -> &'static str {
        match self {
            Level::SkLookup => "sk_lookup",
            Level::ClassicBpf => "classic_bpf",
            Level::Plain => "plain",
        }
    }
}

impl std::str::FromStr for Level {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = || Level::ALL.map(Level::name).join(", ");
        Level::ALL.into_iter().find(|level| level.name() == name).ok_or_else(|| format!("one of {}", known()))
    }
}

/// A mechanism that could not be used, and why.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Refused {
    /// Which one.
    pub level: Level,
    /// In words.
    pub why: String,
}

/// A listener of the program, as others on its port may stand in its way.
pub(crate) struct Claim<'a> {
    pub(crate) address: Address,
    /// Other listeners on the port, for status.
    pub(crate) excluded: &'a mut Vec<String>,
}

/// The mechanism that is in use, with what it keeps open.
pub(crate) struct QueueSteering {
    pub(crate) shared: SharedMemory,
    pub(crate) refused: Vec<Refused>,
    mechanism: Mechanism,
}

enum Mechanism {
    Lookup(Box<lookup::Lookup>),
    Classic,
    Plain,
}

impl QueueSteering {
    /// Takes the best mechanism that works, or only the one that the options name.
    pub(crate) fn choose(options: &AccelOptions) -> Result<Self, AccelError> {
        let mut refused = Vec::new();
        for level in Level::ALL {
            if level == Level::Plain {
                break;
            }
            if let Some(forced) = options.level
                && forced != level
            {
                refused.push(Refused { level, why: format!("the options ask for {} only", forced.name()) });
                continue;
            }
            match Self::try_level(level, options) {
                Ok((shared, mechanism)) => return Ok(Self { shared, refused, mechanism }),
                Err(error) => refused.push(Refused { level, why: load::explain(&error) }),
            }
        }
        let shared =
            SharedMemory::in_memory(options).map_err(|error| AccelError::system("making the shared state", error))?;
        Ok(Self { shared, refused, mechanism: Mechanism::Plain })
    }

    fn try_level(level: Level, options: &AccelOptions) -> io::Result<(SharedMemory, Mechanism)> {
        Ok(match level {
            Level::SkLookup => {
                let shared = SharedMemory::in_map(options)?;
                let lookup = lookup::Lookup::attach(shared.as_fd())?;
                (shared, Mechanism::Lookup(Box::new(lookup)))
            }
            Level::ClassicBpf => {
                classic::probe(scratch()?.as_fd())?;
                (SharedMemory::in_memory(options)?, Mechanism::Classic)
            }
            Level::Plain => (SharedMemory::in_memory(options)?, Mechanism::Plain),
        })
    }

    pub(crate) fn level(&self) -> Level {
        match self.mechanism {
            Mechanism::Lookup(_) => Level::SkLookup,
            Mechanism::Classic => Level::ClassicBpf,
            Mechanism::Plain => Level::Plain,
        }
    }

    /// True where queues are members of a group on the listener's own address.
    pub(crate) fn has_siblings(&self) -> bool {
        matches!(self.mechanism, Mechanism::Classic)
    }

    /// Names of sk_lookup programs of others in this network namespace.
    pub(crate) fn others(&self) -> Vec<String> {
        match &self.mechanism {
            Mechanism::Lookup(lookup) => lookup.others(),
            _ => Vec::new(),
        }
    }

    /// Puts a new queue (or the worker's own listener of a program with a reuseport group) within reach.
    pub(crate) fn add(&mut self, listener: usize, worker: usize, queue: BorrowedFd<'_>) -> io::Result<()> {
        match &mut self.mechanism {
            Mechanism::Lookup(lookup) => lookup.add(listener, worker, queue),
            // Before anything else is known about the queue, nobody is sent there.
            Mechanism::Classic => classic::attach(queue, &[]),
            Mechanism::Plain => Ok(()),
        }
    }

    /// Names the program's own socket that a worker serves: nothing is steered to the worker's queue once that socket
    /// listens no more. Without a call, nothing is steered there at all.
    pub(crate) fn set_owner(&mut self, listener: usize, worker: usize, own: BorrowedFd<'_>) -> io::Result<()> {
        match &mut self.mechanism {
            Mechanism::Lookup(lookup) => lookup.set_owner(listener, worker, own),
            _ => Ok(()),
        }
    }

    /// The queue is about to be closed, or is no longer this worker's.
    pub(crate) fn remove(&mut self, listener: usize, worker: usize) {
        if let Mechanism::Lookup(lookup) = &mut self.mechanism {
            lookup.remove(listener, worker);
        }
    }

    /// Says which requests are for whom: what `rules` say, and that the sockets of `others` keep theirs. Only the first
    /// level needs to be told. `listeners` hear which of the others are on their port. An error is told in words.
    pub(crate) fn set_rules<'a>(
        &mut self,
        mut rules: Rules,
        listeners: impl Iterator<Item = Claim<'a>>,
        others: &[Listening],
    ) -> Result<(), String> {
        for claim in listeners {
            claim.excluded.clear();
            let port = claim.address.socket.port();
            for socket in others.iter().filter(|socket| socket.port == port) {
                let text = SocketAddr::new(socket.address, port);
                let key = Key { address: socket.address, port, ifindex: 0 };
                if claim.address.keys().iter().any(|own| own.address == key.address) {
                    // At the very same address: another member of a reuseport group, or one bound to a device. Which of
                    // them would get a request is the kernel's to say.
                    rules.extend(claim.address.keys().into_iter().map(|key| (key, Action::Leave)));
                    claim.excluded.push(format!("{text} (the same address: not steered while it is there)"));
                } else {
                    claim.excluded.push(text.to_string());
                    rules.entry(key).or_insert(Action::Leave);
                }
            }
        }
        let set = match &mut self.mechanism {
            Mechanism::Lookup(lookup) => lookup.set_rules(&rules),
            _ => Ok(()),
        };
        set.map_err(|error| format!("telling the steering program its addresses: {error}"))
    }

    /// Tells the mechanism that cannot read the state who serves what. `first`: the first queue of the listener.
    pub(crate) fn tell(&self, first: BorrowedFd<'_>, choices: &[Choice<'_>]) -> io::Result<()> {
        match &self.mechanism {
            Mechanism::Classic => classic::attach(first, choices),
            _ => Ok(()),
        }
    }

    /// True where the mechanism must be told who is ready.
    pub(crate) fn is_blind(&self) -> bool {
        matches!(self.mechanism, Mechanism::Classic)
    }
}

/// A socket to try options on.
fn scratch() -> io::Result<OwnedFd> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, Some(ipproto::TCP))?;
    rustix::net::sockopt::set_socket_reuseport(&socket, true)?;
    Ok(socket)
}

/// `SO_REUSEPORT` of the program's own listener: allowed after `listen()`, and then siblings can bind.
pub(crate) fn open_group(own: BorrowedFd<'_>) -> io::Result<()> {
    sys::set_option(own, libc::SOL_SOCKET, libc::SO_REUSEPORT, &1i32.to_ne_bytes())
}
