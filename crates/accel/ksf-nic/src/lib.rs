//! Which CPU serves a network interface: plan, apply, verify and roll back the settings that decide it.
//!
//! The settings are many and lie in many places: queues, interrupt coalescing and flow filters (ethtool), interrupt
//! affinity (/proc/irq), RPS, RFS, XPS and NAPI (/sys/class/net, /proc/sys). A [`TuningPlan`] is made from facts and an
//! intention, and is shown before anything changes. Old values are recorded durably before the first write, so that
//! [`Tuner::rollback`] restores them exactly: after a whole apply, after half of one, and after a crash between any two
//! writes. What somebody else changed meanwhile is told and left alone.
//!
//! ```text
//! Files (/sys, /proc) ────┐
//!                         ├─► Inventory ─► TuningPlan ─► apply ─► Record ─► verify, rollback
//! InterfaceOps (netlink) ─┘      facts        pure        │         ▲
//!                                                         └─ before any write
//! ```
//!
//! [`SystemFiles`], [`InterfaceOps`] and [`RecordStore`] are the only ways to the machine, so everything runs on a fake one too.
//! docs/nic.md explains each choice. [`netlink`] is of use for other questions to the kernel, too.

#![forbid(unsafe_code)]

mod apply;
mod error;
mod files;
mod interface;
mod inventory;
mod irqs;
pub mod netlink;
mod plan;
mod record;
mod rollback;
mod setting;
mod steering;
mod tuner;

pub use error::NicError;
pub use files::{SystemFiles, Tree};
pub use interface::{Channels, Coalescing, Direction, Identity, InterfaceOps, Netlink, Ntuple, QueueIrq};
pub use inventory::{Inventory, Irqbalance, Lack, check_name, interfaces};
pub use irqs::QueueInterrupt;
pub use ksf::cpus::{CpuSet, CpuSetError};
pub use plan::{DEFER_IRQS, GRO_FLUSH_NS, Intent, Item, PlannedAction, RX_USECS, SOCK_FLOWS, TuningPlan, Wish};
pub use record::{FOLDER, FolderGuard, Phase, Record, RecordFolder, RecordOrigin, RecordStore, SavedSetting};
pub use setting::{Group, Setting};
pub use steering::ReceiveSteering;
pub use tuner::{Finding, NicReport, SettingResult, Tuner};
