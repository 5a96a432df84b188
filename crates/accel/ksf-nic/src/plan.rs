//! From facts and an intention to settings. Pure: no file is read, nothing is changed. docs/nic.md has the source of
//! each choice.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::error::NicError;
use crate::interface::Channels;
use crate::inventory::{Inventory, Lack};
use crate::setting::{Group, Setting, channels_text, switch_text};
use crate::steering::ReceiveSteering;
use ksf::cpus::CpuSet;

/// Entries of the machine's flow table: what the kernel's Documentation/networking/scaling.rst suggests for a server
/// of moderate load. It is a bound on connections with a known CPU, four bytes each.
pub const SOCK_FLOWS: u64 = 32_768;
/// Delay of receive interrupts where a driver cannot adapt it: at most 20,000 interrupts per second and queue.
pub const RX_USECS: u64 = 50;
/// For throughput: how often NAPI may find nothing before interrupts are enabled again, and how long it waits each
/// time, in nanoseconds; the values of the kernel commit that brought them (6f8b12d661d0, Linux 5.8).
pub const DEFER_IRQS: u64 = 10;
/// See [`DEFER_IRQS`].
pub const GRO_FLUSH_NS: u64 = 20_000;

/// What the settings are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Intent {
    /// Interrupts at once, at the price of more of them.
    Latency,
    /// Fewer interrupts, at the price of some microseconds.
    Throughput,
}

/// What the user wants.
#[derive(Debug, Clone)]
pub struct Wish {
    /// What for.
    pub intent: Intent,
    /// CPUs to serve the interface; `None` for all the process may use.
    pub cpus: Option<CpuSet>,
    /// Settings to leave alone.
    pub skip: BTreeSet<Group>,
    /// Whether NAPI is to run in kernel threads; `None` leaves it as it is.
    pub threaded: Option<bool>,
}

impl Wish {
    /// Everything the machine can do, for an intention.
    pub fn new(intent: Intent) -> Self {
        Self { intent, cpus: None, skip: BTreeSet::new(), threaded: None }
    }
}

/// What would be changed on an interface, and what not, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TuningPlan {
    /// The interface.
    pub iface: String,
    /// Its driver, or the kind of a virtual interface.
    pub driver: String,
    /// What the settings are for.
    pub intent: Intent,
    /// CPUs that take part, as a list.
    pub cpus: String,
    /// Those of them on the NUMA node of the device, which get its interrupts; all where there is no node.
    pub near_cpus: String,
    /// The node.
    pub node: Option<u32>,
    /// Every setting, in the order in which it is applied.
    pub items: Vec<Item>,
    /// What belongs to no single setting.
    pub notes: Vec<String>,
    /// True if packets of a connection follow the CPU that reads it, when the plan is applied.
    pub steering: ReceiveSteering,
}

/// One setting in a plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Item {
    /// The setting.
    #[serde(flatten)]
    pub key: Setting,
    /// Its value now, as the kernel writes it.
    pub now: Option<String>,
    /// The value it is to have; `None` where it is left alone.
    pub wanted: Option<String>,
    /// What is to be done.
    pub action: PlannedAction,
    /// Why.
    pub why: String,
}

/// What a plan does with a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PlannedAction {
    /// It is changed.
    Change,
    /// It has the wanted value already.
    Holds,
    /// The driver or the kernel does not have it.
    NotSupported,
    /// It is left as it is.
    LeftAlone,
}

