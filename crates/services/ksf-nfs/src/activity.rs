//! Counters of each client, for people and for monitoring: nothing depends on them.
//!
//! A client's address identifies it, over connections. Each of its connections references its counters, so a call takes no
//! lock.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ksf::Peer;
use ksf_fs::{Account, WarmShare};

use crate::drc::Origin;
use crate::program::sender_of;

/// Most clients with counters of their own. One more evicts the client without a connection whose last connection began the
/// longest ago, and [`Client::Others`] gets its counts. While all have connections, the new one counts as one of the others.
pub const CLIENTS_MAX: usize = 1024;

/// Origin of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Client {
    /// A machine.
    Address(IpAddr),
    /// Programs on this machine, through a Unix socket.
    Local,
    /// All clients without counters of their own.
    Others,
}

impl Client {
    pub(crate) fn of(ip: Option<IpAddr>) -> Self {
        ip.map_or(Self::Local, Self::Address)
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(ip) => ip.fmt(f),
            Self::Local => f.write_str("local"),
            Self::Others => f.write_str("others"),
        }
    }
}

/// Counts of one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientCounts {
    /// The client.
    pub client: Client,
    /// Its current connections.
    pub connections: u64,
    /// Its mounts in the list of DUMP.
    pub mounts: u64,
    /// Its NFS calls, including refused ones.
    pub calls: u64,
    /// Bytes of data of its READs.
    pub read_bytes: u64,
    /// Bytes of data of its successful WRITEs.
    pub written_bytes: u64,
}

