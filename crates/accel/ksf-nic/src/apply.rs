//! Applying a plan: record, write, read back.

use crate::error::NicError;
use crate::files::SystemFiles;
use crate::interface::InterfaceOps;
use crate::inventory::Inventory;
use crate::plan::{Item, PlannedAction, TuningPlan, Wish};
use crate::record::{Phase, Record, RecordStore, SavedSetting};
use crate::setting::Setting;
use crate::steering::ReceiveSteering;
use crate::tuner::{Finding, NicReport, SettingResult, Tuner, check_same_interface, check_whole, refusal};

impl<F: SystemFiles, L: InterfaceOps, S: RecordStore> Tuner<F, L, S> {
    /// Plans, has the plan announced, and applies it. A setting that is refused is told in the report; the others are
    /// applied nevertheless, because each is of use alone.
    ///
    /// Old values are recorded before anything changes. Applying again, also another intention, keeps the oldest: one
    /// rollback leads back to the start. What somebody else has set in between counts as the value to go back to.
    ///
    /// # Errors
    ///
    /// Before anything is changed: those of [`TuningPlan::make`] and of looking; [`NicError::DefaultRoute`] unless
    /// `may_cut_off`; [`NicError::ReadOnly`], [`NicError::NotPermitted`], [`NicError::Busy`],
    /// [`NicError::Interrupted`], [`NicError::OtherInterface`]. Later: [`NicError::Record`]; rollback then restores
    /// what was changed.
    pub fn apply(
        &mut self,
        iface: &str,
        wish: &Wish,
        may_cut_off: bool,
        announce: impl FnOnce(&TuningPlan),
    ) -> Result<NicReport, NicError> {
        let facts = self.look(iface)?;
        if let (Some(above), false) = (&facts.default_route, may_cut_off) {
            let through = if above.is_empty() { String::new() } else { format!(" of {above}, which is above it") };
            return Err(NicError::DefaultRoute { iface: iface.to_owned(), through });
        }
        self.check_writable(iface, TuningPlan::make(&facts, wish)?.changes().map(|item| &item.key))?;
        let _guard = self.store.lock()?;
        let mut record = match self.record(iface)? {
            Some(record) => record,
            None => Record::new(iface, facts.identity.clone(), self.place(), wish.intent),
        };
        if !record.settings.is_empty() {
            check_whole(&record)?;
            check_same_interface(&record, facts.identity.as_ref())?;
        }
        record.intent = wish.intent;

        // Again, now that no other ksf works on it.
        let mut facts = self.look(iface)?;
        let mut plan = TuningPlan::make(&facts, wish)?;
        announce(&plan);
        let mut outcomes = Vec::new();
        let resizes = plan.changes().any(|item| item.key == Setting::Channels);
        if resizes {
            outcomes.push(self.resize(&facts, &plan, &mut record)?);
            facts = self.look(iface)?;
            plan = TuningPlan::make(&facts, wish)?;
        }
        plan.items.retain(|item| item.key != Setting::Channels);
        if plan.changes().next().is_some() {
            outcomes.extend(self.write_items(&facts, &plan, &mut record, resizes)?);
        }
        record.settings.retain(|entry| !is_refused_unchanged(&outcomes, entry));
        if outcomes.is_empty() {
            // Nothing was to be changed, now; what earlier was stays on record.
        } else if record.settings.is_empty() {
            self.store.remove(&self.name(iface))?;
        } else {
            record.phase = Phase::Applied;
            record.settings.iter_mut().for_each(|entry| entry.earlier = None);
            self.store.save(&self.name(iface), &record)?;
        }
        let steering = Some(ReceiveSteering::present(&self.look(iface)?));
        Ok(NicReport { iface: iface.to_owned(), outcomes, notes: plan.notes, steering })
    }

