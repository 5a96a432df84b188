//! Which interrupt serves which queue.

use std::collections::BTreeMap;

use crate::files::SystemFiles;
use crate::interface::{Direction, InterfaceOps};
use crate::inventory::with_parents;
use crate::setting::{Setting, irq_handlers};

/// The interrupt of one or more queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueInterrupt {
    /// Its number now.
    pub number: u32,
    /// What the driver named it.
    pub handler: String,
    /// The lowest number of the queues it serves; their interrupts go to the CPU of that number.
    pub queue: u32,
}

impl QueueInterrupt {
    /// The setting of its affinity.
    pub fn key(&self) -> Setting {
        Setting::Irq { number: self.number, handler: self.handler.clone() }
    }
}

/// Finds the interrupts of queues: as the driver tells the kernel (netdev-genl, Linux 6.8), else by their names.
/// Interrupts that are of no queue (configuration, events, management) are left out, and those that cannot be told.
pub(crate) fn queue_interrupts(
    files: &dyn SystemFiles,
    ops: &dyn InterfaceOps,
    iface: &str,
    device: Option<&str>,
) -> Vec<QueueInterrupt> {
    let mut told = BTreeMap::new();
    for told_irq in ops.queue_irqs(iface).unwrap_or_default() {
        let queue = told.entry(told_irq.irq).or_insert(told_irq.queue);
        *queue = told_irq.queue.min(*queue);
    }
    let mut found: Vec<QueueInterrupt> = told
        .into_iter()
        .filter_map(|(number, queue)| {
            let handler = irq_handlers(files, number).into_iter().next()?;
            Some(QueueInterrupt { number, handler, queue })
        })
        .collect();
    if found.is_empty() {
        let others: Vec<String> = files.list("sys/class/net").unwrap_or_default();
        found = device_irqs(files, device)
            .into_iter()
            .flat_map(|number| irq_handlers(files, number).into_iter().map(move |handler| (number, handler)))
            .filter(|(_, handler)| !is_of_another(handler, iface, &others))
            .filter_map(|(number, handler)| {
                let (_, queue) = queue_of(&handler, iface)?;
                Some(QueueInterrupt { number, handler, queue })
            })
            .collect();
        // Where queues have interrupts of their own, the one named like the interface is for its link (e1000e).
        if found.iter().any(|interrupt| interrupt.handler != iface) {
            found.retain(|interrupt| interrupt.handler != iface);
        }
    }
    found.sort_by_key(|found| (found.queue, found.number));
    found
}

/// Interrupts of the device, or of the one it sits on.
fn device_irqs(files: &dyn SystemFiles, device: Option<&str>) -> Vec<u32> {
    let of = |path: &str| -> Option<Vec<u32>> {
        let messages = files.list(&format!("{path}/msi_irqs")).unwrap_or_default();
        let numbers: Vec<u32> = messages.iter().filter_map(|name| name.parse().ok()).collect();
        if !numbers.is_empty() {
            return Some(numbers);
        }
        let line: u32 = files.read(&format!("{path}/irq")).ok()?.trim().parse().ok()?;
        (line != 0).then(|| vec![line])
    };
    device.and_then(|device| with_parents(device).find_map(of)).unwrap_or_default()
}

/// Whether the name is that of another interface on the same device, as `eth1-TxRx-0` for eth0.
fn is_of_another(handler: &str, iface: &str, interfaces: &[String]) -> bool {
    let names = |name: &str| handler.split(['-', '.']).any(|word| word == name);
    !names(iface) && interfaces.iter().any(|name| name != iface && names(name))
}

/// The queue in the name of an interrupt: `eth0-TxRx-3`, `mlx5_comp3@pci:...`, `virtio2-input.0`. Without a direction
/// it serves both.
fn queue_of(handler: &str, iface: &str) -> Option<(Option<Direction>, u32)> {
    // A device with one queue, such as those of r8169 and e1000.
    if handler == iface {
        return Some((None, 0));
    }
    let name = handler.split('@').next().unwrap_or(handler);
    let word = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let queue = name[word.len()..].parse().ok()?;
    if word.trim_end_matches('-') == iface {
        return Some((None, queue));
    }
    let word = word.to_ascii_lowercase();
    let word = word.trim_end_matches(['-', '.', '_', ':']);
    let ends = |endings: &[&str]| endings.iter().any(|ending| word.ends_with(ending));
    if ends(&["txrx", "tx-rx", "rxtx", "rx-tx", "comp", "-fp", "-q"]) {
        Some((None, queue))
    } else if ends(&["input", "rx"]) {
        Some((Some(Direction::Rx), queue))
    } else if ends(&["output", "tx"]) {
        Some((Some(Direction::Tx), queue))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Direction::{Rx, Tx};

    #[test]
    fn names_of_drivers_are_understood() {
        for (handler, queue) in [
            ("eth0", Some((None, 0))),
            ("eth0-TxRx-3", Some((None, 3))),
            ("ice-eth0-TxRx-117", Some((None, 117))),
            ("i40e-eth0-TxRx-0", Some((None, 0))),
            ("eth0-Tx-Rx-7", Some((None, 7))),
            ("eth0-rxtx-2", Some((None, 2))),
            ("eth0-fp-4", Some((None, 4))),
            ("eth0-5", Some((None, 5))),
            ("mlx5_comp12@pci:0000:03:00.0", Some((None, 12))),
            ("virtio2-input.1", Some((Some(Rx), 1))),
            ("virtio2-output.1", Some((Some(Tx), 1))),
            ("eth0-rx-6", Some((Some(Rx), 6))),
            ("eth0-tx-6", Some((Some(Tx), 6))),
            ("virtio2-config", None),
            ("eth0-event-8", None),
            ("mlx5_async0@pci:0000:03:00.0", None),
            ("ena-mgmnt@pci:0000:00:05.0", None),
            ("xhci_hcd", None),
            ("eth0-TxRx-99999999999", None),
        ] {
            assert_eq!(queue_of(handler, "eth0"), queue, "{handler}");
        }
    }

    #[test]
    fn a_sister_on_the_same_device_keeps_its_interrupts() {
        let all = ["eth0".to_owned(), "eth1".to_owned(), "comp".to_owned()];
        assert!(is_of_another("eth1-TxRx-0", "eth0", &all));
        assert!(is_of_another("ice-eth1-TxRx-0", "eth0", &all));
        assert!(!is_of_another("eth0-TxRx-0", "eth0", &all));
        assert!(!is_of_another("mlx5_comp0@pci:0000:03:00.0", "eth0", &all));
    }
}