/// Counters of a client, in cache lines of their own: clients do not contend for them.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Cells {
    connections: AtomicU64,
    /// Number of the client's last connection among all connections.
    last: AtomicU64,
    calls: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl Cells {
    pub(crate) fn called(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn has_read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn has_written(&self, bytes: usize) {
        self.written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn counts(&self, client: Client) -> ClientCounts {
        let count = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        ClientCounts {
            client,
            connections: count(&self.connections),
            mounts: 0,
            calls: count(&self.calls),
            read_bytes: count(&self.read_bytes),
            written_bytes: count(&self.written_bytes),
        }
    }
}

/// A connection and its client.
#[derive(Debug)]
pub struct Connection {
    pub(crate) origin: Origin,
    pub(crate) client: Arc<Cells>,
    /// Its turn on the lanes.
    pub(crate) account: Account,
    /// Use of its share of a turn of the shard.
    pub(crate) share: WarmShare,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.client.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The counters of all clients.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    clients: Mutex<HashMap<Client, Arc<Cells>>>,
    others: Arc<Cells>,
    connected: AtomicU64,
}

impl Activity {
    fn lock(&self) -> MutexGuard<'_, HashMap<Client, Arc<Cells>>> {
        // No change of the map takes two dependent steps: a panic leaves it consistent.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a connection of a client, or a datagram socket, whose callers are not counted.
    pub(crate) fn connect(&self, peer: &Peer) -> Connection {
        let client = match peer {
            Peer::Udp(_) => Arc::new(Cells { connections: AtomicU64::new(1), ..Cells::default() }),
            peer => self.cells(Client::of(sender_of(*peer).ip())),
        };
        Connection { origin: Origin::new(), client, account: Account::default(), share: WarmShare::default() }
    }

    /// The counters of a client that connects.
    fn cells(&self, client: Client) -> Arc<Cells> {
        let number = self.connected.fetch_add(1, Ordering::Relaxed);
        let mut clients = self.lock();
        if !clients.contains_key(&client) && clients.len() >= CLIENTS_MAX {
            let idle = clients.iter().filter(|(_, cells)| cells.connections.load(Ordering::Relaxed) == 0);
            let oldest = idle.min_by_key(|(_, cells)| cells.last.load(Ordering::Relaxed)).map(|(client, _)| *client);
            if let Some(gone) = oldest.and_then(|oldest| clients.remove(&oldest)) {
                let ClientCounts { calls, read_bytes, written_bytes, .. } = gone.counts(client);
                self.others.calls.fetch_add(calls, Ordering::Relaxed);
                self.others.read_bytes.fetch_add(read_bytes, Ordering::Relaxed);
                self.others.written_bytes.fetch_add(written_bytes, Ordering::Relaxed);
            }
        }
        let is_full = clients.len() >= CLIENTS_MAX && !clients.contains_key(&client);
        let cells = if is_full { Arc::clone(&self.others) } else { Arc::clone(clients.entry(client).or_default()) };
        // Under the lock: no other call may evict the client meanwhile.
        cells.connections.fetch_add(1, Ordering::Relaxed);
        cells.last.store(number, Ordering::Relaxed);
        cells
    }

    /// Counts so far, the clients with the most calls first. `mounts`: number of mounts of each client.
    pub(crate) fn read(&self, mut mounts: HashMap<Client, u64>) -> Vec<ClientCounts> {
        let mut all: Vec<_> = self.lock().iter().map(|(client, cells)| cells.counts(*client)).collect();
        let others = self.others.counts(Client::Others);
        if others.calls > 0 || others.connections > 0 {
            all.push(others);
        }
        for counts in &mut all {
            counts.mounts = mounts.remove(&counts.client).unwrap_or(0);
        }
        // Clients that mounted by datagrams, or were evicted.
        all.extend(
            mounts.into_iter().map(|(client, mounts)| ClientCounts { mounts, ..Cells::default().counts(client) }),
        );
        all.sort_by_key(|counts| (std::cmp::Reverse(counts.calls), counts.client));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u32) -> Peer {
        Peer::Tcp((std::net::Ipv4Addr::from_bits(number), 700).into())
    }

    fn client(number: u32) -> Client {
        Client::Address(std::net::Ipv4Addr::from_bits(number).into())
    }

    #[test]
    fn connections_of_one_client_are_counted_together_with_its_mounts() {
        let activity = Activity::default();
        let [one, again, other] = [1, 1, 2].map(|number| activity.connect(&peer(number)));
        one.client.called();
        again.client.called();
        again.client.has_read(7);
        other.client.has_written(9);
        drop(again);
        let none = ClientCounts { mounts: 0, ..Cells::default().counts(client(1)) };
        let expected = [
            ClientCounts { connections: 1, mounts: 3, calls: 2, read_bytes: 7, ..none },
            ClientCounts { client: client(2), connections: 1, written_bytes: 9, ..none },
            ClientCounts { client: client(3), mounts: 1, ..none },
        ];
        assert_eq!(activity.read([(client(1), 3), (client(3), 1)].into()), expected);
    }

    #[test]
    fn clients_beyond_the_bound_take_the_place_of_those_that_are_gone_or_are_counted_together() {
        let activity = Activity::default();
        let mut all: Vec<_> = (0..CLIENTS_MAX as u32).map(|number| activity.connect(&peer(number))).collect();
        all[5].client.called();
        // No client has disconnected.
        let crowd: Vec<_> = (0..3).map(|number| activity.connect(&peer(5000 + number))).collect();
        crowd.iter().for_each(|connection| connection.client.called());
        let count =
            |activity: &Activity, client| activity.read(HashMap::new()).into_iter().find(|it| it.client == client);
        let others = count(&activity, Client::Others).unwrap();
        assert_eq!((others.connections, others.calls), (3, 3));
        assert!(count(&activity, client(5000)).is_none());
        // The older of two disconnected clients makes room.
        drop([all.remove(5), all.remove(8)]);
        let new = activity.connect(&peer(6000));
        new.client.called();
        assert_eq!(count(&activity, client(6000)).unwrap().calls, 1);
        assert!(count(&activity, client(5)).is_none() && count(&activity, client(9)).is_some());
        assert_eq!(count(&activity, Client::Others).unwrap().calls, 4, "nothing is lost of the sum");
        assert_eq!(activity.read(HashMap::new()).len(), CLIENTS_MAX + 1);
        // A returning client is known.
        let back = activity.connect(&peer(9));
        assert_eq!(
            (count(&activity, client(9)).unwrap().connections, back.client.calls.load(Ordering::Relaxed)),
            (1, 0)
        );
    }

    #[test]
    fn callers_by_datagrams_are_not_counted() {
        let activity = Activity::default();
        drop(activity.connect(&Peer::Udp((std::net::Ipv4Addr::LOCALHOST, 7).into())));
        assert!(activity.read(HashMap::new()).is_empty());
    }
}
