//! The tests of this crate, in one executable: each file is a module.

mod calls;
mod common;
mod in_flight;
mod large_folder;
mod media;
mod messages;
mod model;
mod pairs;
mod refusals;
mod rows;
mod schedules;
mod session;
