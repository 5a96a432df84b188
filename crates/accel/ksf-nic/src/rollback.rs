//! Restoring what was recorded, and nothing that somebody else has set since.

use crate::error::NicError;
use crate::files::SystemFiles;
use crate::interface::InterfaceOps;
use crate::inventory::{Lack, is_no_device, lack_of};
use crate::record::{Phase, Record, RecordStore, SavedSetting};
use crate::setting::Setting;
use crate::tuner::{Finding, NicReport, SettingResult, Tuner, check_same_interface, refusal};

/// What is to be done with an entry.
enum Decision {
    Restore,
    /// It has its old value.
    IsOld,
    Gone,
    /// Somebody else's value.
    Foreign(String),
    Unreadable(String),
}

impl<F: SystemFiles, L: InterfaceOps, S: RecordStore> Tuner<F, L, S> {
    /// Restores every recorded setting to its old value, exactly. May be called after an interrupted apply or rollback
    /// as well. A setting that somebody else has changed since is left alone, and stays on record, unless `force`.
    ///
    /// If the interface is gone, or `force` is given for another one that has its name now, only what interfaces share
    /// is restored, and the record goes.
    ///
    /// # Errors
    ///
    /// [`NicError::NothingApplied`]; [`NicError::OtherInterface`] unless `force`; [`NicError::ReadOnly`],
    /// [`NicError::NotPermitted`] and [`NicError::Busy`] before anything is changed; [`NicError::Record`].
    pub fn rollback(&mut self, iface: &str, force: bool) -> Result<NicReport, NicError> {
        let nothing = || NicError::NothingApplied { iface: iface.to_owned() };
        // Without a record there is nothing to lock, and no folder to make.
        self.record(iface)?.ok_or_else(nothing)?;
        let _guard = self.store.lock()?;
        let mut record = self.record(iface)?.ok_or_else(nothing)?;
        let mut notes = Vec::new();
        let is_here = match self.ops.identity(iface) {
            Err(error) if is_no_device(&error) => {
                notes.push(format!("{iface} is gone, and its settings with it"));
                false
            }
            identity => match check_same_interface(&record, identity.ok().as_ref()) {
                Err(error) if !force => return Err(error),
                same => same.is_ok(),
            },
        };
        let decisions = self.decide(iface, &record, force, is_here);
        let restore: Vec<Setting> = decisions
            .iter()
            .filter(|(_, decision)| matches!(decision, Decision::Restore))
            .map(|(entry, _)| entry.key.clone())
            .collect();
        self.check_writable(iface, restore.iter())?;
        if restore.contains(&Setting::Channels) && !matches!(record.phase, Phase::Restoring(_)) {
            // From the moment the queues change, values no longer tell whose they are.
            record.phase = Phase::Restoring(restore);
            self.store.save(&self.name(iface), &record)?;
        }
        let driver = match is_here {
            true => self.look(iface).map(|facts| facts.driver).unwrap_or_default(),
            false => String::new(),
        };
        let mut outcomes = Vec::new();
        for (entry, decision) in in_order_of_rollback(decisions) {
            let (finding, detail) = match decision {
                Decision::Restore => self.restore(iface, &entry, &record, &driver)?,
                Decision::IsOld => (Finding::Holds, String::new()),
                Decision::Gone => (Finding::Gone, String::new()),
                Decision::Foreign(found) => {
                    (Finding::LeftAlone, format!("somebody else set {}", entry.key.shown(&found)))
                }
                Decision::Unreadable(error) => (Finding::Refused, format!("cannot be read: {error}")),
            };
            outcomes.push(SettingResult {
                key: entry.key.clone(),
                wanted: entry.old.trim().to_owned(),
                finding,
                detail,
            });
        }
        self.settle(iface, record, &outcomes)?;
        Ok(NicReport { iface: iface.to_owned(), outcomes, notes, steering: None })
    }

    /// Reads every setting before the first is written, and decides.
    fn decide(&self, iface: &str, record: &Record, force: bool, is_here: bool) -> Vec<(SavedSetting, Decision)> {
        let mut decisions: Vec<(SavedSetting, Decision)> = Vec::new();
        for entry in &record.settings {
            let decision = if is_here || entry.key.is_shared() {
                self.decide_one(iface, record, entry, force)
            } else {
                Decision::Gone
            };
            decisions.push((entry.clone(), decision));
        }
        let resizes = decisions
            .iter()
            .any(|(entry, decision)| entry.key == Setting::Channels && matches!(decision, Decision::Restore));
        if resizes && !matches!(record.phase, Phase::Restoring(_)) {
            // The driver may reset settings when it gets its old queues back; and it may have done so when it got more,
            // so that a value that was not set yet when the apply was killed is neither old nor new.
            let was_killed = record.phase != Phase::Applied;
            for (entry, decision) in &mut decisions {
                let is_ours = !matches!(decision, Decision::Foreign(_)) || entry.new.is_none() || was_killed;
                if is_ours && !entry.key.is_shared() {
                    *decision = Decision::Restore;
                }
            }
        }
        decisions
    }

