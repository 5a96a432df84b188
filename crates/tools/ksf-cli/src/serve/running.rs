//! A service that runs, until its end.

use std::io;

use ksf::limits::{Limits, ServerLimits};
use ksf::server::{Drained, ListenerInfo, Server};

use super::descriptors::Lowered;
use super::kernel::Half;
use super::limits::{self, LimitFlags};
use super::listen::ListenEntry;
use super::resources::{self, Resources};
use crate::output::Failure;
use crate::stats::{ClientSnapshot, ServiceSnapshot, Value};

/// What a kind keeps while its service runs. Its start is [`super::kind::ServiceKind::start`], which makes the state.
pub(crate) trait State: Send + 'static {
    /// Counters of the kind's own, beside those that its services count.
    fn counters(&self) -> Vec<Value> {
        Vec::new()
    }

    /// Its clients, if the kind tells them apart.
    fn clients(&self) -> Vec<ClientSnapshot> {
        Vec::new()
    }

    /// What each shard counted for the kind; empty if it does not count by shard.
    fn shard_counters(&self) -> Vec<Vec<(&'static str, u64)>> {
        Vec::new()
    }

    /// The server is about to stop listening: clients must not be sent here any more.
    fn retire(&mut self) {}

    /// The server has ended, and every answer has left or never will: what must not be lost is written now.
    fn stop(self: Box<Self>) -> io::Result<()> {
        Ok(())
    }
}

/// Nothing is kept.
impl State for () {}

/// A listener of a service.
pub(crate) struct Listener {
    /// What asked for it, with the limits that it has of its own.
    pub(super) entry: ListenEntry,
    /// What its ready line says of workers, if it is one of streams.
    pub(super) workers: String,
    /// The limits in force.
    pub(super) limits: Limits,
}

/// A field of the limits.
type Field = fn(&mut Limits) -> &mut usize;

/// Limits that decide how long a message may be.
const SIZES: [(&str, Field); 2] = [
    ("message_bytes_max", |limits| &mut limits.message_bytes_max),
    ("connection_bytes_max", |limits| &mut limits.connection_bytes_max),
];

/// A service that runs. Dropping it stops it at once; [`Running::drain`] stops it gently.
pub(crate) struct Running {
    pub(crate) name: String,
    /// Lines that say which listeners are ready.
    pub(crate) ready: Vec<String>,
    /// Lines that say why something better does not run, of the start or the last reload.
    pub(crate) notes: Vec<String>,
    pub(super) engine: &'static str,
    pub(super) limits: Limits,
    /// What is above the limits that a listener has of its own.
    pub(super) limits_above: LimitFlags,
    /// In the order in which the framework has them.
    pub(super) listeners: Vec<Listener>,
    pub(super) resources: Resources,
    /// What the service itself can take, whatever the limit says.
    pub(super) message_bytes_max: usize,
    /// Connections that it may have by its part of the process's descriptors.
    pub(super) connections_max: usize,
    /// Limits that decide the length of messages stay as they were at the start.
    pub(super) keeps_sizes: bool,
    pub(super) state: Box<dyn State>,
    pub(super) server: Server,
    pub(super) half: Option<Half>,
}

impl Running {
    /// Keeps `state` instead of what was kept: for a state that needs the server to be there.
    pub(crate) fn with_state(mut self, state: impl State) -> Self {
        self.state = Box::new(state);
        self
    }

    /// Has no reload change the [`SIZES`]: for protocols whose clients use for ever what they were told once, also over a new
    /// connection.
    pub(crate) fn keep_sizes(mut self) -> Self {
        self.keeps_sizes = true;
        self
    }

    /// Where it listens.
    pub(crate) fn listeners(&self) -> &[ListenerInfo] {
        self.server.listeners()
    }

    /// Puts limits in force, for connections that are open, too. `listen`: the listeners that the file names now; those
    /// of other addresses keep the limits they have of their own. Returns the names of limits that it does not change. On an error
    /// nothing changes.
    pub(crate) fn reload(&mut self, limits: Limits, listen: &[ListenEntry]) -> Result<Vec<String>, Failure> {
        let now = |listener: &Listener| {
            let named = listen.iter().find(|entry| entry.address == listener.entry.address);
            named.unwrap_or(&listener.entry).clone()
        };
        let entries: Vec<_> = self.listeners.iter().map(now).collect();
        let own = entries.iter().map(|entry| entry.limits.over(&limits, &self.limits_above));
        let own: Vec<Limits> = own.collect::<Result<_, _>>()?;
        let pairs = || own.iter().zip(self.listeners.iter().map(|listener| &listener.limits));
        let differs = |of: Field| pairs().any(|(new, old)| *of(&mut new.clone()) != *of(&mut old.clone()));
        let kept = SIZES.iter().filter(|(_, of)| self.keeps_sizes && differs(*of));
        let kept = kept.map(|(name, _)| (*name).to_owned()).collect();
        let own = pairs().map(|(new, old)| self.bounded(new.clone(), old)).collect::<Vec<_>>();
        let lowered = Lowered::of(&self.name, limits.connections_max, self.connections_max);
        let limits = self.bounded(limits, &self.limits);
        // What is kept may contradict what is new.
        own.iter().chain([&limits]).try_for_each(limits::check)?;
        self.limits = limits;
        self.notes = lowered.iter().map(ToString::to_string).collect();
        self.server.set_limits(&ServerLimits::new(self.limits.clone(), own.clone()));
        for ((listener, entry), limits) in self.listeners.iter_mut().zip(entries).zip(own) {
            (listener.entry, listener.limits) = (entry, limits);
        }
        Ok(kept)
    }

