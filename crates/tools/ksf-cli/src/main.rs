//! The command `ksf`: network services at kernel speed on stock Linux.
//!
//! This crate is thin: it reads flags and files, chooses an engine, starts services of the other
//! crates, and shows what they count.

mod accel;
mod args;
mod busy;
mod cli;
mod doctor;
mod kcm_run;
mod library;
mod load;
mod manager;
mod manual;
mod number;
mod output;
mod serve;
mod signals;
mod stats;
mod toml_file;

fn main() -> std::process::ExitCode {
    cli::main(std::env::args_os())
}
