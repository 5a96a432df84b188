//! Runs the Debian tools that the laboratory is made of.

use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::error::Error;

/// Directories of administrators' tools, which are not in everybody's PATH.
const SYSTEM_DIRS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// Where a command is: in PATH or in a system directory.
pub(crate) fn find(tool: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SYSTEM_DIRS.map(PathBuf::from))
        .map(|dir| dir.join(tool))
        .find(|candidate| rustix::fs::access(candidate, rustix::fs::Access::EXEC_OK).is_ok() && candidate.is_file())
}

/// A command of the host, to be given arguments. `package` is the Debian package it comes from.
pub(crate) fn command(tool: &str, package: &'static str) -> Result<Command, Error> {
    let path = find(tool).ok_or_else(|| Error::MissingTool { tool: tool.into(), package })?;
    let mut command = Command::new(path);
    // Messages are parsed and shown to people who may not share this machine's language.
    command.env("LC_ALL", "C").stdin(Stdio::null());
    Ok(command)
}

/// Runs a command to its end and returns its standard output; a failure carries its standard error.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>, Error> {
    let output = command.output().map_err(Error::host(format!("run {}", shown(command))))?;
    succeeded(command, output)
}

/// Runs a command to its end with `input` on its standard input.
pub(crate) fn feed(command: &mut Command, input: &[u8]) -> Result<Output, Error> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(Error::host(format!("run {}", shown(command))))?;
    let mut stdin = child.stdin.take();
    // Written by a thread of its own: each pipe holds less than what goes through it. A command that ends without
    // reading everything says why by its exit status.
    let output = std::thread::scope(|scope| {
        scope.spawn(move || stdin.as_mut().map(|stdin| stdin.write_all(input)));
        child.wait_with_output()
    });
    output.map_err(Error::host(format!("read from {}", shown(command))))
}

/// The standard output of a command that ended, or its failure.
pub(crate) fn succeeded(command: &Command, output: Output) -> Result<Vec<u8>, Error> {
    if output.status.success() {
        return Ok(output.stdout);
    }
    let messages = format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    Err(Error::Tool { command: shown(command), messages })
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}
