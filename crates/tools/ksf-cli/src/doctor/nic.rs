//! Whether packets follow their readers, on the interfaces that are up. The crate `ksf-nic` looks; it changes nothing.

use ksf_nic::{Inventory, Netlink, ReceiveSteering, Tree, interfaces};

use super::machine::Machine;
use super::verdict::{Probe, Verdict};

/// The probe.
pub(crate) const PROBES: &[Probe] = &[Probe {
    name: "nic_rfs",
    title: "packets are handed to the CPU that reads their connection (RFS; was: Receive-CPU-Select)",
    fallback: "they are worked on where the device's queue is served, and read elsewhere",
    run: look,
}];

fn look(_: &Machine) -> Verdict {
    let files = Tree::new("/");
    let (names, netlink) = match (interfaces(&files), Netlink::open()) {
        (Ok(names), Ok(netlink)) => (names, netlink),
        (Err(error), _) => return Verdict::unknown(format!("the interfaces cannot be listed: {error}")),
        (_, Err(error)) => return Verdict::unknown(format!("the kernel cannot be asked about interfaces: {error}")),
    };
    let judged = names.into_iter().map(|name| {
        let facts = Inventory::look(&files, &netlink, &name);
        (name, facts.map(|facts| ReceiveSteering::present(&facts)).map_err(|error| error.to_string()))
    });
    verdict(judged.collect())
}

/// One verdict for all interfaces: it fails if it does on one of them.
fn verdict(interfaces: Vec<(String, Result<ReceiveSteering, String>)>) -> Verdict {
    if interfaces.is_empty() {
        return Verdict::unknown("no interface but loopback is up");
    }
    let mut without = Vec::new();
    let mut could_not_tell = false;
    let mut lines = Vec::new();
    for (name, follows) in interfaces {
        match follows {
            Ok(follows) => {
                lines.push(format!("{name}: {}", follows.why));
                if !follows.on {
                    without.push(name);
                }
            }
            Err(error) => {
                lines.push(format!("{name}: {error}"));
                could_not_tell = true;
            }
        }
    }
    let detail = lines.join("; ");
    match without.first() {
        Some(first) => Verdict::fails(detail, format!("ksf accel nic plan {first} says what can be switched on")),
        None if could_not_tell => Verdict::unknown(detail),
        None => Verdict::works(detail),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(name: &str, on: bool, why: &str) -> (String, Result<ReceiveSteering, String>) {
        (name.to_owned(), Ok(ReceiveSteering { on, why: why.to_owned() }))
    }

    #[test]
    fn all_interfaces_are_told_and_one_without_it_is_enough_to_fail() {
        let table = || judged("eth0", true, "a table of 32768 flows");
        assert_eq!(verdict(vec![table()]), Verdict::works("eth0: a table of 32768 flows"));
        let Verdict::Fails(lack) = verdict(vec![table(), judged("eth1", false, "one receive queue")]) else {
            panic!("it does not work on eth1");
        };
        assert_eq!(lack.cause, "eth0: a table of 32768 flows; eth1: one receive queue");
        assert!(lack.remedy.contains("plan eth1"), "{}", lack.remedy);
    }

    #[test]
    fn what_cannot_be_looked_at_is_no_failure() {
        assert!(matches!(verdict(Vec::new()), Verdict::Unknown(_)));
        let unseen = ("eth1".to_owned(), Err("another namespace's".to_owned()));
        let both = vec![judged("eth0", true, "yes"), unseen];
        assert_eq!(verdict(both), Verdict::unknown("eth0: yes; eth1: another namespace's"));
    }
}
