//! The tests of this crate, in one executable: each file is a module.

mod accel;
mod accel_profiles;
mod accel_systemd;
mod command_line;
mod demo;
mod flow;
mod idle;
mod kcm;
mod kcm_run;
mod kernel;
mod layering;
mod load_9p;
mod machine;
mod memory;
mod mounted;
mod nfs;
mod nic;
mod ninep;
mod promises;
mod readme;
mod serving;
mod store;
mod support;
mod unit;
mod unprivileged;
mod work;
