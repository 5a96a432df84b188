//! Receive flow steering (RFS): the CPU that took the interrupt hands a packet to the CPU that last read its connection.

use serde::Serialize;

use crate::inventory::Inventory;
use crate::plan::{Item, PlannedAction};
use crate::setting::Setting;

/// Verdict on RFS: packets follow the CPU that reads their connection, or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReceiveSteering {
    /// True if they do.
    pub on: bool,
    /// The table in use, or the reason against.
    pub why: String,
}

impl ReceiveSteering {
    /// The verdict on the present settings.
    pub fn present(facts: &Inventory) -> Self {
        Self::judge(facts, &[], facts.online.and(&facts.allowed).len())
    }

    /// The verdict after a plan's items are applied, for `cpus` CPUs.
    pub(crate) fn planned(facts: &Inventory, items: &[Item], cpus: usize) -> Self {
        Self::judge(facts, items, cpus)
    }

    fn judge(facts: &Inventory, items: &[Item], cpus: usize) -> Self {
        let number = |key: &Setting| -> Option<u64> {
            let planned = items.iter().find(|item| item.key == *key && item.action == PlannedAction::Change);
            match planned.and_then(|item| item.wanted.as_ref()) {
                Some(wanted) => wanted.parse().ok(),
                None => facts.number(key),
            }
        };
        let no = |why: String| Self { on: false, why };
        let without = facts.rx.iter().filter(|&&queue| number(&Setting::RpsFlows { queue }).unwrap_or(0) == 0).count();
        match number(&Setting::SockFlows) {
            _ if cpus < 2 => no("there is one CPU".to_owned()),
            None => no("rps_sock_flow_entries exists only in the initial network namespace".to_owned()),
            Some(0) => no("rps_sock_flow_entries is 0".to_owned()),
            Some(entries) if without == 0 => Self { on: true, why: format!("RFS, a table of {entries} flows") },
            Some(_) => no(format!("rps_flow_cnt is 0 on {without} of {} queues", facts.rx.len())),
        }
    }
}
