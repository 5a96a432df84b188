//! The tests of this crate, in one executable: each file is a module.

mod backup;
mod cells;
mod common;
mod crash;
mod damage;
mod format;
mod index;
mod lines;
mod memory;
mod opened;
mod progress;
mod recovery;
mod schedules;
mod store;
mod watch;