    fn decide_one(&self, iface: &str, record: &Record, entry: &SavedSetting, force: bool) -> Decision {
        if let Phase::Restoring(keys) = &record.phase
            && keys.contains(&entry.key)
        {
            return Decision::Restore;
        }
        let found = match self.read(iface, &entry.key) {
            Ok(found) => found,
            Err(error) if lack_of(&error) == Lack::NotSupported || is_no_device(&error) => return Decision::Gone,
            Err(error) => return Decision::Unreadable(error.to_string()),
        };
        // An apply that was killed did not get to record what the driver made of the value.
        let may_be_rounded = entry.key.is_rounded() && record.phase == Phase::Applying;
        if entry.key.same(&found, &entry.old) {
            Decision::IsOld
        } else if entry.is_ours(&found) || may_be_rounded || force {
            Decision::Restore
        } else {
            Decision::Foreign(found)
        }
    }

    fn restore(
        &mut self,
        iface: &str,
        entry: &SavedSetting,
        record: &Record,
        driver: &str,
    ) -> Result<(Finding, String), NicError> {
        if entry.key.is_shared() && self.hand_over(iface, entry, record)? {
            return Ok((Finding::HandedOver, "another interface needs it".to_owned()));
        }
        let key = &entry.key;
        match self.read(iface, key) {
            Ok(found) if key.same(&found, &entry.old) => return Ok((Finding::Holds, String::new())),
            Err(error) if lack_of(&error) == Lack::NotSupported => return Ok((Finding::Gone, String::new())),
            _ => {}
        }
        let written = self.write(iface, key, &entry.old);
        Ok(match (written, self.read(iface, key)) {
            (Err(error), _) => (Finding::Refused, refusal(key, driver, &error)),
            (Ok(()), Ok(found)) if key.same(&found, &entry.old) => (Finding::Done, String::new()),
            (Ok(()), Ok(found)) => (Finding::Refused, format!("stays, or became, {}", key.shown(&found))),
            (Ok(()), Err(error)) => (Finding::Refused, format!("cannot be read back: {error}")),
        })
    }

    /// Gives the duty to restore a shared setting to the interfaces that still need it. False: there are none.
    fn hand_over(&mut self, iface: &str, entry: &SavedSetting, record: &Record) -> Result<bool, NicError> {
        let own = self.name(iface);
        let mut handed = false;
        for name in self.store.names()?.into_iter().filter(|name| *name != own) {
            let Some(mut other) = self.store.load(&name)?.filter(|other| other.place == record.place) else { continue };
            let Some(theirs) = other.settings.iter_mut().find(|theirs| theirs.key == entry.key) else { continue };
            handed = true;
            // They came later: what they found was set for this interface.
            if entry.is_ours(&theirs.old) {
                theirs.old = entry.old.clone();
                self.store.save(&name, &other)?;
            }
        }
        Ok(handed)
    }

    /// Keeps on record what is not restored; removes the record if all is.
    fn settle(&mut self, iface: &str, mut record: Record, outcomes: &[SettingResult]) -> Result<(), NicError> {
        let is_open = |key: &Setting| {
            outcomes
                .iter()
                .any(|outcome| outcome.key == *key && matches!(outcome.finding, Finding::LeftAlone | Finding::Refused))
        };
        record.settings.retain(|entry| is_open(&entry.key));
        if record.settings.is_empty() {
            return self.store.remove(&self.name(iface));
        }
        record.phase = Phase::Applied;
        self.store.save(&self.name(iface), &record)
    }
}

/// Queues first, because the others belong to them; then the last one that was applied first.
fn in_order_of_rollback(mut decisions: Vec<(SavedSetting, Decision)>) -> Vec<(SavedSetting, Decision)> {
    decisions.sort_by(|(one, _), (other, _)| match (&one.key, &other.key) {
        (Setting::Channels, Setting::Channels) => std::cmp::Ordering::Equal,
        (Setting::Channels, _) => std::cmp::Ordering::Less,
        (_, Setting::Channels) => std::cmp::Ordering::Greater,
        (one, other) => other.cmp(one),
    });
    decisions
}
