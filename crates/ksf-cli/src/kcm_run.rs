//! `ksf kcm-run`: a program written for AF_KCM, on a kernel without it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use clap::{Args, ValueHint};

use crate::exit::{Failure, Status};
use crate::library;

/// The library that gives the program its message sockets.
const LIBRARY: &str = "libksf_kcm_preload.so";

/// Run a program written for AF_KCM on a kernel without it
///
/// The program's message sockets are those of ksf; docs/kcm.md says what differs from the kernel's. It must be linked
/// with the system's libc, and not run with more rights than its caller. The library it needs is looked for in
/// KSF_LIB_DIR if that is set, else beside ksf and in ../lib/ksf.
#[derive(Debug, Args)]
pub(crate) struct KcmRunArgs {
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    #[arg(value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// Becomes the program; returns only if that fails.
pub(crate) fn run(args: &KcmRunArgs) -> Result<std::convert::Infallible, Failure> {
    let library = library::find(&[LIBRARY])?;
    let (program, arguments) = args
        .command
        .split_first()
        .ok_or_else(|| Failure::new(Status::Usage, "no program was given").remedy("see ksf kcm-run --help"))?;
    let mut preload = library.into_os_string();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let error = Command::new(program).args(arguments).env("LD_PRELOAD", preload).exec();
    let what = format!("cannot run {}", Path::new(program).display());
    Err(match error.kind() {
        std::io::ErrorKind::NotFound => Failure::new(Status::NoInput, format!("{what}: {error}")),
        _ => Failure::os(what, &error),
    })
}
