//! The kernel's counters of TCP in this network namespace, before and after.

use std::collections::BTreeMap;
use std::fs::read_to_string;

/// The counters that tell of trouble with connections, by the kernel's names (proc_net(5); net/ipv4/proc.c).
const NAMES: &[&str] = &[
    // /proc/net/snmp, Tcp
    "ActiveOpens",
    "PassiveOpens",
    "AttemptFails",
    "EstabResets",
    "RetransSegs",
    "OutRsts",
    // /proc/net/netstat, TcpExt
    "ListenOverflows",
    "ListenDrops",
    "TCPTimeWaitOverflow",
    "TCPReqQFullDrop",
    "TCPReqQFullDoCookies",
    "SyncookiesSent",
    "TCPBacklogDrop",
    "TCPTimeouts",
    "TCPSynRetrans",
    "TCPAbortOnData",
    "TCPAbortOnClose",
    "TCPAbortOnTimeout",
    "TCPMigrateReqSuccess",
    "TCPMigrateReqFailure",
];

/// The counters at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct KernelCounters(BTreeMap<String, u64>);

impl KernelCounters {
    /// Reads them for the namespace of this thread, which need not be that of the process.
    pub(crate) fn now() -> KernelCounters {
        let mut all = BTreeMap::new();
        for (file, protocol) in [("snmp", "Tcp:"), ("netstat", "TcpExt:")] {
            let text = read_to_string(format!("/proc/thread-self/net/{file}")).unwrap_or_default();
            parse(&text, protocol, &mut all);
        }
        KernelCounters(all)
    }

    /// By how much each has risen since; `None` for those that this kernel does not have.
    pub(crate) fn since(&self, before: &KernelCounters) -> BTreeMap<String, Option<u64>> {
        let rise = |name: &str| Some(self.0.get(name)?.saturating_sub(*before.0.get(name)?));
        NAMES.iter().map(|name| (name.to_string(), rise(name))).collect()
    }
}

/// Connections of this thread's namespace that are in TIME_WAIT, IPv6 included.
pub(crate) fn time_wait() -> Option<u64> {
    let text = read_to_string("/proc/thread-self/net/sockstat").ok()?;
    let line = text.lines().find(|line| line.starts_with("TCP:"))?;
    let mut words = line.split_whitespace().skip_while(|word| *word != "tw");
    words.nth(1)?.parse().ok()
}

/// Two lines belong together: the names, and the values in the same order.
fn parse(text: &str, protocol: &str, into: &mut BTreeMap<String, u64>) {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(protocol));
    while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            if let Ok(value) = value.parse() {
                into.insert(name.to_owned(), value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_are_paired() {
        let text = "Ip: A\nIp: 1\nTcp: MaxConn ActiveOpens\nTcp: -1 7\nTcpExt: ListenDrops\nTcpExt: 9\n";
        let mut all = BTreeMap::new();
        parse(text, "Tcp:", &mut all);
        assert_eq!(all.into_iter().collect::<Vec<_>>(), [("ActiveOpens".to_owned(), 7)]);
    }

    #[test]
    fn the_rise_is_reported_and_what_is_missing_is_named() {
        let counters = |n| KernelCounters([("ListenDrops".to_owned(), n)].into());
        let rise = counters(12).since(&counters(5));
        assert_eq!((rise["ListenDrops"], rise["ListenOverflows"]), (Some(7), None));
        assert_eq!(rise.len(), NAMES.len());
    }

    #[test]
    fn a_connection_is_counted() {
        let before = KernelCounters::now();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let rise = KernelCounters::now().since(&before);
        assert!(rise["ActiveOpens"] >= Some(1) && rise["PassiveOpens"] >= Some(1), "{rise:?}");
        assert!(time_wait().is_some());
    }
}
