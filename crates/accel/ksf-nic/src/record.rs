//! The record of what was changed, which rollback needs: written before the first change, and durable.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::error::NicError;
use crate::interface::Identity;
use crate::plan::Intent;
use crate::setting::Setting;

/// Version of the record's form.
const FORMAT: &str = "ksf-nic-record/1";

/// Where records are by default: in memory, as the settings are.
pub const FOLDER: &str = "/run/ksf/nic";

/// What was changed on an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of this form.
    format: String,
    /// The interface.
    pub iface: String,
    /// Who it was.
    pub identity: Option<Identity>,
    /// What tells this boot, and this network namespace, from others.
    pub place: RecordOrigin,
    /// What the settings are for.
    pub intent: Intent,
    /// How far it came.
    pub phase: Phase,
    /// The settings, in the order in which they were applied.
    pub settings: Vec<SavedSetting>,
}

/// Where settings live: they end with the boot, and with the network namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordOrigin {
    /// /proc/sys/kernel/random/boot_id.
    pub boot: String,
    /// The network namespace, as in /proc/PID/ns/net.
    pub namespace: String,
}

/// How far work on an interface came. All but `Applied` mean that it was interrupted, if nobody works on it now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The number of queues is being changed; other new values are not known yet.
    Resizing,
    /// New values are being written.
    Applying,
    /// All is written.
    Applied,
    /// The number of queues is being changed back; these are the settings to restore then, whatever they are by now.
    Restoring(Vec<Setting>),
}

/// One setting of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSetting {
    /// The setting.
    #[serde(flatten)]
    pub key: Setting,
    /// What it was, exactly as read.
    pub old: String,
    /// What it was set to; `None` if it is only recorded because a change of queues may reset it.
    pub new: Option<String>,
    /// What an earlier apply had set it to, as long as `new` may not have been written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier: Option<String>,
}

impl SavedSetting {
    /// An entry before the first change.
    pub fn new(key: Setting, old: impl Into<String>, new: Option<&str>) -> Self {
        Self { key, old: old.into(), new: new.map(str::to_owned), earlier: None }
    }

    /// Whether a value is one that was set by ksf.
    pub(crate) fn is_ours(&self, value: &str) -> bool {
        [&self.new, &self.earlier].into_iter().flatten().any(|ours| self.key.same(value, ours))
    }
}

impl Record {
    /// A record before anything was changed.
    pub fn new(iface: &str, identity: Option<Identity>, place: RecordOrigin, intent: Intent) -> Self {
        Self {
            format: FORMAT.to_owned(),
            iface: iface.to_owned(),
            identity,
            place,
            intent,
            phase: Phase::Applying,
            settings: Vec::new(),
        }
    }

    /// The entry of a setting.
    pub fn entry(&self, key: &Setting) -> Option<&SavedSetting> {
        self.settings.iter().find(|entry| entry.key == *key)
    }
}

/// Where records are kept. Names are those of interfaces with their network namespace.
pub trait RecordStore {
    /// What keeps others from working on the records.
    type Guard;
    /// Takes the records for this process.
    fn lock(&mut self) -> Result<Self::Guard, NicError>;
    /// The record of an interface.
    fn load(&self, name: &str) -> Result<Option<Record>, NicError>;
    /// Replaces the record, whole or not at all, and durably.
    fn save(&mut self, name: &str, record: &Record) -> Result<(), NicError>;
    /// Removes the record.
    fn remove(&mut self, name: &str) -> Result<(), NicError>;
    /// The names of all records.
    fn names(&self) -> Result<Vec<String>, NicError>;
}

/// Records as files in a folder.
#[derive(Debug, Clone)]
pub struct RecordFolder {
    path: PathBuf,
}

/// Holds the folder until it is dropped. Removes it then if nothing is in it.
#[derive(Debug)]
pub struct FolderGuard {
    path: PathBuf,
    _lock: OwnedFd,
}

impl Drop for FolderGuard {
    fn drop(&mut self) {
        // Fails where there are records, or other files of ksf in the folder above; that is no error.
        if fs::remove_dir(&self.path).is_ok()
            && let Some(above) = self.path.parent().filter(|above| above.ends_with("ksf"))
        {
            let _ = fs::remove_dir(above);
        }
    }
}

impl RecordFolder {
    /// Records in a folder, which is made when the first is written.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.json"))
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

fn record_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> NicError {
    move |error| NicError::Record { what, path: path.to_owned(), error }
}

impl RecordStore for RecordFolder {
    type Guard = FolderGuard;

