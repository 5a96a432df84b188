//! A machine to work on: its files, its kernel, and the records of what was changed.

use std::io;

use serde::Serialize;

use crate::error::NicError;
use crate::files::SystemFiles;
use crate::interface::{Identity, InterfaceOps};
use crate::inventory::{Inventory, Lack, lack_of};
use crate::plan::{TuningPlan, Wish};
use crate::record::{Phase, Record, RecordOrigin, RecordStore};
use crate::setting::Setting;
use crate::steering::ReceiveSteering;

/// Works on the interfaces of a machine.
#[derive(Debug)]
pub struct Tuner<F, L, S> {
    pub(crate) files: F,
    pub(crate) ops: L,
    pub(crate) store: S,
}

/// What became of the settings of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NicReport {
    /// The interface.
    pub iface: String,
    /// Its settings.
    pub outcomes: Vec<SettingResult>,
    /// What belongs to no single setting.
    pub notes: Vec<String>,
    /// True if packets of a connection follow the CPU that reads it now. `None`: not known.
    pub steering: Option<ReceiveSteering>,
}

/// What became of a setting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SettingResult {
    /// The setting.
    #[serde(flatten)]
    pub key: Setting,
    /// The value it was to have.
    pub wanted: String,
    /// What became of it.
    pub finding: Finding,
    /// More about it, for people: what was found, or why it was refused. May be empty.
    pub detail: String,
}

/// What became of a setting, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// It was set, and reads back.
    Done,
    /// It has the value, and nothing was written.
    Holds,
    /// It has another value.
    Differs,
    /// The kernel or the driver refused the value.
    Refused,
    /// The queue, interrupt or interface is not there any more.
    Gone,
    /// Somebody else changed it since, and it was left as it is.
    LeftAlone,
    /// Another interface needs it; its rollback will restore it.
    HandedOver,
}

impl Finding {
    /// Whether it is as it should be.
    pub fn is_good(self) -> bool {
        matches!(self, Self::Done | Self::Holds | Self::HandedOver)
    }
}

impl NicReport {
    /// How many settings have a finding.
    pub fn count(&self, finding: Finding) -> usize {
        self.outcomes.iter().filter(|outcome| outcome.finding == finding).count()
    }
}

impl<F: SystemFiles, L: InterfaceOps, S: RecordStore> Tuner<F, L, S> {
    /// Works on a machine.
    pub fn new(files: F, ops: L, store: S) -> Self {
        Self { files, ops, store }
    }

    /// Looks at an interface. Changes nothing, and needs no rights.
    pub fn look(&self, iface: &str) -> Result<Inventory, NicError> {
        Inventory::look(&self.files, &self.ops, iface)
    }

    /// Plans. Changes nothing, and needs no rights.
    pub fn plan(&self, iface: &str, wish: &Wish) -> Result<TuningPlan, NicError> {
        TuningPlan::make(&self.look(iface)?, wish)
    }

    /// Reads every setting that was applied, and tells which hold. Changes nothing, and needs no rights.
    ///
    /// # Errors
    ///
    /// [`NicError::NothingApplied`], [`NicError::Interrupted`], [`NicError::OtherInterface`].
    pub fn verify(&self, iface: &str) -> Result<NicReport, NicError> {
        let record = self.record(iface)?.ok_or_else(|| NicError::NothingApplied { iface: iface.to_owned() })?;
        check_whole(&record)?;
        let facts = self.look(iface)?;
        check_same_interface(&record, facts.identity.as_ref())?;
        let mut outcomes = Vec::new();
        for entry in &record.settings {
            let Some(wanted) = &entry.new else { continue };
            let (finding, detail) = match entry.key.read(&self.files, &self.ops, iface) {
                Ok(found) if entry.key.same(&found, wanted) => (Finding::Holds, String::new()),
                Ok(found) => (Finding::Differs, format!("is {}", entry.key.shown(&found))),
                Err(error) if lack_of(&error) == Lack::NotSupported => (Finding::Gone, String::new()),
                Err(error) => (Finding::Differs, format!("cannot be read: {error}")),
            };
            outcomes.push(SettingResult { key: entry.key.clone(), wanted: wanted.trim().to_owned(), finding, detail });
        }
        let steering = Some(ReceiveSteering::present(&facts));
        Ok(NicReport { iface: iface.to_owned(), outcomes, notes: Vec::new(), steering })
    }

    /// The record of an interface, if it is of this boot.
    pub(crate) fn record(&self, iface: &str) -> Result<Option<Record>, NicError> {
        crate::inventory::check_name(iface)?;
        let record = self.store.load(&self.name(iface))?;
        Ok(record.filter(|record| record.iface == iface && record.place == self.place()))
    }

    /// The name of an interface's record: each network namespace may have an interface of the same name.
    pub(crate) fn name(&self, iface: &str) -> String {
        match self.ops.namespace() {
            namespace if namespace.is_empty() => iface.to_owned(),
            namespace => format!("{iface}.{namespace}"),
        }
    }

    pub(crate) fn place(&self) -> RecordOrigin {
        let boot = self.files.read("proc/sys/kernel/random/boot_id").unwrap_or_default();
        RecordOrigin { boot: boot.trim().to_owned(), namespace: self.ops.namespace() }
    }

    /// Finds out, without changing anything, whether settings may be written.
    pub(crate) fn check_writable<'a>(
        &self,
        iface: &str,
        keys: impl Iterator<Item = &'a Setting>,
    ) -> Result<(), NicError> {
        for path in keys.filter_map(|key| key.path(iface)) {
            match self.files.writable(&path) {
                Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                    return Err(NicError::ReadOnly { path: format!("/{path}") });
                }
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(NicError::NotPermitted { path: format!("/{path}") });
                }
                // Others tell something about one setting, and are told when it is written.
                _ => {}
            }
        }
        Ok(())
    }

    pub(crate) fn read(&self, iface: &str, key: &Setting) -> io::Result<String> {
        key.read(&self.files, &self.ops, iface)
    }

    pub(crate) fn write(&mut self, iface: &str, key: &Setting, value: &str) -> io::Result<()> {
        key.write(&mut self.files, &mut self.ops, iface, value)
    }
}

/// Refuses a record of work that was interrupted.
pub(crate) fn check_whole(record: &Record) -> Result<(), NicError> {
    let what = match record.phase {
        Phase::Applied => return Ok(()),
        Phase::Restoring(_) => "rollback",
        Phase::Resizing | Phase::Applying => "apply",
    };
    Err(NicError::Interrupted { iface: record.iface.clone(), what })
}

/// Refuses the record of an interface that had the same name.
pub(crate) fn check_same_interface(record: &Record, now: Option<&Identity>) -> Result<(), NicError> {
    match (&record.identity, now) {
        // The address may be changed by its owner; the index stays while the interface exists.
        (Some(then), Some(now)) if then.ifindex != now.ifindex => Err(NicError::OtherInterface {
            iface: record.iface.clone(),
            detail: format!("index {}, now {}", then.ifindex, now.ifindex),
        }),
        _ => Ok(()),
    }
}

/// Why a write failed, in words that say more than the error number where its meaning is known.
pub(crate) fn refusal(key: &Setting, driver: &str, error: &io::Error) -> String {
    let is = |errno: rustix::io::Errno| error.raw_os_error() == Some(errno.raw_os_error());
    if is(rustix::io::Errno::OPNOTSUPP) {
        format!("not supported by {driver}")
    } else if is(rustix::io::Errno::IO) && matches!(key, Setting::Irq { .. }) {
        "the kernel manages the affinity of this interrupt itself".to_owned()
    } else {
        error.to_string()
    }
}
