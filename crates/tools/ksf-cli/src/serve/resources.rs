//! What a server sets aside when it starts: slots to receive into and to keep messages in, and threads for tasks. As the
//! [limits](crate::serve::limits) these come from built-in defaults, a TOML file and the command line; unlike them they hold
//! until the server ends.

use ksf::server::{Builder, SHORT_SLOTS, SLOT_BYTES, SLOTS};
use ksf::tasks::TaskOptions;

use crate::serve::limits::settings;

/// Resources of a service: slots for each shard, and threads for tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resources {
    slots: u32,
    short_slots: u32,
    task_threads_max: usize,
    task_queue_max: usize,
    task_idle_exit_ms: u64,
}

impl Default for Resources {
    fn default() -> Self {
        let TaskOptions { threads_max, queue_max, idle_exit_ms } = TaskOptions::default();
        Self {
            slots: SLOTS,
            short_slots: SHORT_SLOTS,
            task_threads_max: threads_max,
            task_queue_max: queue_max,
            task_idle_exit_ms: idle_exit_ms,
        }
    }
}

settings! {
    /// Resources as flags.
    flags: ResourceFlags, "Resources";
    /// Resources as a table of a TOML file.
    table: ResourceTable;
    target: Resources;
    /// Slots to receive into per shard, 68 KiB each; memory is taken as they are first used [default: 256]
    slots: u32, "N", 16..=65_536;
    /// Slots of 2 KiB per shard, to keep short messages in; 0: they are kept in the slots they were received into
    /// [default: 4096]
    short_slots: u32, "N", 0..=16_777_216;
    /// Threads for tasks of a service that block, for all of its shards [default: 64]
    task_threads_max: usize, "N", 1..=1024;
    /// Tasks that may wait for them; with more, connections that wait for one are not read [default: 1024]
    task_queue_max: usize, "N", 1..=usize::MAX;
    /// Time without work after which a thread for tasks ends, in milliseconds [default: 30000]
    task_idle_exit_ms: u64, "MS", 0..=u64::MAX;
}

impl Resources {
    /// Defaults, then `tables` (the common one and the service's own), then `flags`.
    pub(crate) fn resolve(tables: &[&ResourceTable], flags: &ResourceFlags) -> Self {
        let mut resources = Self::default();
        tables.iter().for_each(|table| table.apply(&mut resources));
        flags.apply(&mut resources);
        resources
    }

    /// Tells the framework.
    pub(crate) fn give_to(&self, builder: Builder) -> Builder {
        let Self { slots, short_slots, task_threads_max, task_queue_max, task_idle_exit_ms } = *self;
        let tasks =
            TaskOptions { threads_max: task_threads_max, queue_max: task_queue_max, idle_exit_ms: task_idle_exit_ms };
        builder.slots(SLOT_BYTES, slots).short_slots(short_slots).tasks(tasks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_shows_the_defaults() {
        use clap::Args;
        let command = ResourceFlags::augment_args(clap::Command::new("x"));
        for (name, value) in list(&Resources::default()) {
            let argument = command.get_arguments().find(|argument| argument.get_id() == name).unwrap();
            let help = argument.get_help().unwrap().to_string();
            assert!(help.ends_with(&format!("[default: {value}]")), "{name}: {help}");
        }
    }

    #[test]
    fn flags_win_over_the_service_and_the_service_over_all() {
        let common: ResourceTable = toml::from_str("slots = 100\ntask_queue_max = 1\ntask_threads_max = 1").unwrap();
        let own: ResourceTable = toml::from_str("task_queue_max = 2\ntask_threads_max = 2").unwrap();
        let flags = ResourceFlags { task_threads_max: Some(3), ..ResourceFlags::default() };
        let expected = Resources { slots: 100, task_queue_max: 2, task_threads_max: 3, ..Resources::default() };
        assert_eq!(Resources::resolve(&[&common, &own], &flags), expected);
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "slots = 15",
            "slots = 65537",
            "short_slots = 16777217",
            "task_threads_max = 0",
            "task_threads_max = 1025",
            "task_queue_max = -1",
            "threads = 1",
        ] {
            assert!(toml::from_str::<ResourceTable>(text).is_err(), "{text}");
        }
    }
}
