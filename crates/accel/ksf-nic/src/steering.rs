//! Receive CPU selection: do the packets of a connection come to the CPU that reads it?
//!
//! In software it is RFS: the CPU that took the interrupt hands the packet to the CPU that last read the connection.
//! In hardware it is aRFS: the device puts it into the queue of that CPU. Both need the flow tables.

use serde::Serialize;

use crate::inventory::Inventory;
use crate::plan::{Item, PlannedAction};
use crate::setting::Setting;

/// Whether packets follow their readers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReceiveSteering {
    /// By RFS.
    pub software: SteeringVerdict,
    /// By aRFS.
    pub hardware: SteeringVerdict,
}

/// Yes or no, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SteeringVerdict {
    /// Whether it is.
    pub on: bool,
    /// What it does, or why it is not.
    pub why: String,
}

impl SteeringVerdict {
    fn yes(why: impl Into<String>) -> Self {
        Self { on: true, why: why.into() }
    }

    fn no(why: impl Into<String>) -> Self {
        Self { on: false, why: why.into() }
    }
}

impl ReceiveSteering {
    /// As it is now.
    pub fn present(facts: &Inventory) -> Self {
        Self::judge(facts, &[], facts.rx.len() as u32, facts.online.and(&facts.allowed).len())
    }

    /// As it will be when a plan's items are applied to `rx` receive queues and `cpus` CPUs.
    pub(crate) fn planned(facts: &Inventory, items: &[Item], rx: u32, cpus: usize) -> Self {
        Self::judge(facts, items, rx, cpus)
    }

    fn judge(facts: &Inventory, items: &[Item], rx: u32, cpus: usize) -> Self {
        let value = |key: &Setting| {
            let planned = items.iter().find(|item| item.key == *key && item.action == PlannedAction::Change);
            let planned = planned.and_then(|item| item.wanted.clone());
            planned.or_else(|| facts.value(key).ok().map(|value| value.trim().to_owned()))
        };
        let number = |key: &Setting| value(key).and_then(|value| value.parse::<u64>().ok());
        let without: Vec<u32> =
            facts.rx.iter().copied().filter(|&queue| number(&Setting::RpsFlows { queue }).unwrap_or(0) == 0).collect();
        let software = if cpus < 2 {
            SteeringVerdict::no("there is one CPU")
        } else {
            match number(&Setting::SockFlows) {
                None => SteeringVerdict::no("rps_sock_flow_entries exists only in the initial network namespace"),
                Some(0) => SteeringVerdict::no("rps_sock_flow_entries is 0"),
                Some(entries) if without.is_empty() => SteeringVerdict::yes(format!("RFS, a table of {entries} flows")),
                Some(_) => {
                    SteeringVerdict::no(format!("rps_flow_cnt is 0 on {} of {} queues", without.len(), facts.rx.len()))
                }
            }
        };
        let ntuple_on = value(&Setting::Ntuple).as_deref() == Some("on");
        let hardware = match &facts.ntuple {
            _ if rx < 2 => SteeringVerdict::no("one receive queue"),
            Err(_) => SteeringVerdict::no(format!("{} has no ntuple filters", facts.driver)),
            Ok(ntuple) if !ntuple.on && !ntuple.changeable => {
                SteeringVerdict::no(format!("{} has no ntuple filters (fixed off)", facts.driver))
            }
            Ok(_) if !ntuple_on => SteeringVerdict::no("ntuple-filters is off"),
            Ok(_) if !software.on => SteeringVerdict::no(format!("no flow tables: {}", software.why)),
            // A driver may have filters and not this use of them; no interface of the kernel tells.
            Ok(_) => SteeringVerdict::yes(format!(
                "aRFS, if {} has it: the device's statistics (ethtool -S) count what it steers",
                facts.driver
            )),
        };
        Self { software, hardware }
    }
}