    /// These limits as the service can have them after `old`.
    fn bounded(&self, mut limits: Limits, old: &Limits) -> Limits {
        limits.message_bytes_max = limits.message_bytes_max.min(self.message_bytes_max);
        limits.connections_max = limits.connections_max.min(self.connections_max);
        if self.keeps_sizes {
            let mut old = old.clone();
            SIZES.iter().for_each(|(_, of)| *of(&mut limits) = *of(&mut old));
        }
        limits
    }

    /// Connections open now.
    pub(crate) fn connections(&self) -> usize {
        self.server.connections()
    }

    /// False when a shard has ended by itself.
    pub(crate) fn is_alive(&self) -> bool {
        self.server.is_running()
    }

    /// Stops gently: no new work, then every answer that is owed, then the end. Blocks for up to
    /// `drain_timeout_ms`. Returns the results of the server and of the state.
    pub(crate) fn drain(mut self) -> (io::Result<Drained>, io::Result<()>) {
        self.state.retire();
        // No more datagrams either. Its programs for TCP stay until the connections under them are closed.
        if let Some(half) = &mut self.half {
            half.detach_udp();
        }
        let drained = self.server.drain();
        (drained, self.state.stop())
    }

    /// Each shard with what it counted, of a kind that counts by shard.
    pub(crate) fn shards(&self) -> Vec<ShardCounts> {
        let shards = self.server.shards().zip(self.state.shard_counters());
        shards
            .map(|((cpu, shard), own)| ShardCounts {
                cpu,
                accepted: shard.accepted.value(),
                local: shard.accepted_local.value(),
                turns: shard.turns.value(),
                turns_empty: shard.turns_empty.value(),
                events: shard.events.value(),
                events_range: shard.looks.range(),
                own,
            })
            .collect()
    }

    /// Counters of the service's own, of its kind's, and those of each of its shards.
    fn own(&self) -> Vec<Value> {
        // Listeners of one service stand together, and one of them says it all.
        let mut services = self.server.service_counters();
        services.dedup_by(|one, other| one.0 == other.0);
        let mut own = Vec::new();
        for (at, (service, counters)) in services.into_iter().enumerate() {
            let name = |counter: &str| if at == 0 { counter.to_owned() } else { format!("{service}_{counter}") };
            own.extend(counters.into_iter().map(|(counter, value)| Value::new(&name(counter), "", value)));
        }
        own.extend(self.state.counters());
        for (number, shard) in self.shards().into_iter().enumerate() {
            let accepted = [("accepted", shard.accepted), ("accepted_local", shard.local)];
            own.extend(accepted.into_iter().chain(shard.own).map(|(name, value)| {
                Value::new(&format!("worker{number}_{name}"), &format!("On CPU {}.", shard.cpu), value)
            }));
        }
        own
    }

    /// How the slots of its shards are used now.
    fn slots(&self) -> Vec<Value> {
        let usage = self.server.slots();
        vec![
            Value::new("slots_in_use", "Slots that are received into, or that somebody holds.", usage.long.in_use),
            Value::new("slots_kept", "Slots that were received into and that messages are kept in.", usage.long.kept),
            Value::new("slots_kept_bytes", "Bytes of these slots.", usage.long.kept_bytes()),
            Value::new("short_slots_kept", "Short slots that messages are kept in.", usage.short.kept),
            Value::new("short_slots_kept_bytes", "Bytes of these slots.", usage.short.kept_bytes()),
        ]
    }

    /// What `ksf stat` shows.
    pub(crate) fn snapshot(&self) -> ServiceSnapshot {
        let server = &self.server;
        let limits = [limits::list(&self.limits), resources::list(&self.resources)].concat();
        let kernel = self.half.iter().flat_map(|half| half.service.counters());
        ServiceSnapshot {
            name: self.name.clone(),
            engine: self.engine.to_owned(),
            shards: server.cpus().len(),
            listeners: server.listeners().iter().map(|listener| listener.addr.to_string()).collect(),
            limits: limits.into_iter().map(|(name, value)| Value::new(name, "", value)).collect(),
            slots: self.slots(),
            counters: server.counters().iter().map(|c| Value::new(c.name, c.help, c.value)).collect(),
            kernel: kernel.map(|c| Value::new(c.name, c.help, c.value)).collect(),
            own: self.own(),
            clients: self.state.clients(),
        }
    }
}

/// What one shard counted.
#[derive(Debug, Clone, Default)]
pub(crate) struct ShardCounts {
    pub(crate) cpu: usize,
    pub(crate) accepted: u64,
    pub(crate) local: u64,
    pub(crate) turns: u64,
    pub(crate) turns_empty: u64,
    pub(crate) events: u64,
    pub(crate) events_range: (u64, u64),
    /// What the kind counted there.
    pub(crate) own: Vec<(&'static str, u64)>,
}
