//! `ksf kcm-run`: a program written for AF_KCM, on a kernel without it.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use clap::{Args, ValueEnum, ValueHint};
use ksf_kcm::RawKcmSocket;
use ksf_mux::kcm::Routing;

use crate::library;
use crate::output::{Failure, Status};

/// The library that gives the program its message sockets.
const LIBRARY: &str = "libksf_kcm_preload.so";

/// Run a program written for AF_KCM on a kernel without it
///
/// The program's message sockets are those of ksf; docs/kcm.md says what differs from the kernel's. It must be linked
/// with the system's libc, and not run with more rights than its caller. The library it needs is looked for in
/// KSF_LIB_DIR if that is set, else beside ksf and in ../lib/ksf.
#[derive(Debug, Args)]
pub(crate) struct KcmRunArgs {
    /// Whose message sockets the program gets
    #[arg(long, value_enum, value_name = "MUX", default_value_t)]
    pub(crate) mux: SocketsWish,
    /// Where a message goes that the program sends: to the connection whose message it answers (for servers), or to any, in
    /// turn (for clients of one server; so do the kernel's sockets, which cannot answer) [default: answer]
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) send: Option<SendWish>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    #[arg(value_hint = ValueHint::CommandWithArguments)]
    pub(crate) command: Vec<OsString>,
}

/// Whose sockets `socket(AF_KCM)` opens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum SocketsWish {
    /// Those of ksf, also where the kernel has its own
    #[default]
    Ksf,
    /// The kernel's, untouched and with their faults; an error where it has none
    Kcm,
    /// The kernel's where it has them, else those of ksf
    Auto,
}

/// Which connection a message goes to: docs/kcm.md, "Which connection a message goes to".
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SendWish {
    /// That of the message which its thread received last
    Answer,
    /// The next one that takes messages
    InTurn,
}

impl SendWish {
    fn routing(self) -> Routing {
        match self {
            Self::Answer => Routing::Answer,
            Self::InTurn => Routing::InTurn,
        }
    }
}

/// Becomes the program; returns only if that fails.
pub(crate) fn run(args: &KcmRunArgs) -> Result<std::convert::Infallible, Failure> {
    let (program, arguments) = args
        .command
        .split_first()
        .ok_or_else(|| Failure::new(Status::Usage, "no program was given").remedy("see ksf kcm-run --help"))?;
    // Ours may be there already: this ran under another kcm-run.
    let mut preload = without_ours(&std::env::var_os("LD_PRELOAD").unwrap_or_default());
    if !is_kernels(args)? {
        preload.insert(0, library::find(&[LIBRARY])?.into_os_string());
    }
    let mut command = Command::new(program);
    command.args(arguments);
    match preload.join(OsStr::new(":")) {
        none if none.is_empty() => command.env_remove("LD_PRELOAD"),
        preload => command.env("LD_PRELOAD", preload),
    };
    // Said anew in each case: this may run under another kcm-run.
    command.env(Routing::VARIABLE, args.send.map_or(Routing::default(), SendWish::routing).name());
    let error = command.exec();
    let what = format!("cannot run {}", Path::new(program).display());
    Err(match error.kind() {
        std::io::ErrorKind::NotFound => Failure::new(Status::NoInput, format!("{what}: {error}")),
        _ => Failure::os(what, &error),
    })
}

/// Whether the program gets the kernel's sockets: tried, because the kernel may load its module just for that.
fn is_kernels(args: &KcmRunArgs) -> Result<bool, Failure> {
    let wish = args.mux;
    match (wish, args.send) {
        (SocketsWish::Ksf, _) | (SocketsWish::Auto, Some(SendWish::Answer)) => return Ok(false),
        (SocketsWish::Kcm, Some(SendWish::Answer)) => {
            let what = "--send=answer cannot be had with --mux=kcm: the kernel's sockets send to any connection";
            return Err(Failure::new(Status::Usage, what).remedy("use --mux=ksf, or leave --send out"));
        }
        _ => {}
    }
    match RawKcmSocket::new() {
        Ok(_) => Ok(true),
        Err(_) if wish == SocketsWish::Auto => Ok(false),
        Err(error) => {
            let status = if error.is_rights() { Status::NoPermission } else { Status::Unavailable };
            let remedy = format!("{}; or use --mux=ksf", error.remedy());
            Err(Failure::new(status, format!("the kernel's message sockets cannot be had here: {error}"))
                .remedy(remedy))
        }
    }
}

/// The libraries of LD_PRELOAD, which are parted by colons or spaces, but for ours.
fn without_ours(preload: &OsStr) -> Vec<OsString> {
    use std::os::unix::ffi::OsStrExt as _;
    let others = preload.as_bytes().split(|byte| matches!(byte, b':' | b' ')).map(OsStr::from_bytes);
    let is_other = |path: &&OsStr| !path.is_empty() && Path::new(path).file_name() != Some(OsStr::new(LIBRARY));
    others.filter(is_other).map(OsStr::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_preloaded_stays_but_for_ours() {
        let left = |preload: &str| without_ours(OsStr::new(preload)).join(OsStr::new("|"));
        assert_eq!(left(""), "");
        assert_eq!(left("a.so:/x/libksf_kcm_preload.so b.so"), "a.so|b.so");
        assert_eq!(left("/x/libksf_kcm_preload.so"), "");
    }
}