    fn lock(&mut self) -> Result<FolderGuard, NicError> {
        let fail = record_error("write", &self.path);
        let attempt = || -> io::Result<Option<OwnedFd>> {
            loop {
                fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.path)?;
                let folder = match File::open(&self.path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    folder => folder?,
                };
                match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
                    Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                    result => result?,
                }
                // Whoever held it may have removed the folder since it was opened.
                let there = fs::metadata(&self.path).map(|there| (there.dev(), there.ino())).ok();
                let held = folder.metadata()?;
                if there == Some((held.dev(), held.ino())) {
                    return Ok(Some(folder.into()));
                }
            }
        };
        match attempt().map_err(fail)? {
            Some(lock) => Ok(FolderGuard { path: self.path.clone(), _lock: lock }),
            None => Err(NicError::Busy { path: self.path.clone() }),
        }
    }

    fn load(&self, name: &str) -> Result<Option<Record>, NicError> {
        let path = self.file(name);
        let file = match File::open(&path) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            file => file.map_err(record_error("read", &path))?,
        };
        let bad = |why: String| NicError::BadRecord { path: path.clone(), why };
        let meta = file.metadata().map_err(record_error("read", &path))?;
        // Rollback writes what the record says, with the rights of root.
        let me = rustix::process::geteuid().as_raw();
        if (meta.uid() != 0 && meta.uid() != me) || meta.mode() & 0o022 != 0 {
            return Err(bad("others may have written it (owner or mode)".to_owned()));
        }
        let text = io::read_to_string(file).map_err(record_error("read", &path))?;
        let record: Record = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
        if record.format != FORMAT {
            return Err(bad(format!("its form is {}, not {FORMAT}", record.format)));
        }
        Ok(Some(record))
    }

    fn save(&mut self, name: &str, record: &Record) -> Result<(), NicError> {
        let (path, new) = (self.file(name), self.path.join(format!(".{name}.new")));
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec(record)?;
            // What an interrupted save left; nobody else writes, by the lock.
            match fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            self.sync()
        };
        write().map_err(record_error("write", &path))
    }

    fn remove(&mut self, name: &str) -> Result<(), NicError> {
        let path = self.file(name);
        let remove = || -> io::Result<()> {
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                result => result.and_then(|()| self.sync()),
            }
        };
        remove().map_err(record_error("remove", &path))
    }

    fn names(&self) -> Result<Vec<String>, NicError> {
        let entries = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(record_error("read", &self.path))?,
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Ok(names.filter_map(|name| name.strip_suffix(".json").map(str::to_owned)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn record() -> Record {
        let mut record = Record::new("eth0", None, RecordOrigin::default(), Intent::Latency);
        record.settings.push(SavedSetting::new(Setting::Rps { queue: 511 }, "0\n", Some("3")));
        let key = Setting::Irq { number: 38, handler: "virtio2-input.0".into() };
        record.settings.push(SavedSetting::new(key.clone(), "3\n", None));
        record.phase = Phase::Restoring(vec![key]);
        record
    }

    #[test]
    fn a_record_comes_back_and_goes() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = RecordFolder::new(folder.path().join("ksf/nic"));
        assert_eq!(store.load("eth0").unwrap(), None);
        assert!(store.names().unwrap().is_empty());
        let guard = store.lock().unwrap();
        // What a save that was killed leaves is in nobody's way, and no record.
        fs::write(folder.path().join("ksf/nic/.eth0.new"), "half").unwrap();
        assert_eq!(store.load("eth0").unwrap(), None);
        store.save("eth0", &record()).unwrap();
        store.save("eth0", &record()).unwrap();
        assert_eq!(store.load("eth0").unwrap(), Some(record()));
        assert_eq!(store.names().unwrap(), ["eth0"]);
        let meta = fs::metadata(store.file("eth0")).unwrap();
        assert_eq!(meta.mode() & 0o777, 0o644);
        store.remove("eth0").unwrap();
        store.remove("eth0").unwrap();
        assert_eq!(store.load("eth0").unwrap(), None);
        drop(guard);
        assert!(!folder.path().join("ksf").exists(), "an empty folder is left behind");
    }

    #[test]
    fn one_process_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = RecordFolder::new(folder.path());
        let guard = store.lock().unwrap();
        assert!(matches!(store.clone().lock(), Err(NicError::Busy { .. })));
        drop(guard);
        drop(store.lock().unwrap());
    }

    #[test]
    fn what_others_could_have_written_is_not_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = RecordFolder::new(folder.path());
        let _guard = store.lock().unwrap();
        store.save("eth0", &record()).unwrap();
        fs::set_permissions(store.file("eth0"), fs::Permissions::from_mode(0o666)).unwrap();
        assert!(matches!(store.load("eth0"), Err(NicError::BadRecord { .. })));
        fs::set_permissions(store.file("eth0"), fs::Permissions::from_mode(0o644)).unwrap();
        for text in ["", "{}", "not json", r#"{"format":"ksf-nic-record/9"}"#] {
            fs::write(store.file("eth0"), text).unwrap();
            assert!(matches!(store.load("eth0"), Err(NicError::BadRecord { .. })), "{text}");
        }
        let later = serde_json::to_string(&record()).unwrap().replace(FORMAT, "ksf-nic-record/9");
        fs::write(store.file("eth0"), later).unwrap();
        assert!(store.load("eth0").unwrap_err().to_string().contains("ksf-nic-record/9"));
    }
}
