//! `ksf kcm-run`: a program written for AF_KCM, on a kernel without it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueHint};

use crate::exit::{Failure, Status};

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
    let folders = folders(std::env::var_os("KSF_LIB_DIR"), std::env::current_exe().ok().as_deref());
    let library = folders.iter().map(|folder| folder.join(LIBRARY)).find(|library| library.is_file());
    let library = library.ok_or_else(|| {
        let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        Failure::new(Status::Unavailable, format!("{LIBRARY} is not in {}", folders.join(" or ")))
            .remedy("install ksf with make install, or set KSF_LIB_DIR to its folder")
    })?;
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

/// Where the library may be: as told, else beside the binary, or where it is installed.
fn folders(told: Option<OsString>, binary: Option<&Path>) -> Vec<PathBuf> {
    if let Some(told) = told.filter(|told| !told.is_empty()) {
        return vec![told.into()];
    }
    let own = binary.and_then(Path::parent);
    own.map(|own| vec![own.to_owned(), own.join("../lib/ksf")]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_looked_for_where_it_was_told() {
        let binary = Path::new("/opt/ksf/bin/ksf");
        assert_eq!(folders(Some("/elsewhere".into()), Some(binary)), [Path::new("/elsewhere")]);
        let beside = [PathBuf::from("/opt/ksf/bin"), PathBuf::from("/opt/ksf/bin/../lib/ksf")];
        assert_eq!(folders(Some("".into()), Some(binary)), beside);
        assert_eq!(folders(None, Some(binary)), beside);
    }
}