impl TuningPlan {
    /// Plans; see the module's head.
    ///
    /// # Errors
    ///
    /// [`NicError::Cpus`] if a CPU was asked for that is offline or outside the mask of this process.
    pub fn make(facts: &Inventory, wish: &Wish) -> Result<Self, NicError> {
        let usable = facts.online.and(&facts.allowed);
        let cpus = wish.cpus.clone().unwrap_or_else(|| usable.clone());
        let outside = cpus.without(&usable);
        if !outside.is_empty() || cpus.is_empty() {
            return Err(NicError::Cpus { cpus: outside, usable });
        }
        let near = cpus.and(&facts.near);
        let near = if near.is_empty() { cpus.clone() } else { near };
        let mut planner = Planner {
            facts,
            wish,
            order: near.iter().chain(cpus.without(&near).iter()).collect(),
            near,
            rx: facts.rx.len() as u32,
            tx: facts.tx.len() as u32,
            items: Vec::new(),
            notes: Vec::new(),
        };
        planner.queues();
        planner.coalescing();
        planner.arfs();
        planner.interrupts();
        planner.rps();
        planner.rfs();
        planner.xps();
        planner.napi();
        let Planner { near, mut items, notes, .. } = planner;
        items.sort_by(|one, other| one.key.cmp(&other.key));
        let steering = ReceiveSteering::planned(facts, &items, cpus.len());
        Ok(Self {
            iface: facts.iface.clone(),
            driver: facts.driver.clone(),
            intent: wish.intent,
            cpus: cpus.to_string(),
            near_cpus: near.to_string(),
            node: facts.node,
            items,
            notes,
            steering,
        })
    }

    /// The settings that are to be changed.
    pub fn changes(&self) -> impl Iterator<Item = &Item> {
        self.items.iter().filter(|item| item.action == PlannedAction::Change)
    }
}

/// Takes one topic after the other.
struct Planner<'a> {
    facts: &'a Inventory,
    wish: &'a Wish,
    near: CpuSet,
    /// All CPUs that take part, near ones first: queue q belongs to the CPU at place q.
    order: Vec<usize>,
    /// Numbers of queues when the plan is applied.
    rx: u32,
    tx: u32,
    items: Vec<Item>,
    notes: Vec<String>,
}