    /// Changes the number of queues. All settings that a driver may reset then are recorded first.
    fn resize(&mut self, facts: &Inventory, plan: &TuningPlan, record: &mut Record) -> Result<SettingResult, NicError> {
        let resets = |key: &Setting| {
            key.queue().is_some()
                || matches!(
                    key,
                    Setting::Irq { .. } | Setting::AdaptiveRx | Setting::RxUsecs | Setting::Ntuple | Setting::Channels
                )
        };
        for (key, value) in facts.values.iter().filter(|(key, _)| resets(key)) {
            if let (Ok(value), None) = (value, record.entry(key)) {
                record.settings.push(SavedSetting::new(key.clone(), value, None));
            }
        }
        let wanted = plan.changes().find(|item| item.key == Setting::Channels).and_then(|item| item.wanted.clone());
        let wanted = wanted.unwrap_or_default();
        remember(record, &Setting::Channels, facts, &wanted, false);
        record.phase = Phase::Resizing;
        self.store.save(&self.name(&facts.iface), record)?;
        Ok(self.write_one(facts, &Setting::Channels, &wanted, record))
    }

    fn write_items(
        &mut self,
        facts: &Inventory,
        plan: &TuningPlan,
        record: &mut Record,
        resized: bool,
    ) -> Result<Vec<SettingResult>, NicError> {
        // What interfaces share is recorded even where it holds already: the rollback of another one must know.
        let concerns = |item: &&Item| {
            item.action == PlannedAction::Change || item.action == PlannedAction::Holds && item.key.is_shared()
        };
        for item in plan.items.iter().filter(concerns) {
            if let Some(wanted) = &item.wanted {
                remember(record, &item.key, facts, wanted, resized);
            }
        }
        record.settings.sort_by(|one, other| one.key.cmp(&other.key));
        record.phase = Phase::Applying;
        self.store.save(&self.name(&facts.iface), record)?;
        let mut outcomes = Vec::new();
        for item in plan.changes() {
            if let Some(wanted) = &item.wanted {
                outcomes.push(self.write_one(facts, &item.key, wanted, record));
            }
        }
        Ok(outcomes)
    }

    /// Writes a setting and reads it back. What it became is put on record.
    fn write_one(&mut self, facts: &Inventory, key: &Setting, wanted: &str, record: &mut Record) -> SettingResult {
        let written = self.write(&facts.iface, key, wanted);
        let found = self.read(&facts.iface, key);
        let (finding, detail) = match (&written, &found) {
            (Err(error), _) => (Finding::Refused, refusal(key, &facts.driver, error)),
            (Ok(()), Ok(found)) if key.same(found, wanted) => (Finding::Done, String::new()),
            (Ok(()), Ok(found)) if key.is_rounded() => (Finding::Done, format!("became {}", key.shown(found))),
            (Ok(()), Ok(found)) => (Finding::Refused, format!("stays, or became, {}", key.shown(found))),
            (Ok(()), Err(error)) => (Finding::Refused, format!("cannot be read back: {error}")),
        };
        if let (Ok(found), Some(entry)) = (found, record.settings.iter_mut().find(|entry| entry.key == *key)) {
            entry.new = Some(found.trim().to_owned());
        }
        SettingResult { key: key.clone(), wanted: wanted.to_owned(), finding, detail }
    }
}

/// Puts a setting on record before it is written.
///
/// A value that is neither the recorded old one nor the one that was set is somebody else's, and the one to go back to;
/// but not after queues were `resized`, when it may be the driver's.
fn remember(record: &mut Record, key: &Setting, facts: &Inventory, wanted: &str, resized: bool) {
    let Ok(now) = facts.value(key) else { return };
    match record.settings.iter_mut().find(|entry| entry.key == *key) {
        None => record.settings.push(SavedSetting::new(key.clone(), now, Some(wanted))),
        Some(entry) => {
            let is_ours = entry.new.is_none() || entry.is_ours(now) || resized;
            if !is_ours {
                entry.old = now.to_owned();
            }
            entry.earlier = entry.new.replace(wanted.to_owned()).filter(|_| is_ours);
        }
    }
}

/// Whether an entry tells of nothing: its value was refused, and is what it was.
fn is_refused_unchanged(outcomes: &[SettingResult], entry: &SavedSetting) -> bool {
    let refused = outcomes.iter().any(|outcome| outcome.key == entry.key && outcome.finding == Finding::Refused);
    refused && entry.new.as_ref().is_some_and(|new| entry.key.same(new, &entry.old))
}