impl Planner<'_> {
    /// A pair of queues for each near CPU, as far as the device has them. Never fewer than there are: the settings of
    /// a removed queue, and the hash table of the device, would be lost.
    fn queues(&mut self) {
        let wanted_for = |now: u32, max: u32| now.max(max.min(self.near.len() as u32));
        let Ok(now) = self.facts.channels else { return self.put(Setting::Channels, None, "") };
        let mut wanted = now;
        if now.combined_max > 0 {
            wanted.combined = wanted_for(now.combined, now.combined_max);
        } else {
            wanted.rx = wanted_for(now.rx, now.rx_max);
            wanted.tx = wanted_for(now.tx, now.tx_max);
        }
        let more = wanted != now;
        let cpus = counted(self.near.len() as u32, "CPU");
        let why = format!("a pair of queues for each of {cpus}, at most {}", maximum(now));
        self.put(Setting::Channels, Some(channels_text(wanted)), &why);
        if more && !self.wish.skip.contains(&Group::Queues) {
            self.rx += wanted.combined - now.combined + (wanted.rx - now.rx);
            self.tx += wanted.combined - now.combined + (wanted.tx - now.tx);
            self.notes.push(
                "changing the number of queues may take the link down for a moment; settings of new queues, and of \
                 interrupts that get new numbers, are planned again when they are there"
                    .to_owned(),
            );
        }
    }

    fn coalescing(&mut self) {
        let all = self.facts.coalescing.clone().unwrap_or_default();
        match self.wish.intent {
            Intent::Latency => {
                self.put(Setting::AdaptiveRx, Some(switch_text(false)), "adapting delays interrupts under load");
                self.put(Setting::RxUsecs, Some("0".to_owned()), "an interrupt at once");
            }
            Intent::Throughput => {
                self.put(Setting::AdaptiveRx, Some(switch_text(true)), "the driver adapts the delay to the traffic");
                if all.adaptive_rx.is_some() {
                    self.leave(Setting::RxUsecs, "adaptive-rx chooses it");
                } else {
                    let usecs = u64::from(all.rx_usecs.unwrap_or(0)).max(RX_USECS);
                    self.put(
                        Setting::RxUsecs,
                        Some(usecs.to_string()),
                        "at most 20,000 interrupts per second and queue",
                    );
                }
            }
        }
    }

    fn arfs(&mut self) {
        let key = Setting::Ntuple;
        match self.facts.ntuple {
            Ok(ntuple) if !ntuple.on && !ntuple.changeable => {
                self.items.push(Item {
                    key,
                    now: Some(switch_text(false)),
                    wanted: None,
                    action: PlannedAction::NotSupported,
                    why: format!("fixed off by {}", self.facts.driver),
                });
            }
            Ok(_) if self.rx < 2 => self.leave(key, "one receive queue: there is nothing to choose for the hardware"),
            Ok(_) if self.facts.value(&Setting::SockFlows).is_err() => {
                self.leave(key, "without a flow table (rps_sock_flow_entries) the hardware has nothing to follow");
            }
            _ => self.put(key, Some(switch_text(true)), "the hardware sends a connection's packets to its CPU's queue"),
        }
    }

    fn interrupts(&mut self) {
        if self.facts.interrupts.is_empty() {
            let why = format!("interrupt affinity: {} has no interrupts that name a queue", self.facts.driver);
            return self.notes.push(why);
        }
        let mut conflict = false;
        for interrupt in &self.facts.interrupts {
            let balancer = self.facts.irqbalance.as_ref().filter(|running| !running.leaves_alone(interrupt.number));
            if let Some(running) = balancer {
                conflict = true;
                let why = format!("irqbalance (pid {}) would undo it", running.pid);
                self.leave(interrupt.key(), &why);
                continue;
            }
            let cpu = self.near.iter().nth(interrupt.queue as usize % self.near.len()).unwrap_or_default();
            let mask = CpuSet::from_iter([cpu]).mask();
            self.put(interrupt.key(), Some(mask), &format!("queue {} belongs to CPU {cpu}", interrupt.queue));
        }
        if conflict {
            let bans: Vec<String> =
                self.facts.interrupts.iter().map(|interrupt| format!("--banirq={}", interrupt.number)).collect();
            self.notes.push(format!(
                "irqbalance moves interrupts every few seconds: have it leave these alone with {}, restart it, and plan \
                 again",
                bans.join(" ")
            ));
        }
    }

    fn rps(&mut self) {
        let spread = (self.rx as usize) < self.near.len();
        let (mask, why) = if spread {
            let queues = counted(self.rx, "receive queue");
            let why = format!("{queues} for {} CPUs: packets are spread by hash", self.near.len());
            (self.near.mask(), why)
        } else {
            ("0".to_owned(), "the queues spread over all CPUs already".to_owned())
        };
        for &queue in &self.facts.rx {
            self.put(Setting::Rps { queue }, Some(mask.clone()), &why);
        }
    }

    fn rfs(&mut self) {
        if self.order.len() < 2 {
            return self.notes.push("receive flow steering: there is one CPU, and nothing to choose".to_owned());
        }
        if self.facts.value(&Setting::SockFlows) == Err(Lack::NotSupported) {
            self.items.push(Item {
                key: Setting::SockFlows,
                now: None,
                wanted: None,
                action: PlannedAction::NotSupported,
                why: "not in this network namespace: only the initial one has it".to_owned(),
            });
            for &queue in &self.facts.rx {
                self.leave(Setting::RpsFlows { queue }, "of no use without rps_sock_flow_entries");
            }
            return;
        }
        let entries = self.facts.number(&Setting::SockFlows).unwrap_or(0).max(SOCK_FLOWS);
        self.put(
            Setting::SockFlows,
            Some(entries.to_string()),
            "connections with a known CPU; all interfaces share it",
        );
        let share = power_of_two_up_to(entries / u64::from(self.rx.max(1)));
        for &queue in &self.facts.rx {
            let key = Setting::RpsFlows { queue };
            let flows = self.facts.number(&key).unwrap_or(0).max(share);
            self.put(
                key,
                Some(flows.to_string()),
                &format!("its share of {entries}, of {}", counted(self.rx, "queue")),
            );
        }
    }

    fn xps(&mut self) {
        let by_queues = self.facts.tx.iter().any(|&queue| {
            let mask = self.facts.value(&Setting::XpsRxqs { queue }).ok().map(CpuSet::from_mask);
            mask.is_some_and(|mask| mask.is_ok_and(|queues| !queues.is_empty()))
        });
        for &queue in &self.facts.tx {
            let key = Setting::Xps { queue };
            if self.tx < 2 {
                self.leave(key, "one transmit queue: there is nothing to choose");
            } else if self.order.len() < 2 {
                self.leave(key, "one CPU: there is nothing to choose");
            } else if by_queues {
                self.leave(key, "xps_rxqs is set, and wins over xps_cpus");
            } else {
                self.put(key, Some(self.senders(queue).mask()), "each CPU sends by the queue whose interrupt it gets");
            }
        }
    }

    /// The CPUs that send by a queue. Each CPU has a queue, and each queue a CPU.
    fn senders(&self, queue: u32) -> CpuSet {
        let (queue, queues) = (queue as usize, self.tx as usize);
        if queue >= self.order.len() {
            // More queues than CPUs: several belong to one, as their interrupts do.
            return CpuSet::from_iter(self.near.iter().nth(queue % self.near.len()));
        }
        self.order.iter().copied().skip(queue).step_by(queues).collect()
    }

    fn napi(&mut self) {
        let (defer, flush, why) = match self.wish.intent {
            Intent::Latency => (0, 0, "no packet waits for a timer"),
            Intent::Throughput => (DEFER_IRQS, GRO_FLUSH_NS, "poll on by a timer before interrupts are enabled again"),
        };
        self.put(Setting::DeferIrqs, Some(defer.to_string()), why);
        self.put(Setting::GroFlush, Some(flush.to_string()), why);
        match self.wish.threaded {
            None => {
                self.leave(Setting::Threaded, "softirq on the interrupt's CPU wakes nobody; --threaded-napi on or off")
            }
            Some(on) => self.put(Setting::Threaded, Some(u8::from(on).to_string()), "as asked for"),
        }
    }

    fn leave(&mut self, key: Setting, why: &str) {
        let now = self.facts.value(&key);
        let (now, action, why) = match now {
            Ok(now) => (Some(now.trim().to_owned()), PlannedAction::LeftAlone, why.to_owned()),
            Err(Lack::NotSupported) if matches!(key, Setting::Xps { .. }) => {
                (None, PlannedAction::LeftAlone, why.to_owned())
            }
            Err(lack) => (None, PlannedAction::NotSupported, self.lacking(&lack)),
        };
        self.items.push(Item { key, now, wanted: None, action, why });
    }

    fn put(&mut self, key: Setting, wanted: Option<String>, why: &str) {
        if self.wish.skip.contains(&key.group()) {
            return self.leave(key, "--skip");
        }
        let item = match (self.facts.value(&key), wanted) {
            (Ok(now), Some(wanted)) => {
                let action = if key.same(now, &wanted) { PlannedAction::Holds } else { PlannedAction::Change };
                Item { now: Some(now.trim().to_owned()), wanted: Some(wanted), action, why: why.to_owned(), key }
            }
            (now, _) => {
                let why = self.lacking(&now.err().unwrap_or(Lack::NotSupported));
                Item { key, now: None, wanted: None, action: PlannedAction::NotSupported, why }
            }
        };
        self.items.push(item);
    }

    fn lacking(&self, lack: &Lack) -> String {
        match lack {
            Lack::NotSupported => format!("not supported by {}", self.facts.driver),
            Lack::Unreadable(error) => format!("cannot be read: {error}"),
        }
    }
}

fn counted(number: u32, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

fn maximum(channels: Channels) -> String {
    match channels {
        Channels { combined_max: 1.., .. } => channels.combined_max.to_string(),
        _ => format!("{} rx and {} tx", channels.rx_max, channels.tx_max),
    }
}

/// The kernel rounds up to a power of two; rounding down here keeps the sum within the table.
fn power_of_two_up_to(number: u64) -> u64 {
    number.checked_ilog2().map_or(1, |log| 1u64 << log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_powers_of_two() {
        for (number, power) in [(0, 1), (1, 1), (2, 2), (3, 2), (10_922, 8192), (32_768, 32_768)] {
            assert_eq!(power_of_two_up_to(number), power);
        }
    }

    #[test]
    fn the_fields_of_a_setting_do_not_hide_those_of_its_item() {
        let key = Setting::Irq { number: 38, handler: "virtio2-input.0".into() };
        let item = Item { key, now: None, wanted: None, action: PlannedAction::Change, why: String::new() };
        let text = serde_json::to_string(&item).unwrap();
        for field in ["setting", "number", "handler", "action"] {
            assert_eq!(text.matches(&format!("\"{field}\":")).count(), 1, "{text}");
        }
    }
}
