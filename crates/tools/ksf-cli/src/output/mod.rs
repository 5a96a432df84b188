//! What the command says, and where: results on standard output, everything else on standard error, one line each.
//!
//! This module imports no other module of the command, so every command can use it.

mod escape;
mod failure;
mod table;

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;

pub(crate) use escape::{escape, escaped};
pub(crate) use failure::{EXIT_STATUSES, Failure, Status};
pub(crate) use table::{Align, table};

/// Writes to standard output. A reader that has seen enough (`ksf doctor | head`) is no error.
pub(crate) fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    print_if_read(text).map(drop)
}

/// Writes to standard output; false when the other end of the pipe is closed. For a command that prints until it is
/// stopped.
pub(crate) fn print_if_read(text: impl AsRef<[u8]>) -> Result<bool, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::os("cannot write to standard output", &error)),
    }
}

/// A document as JSON on one line.
pub(crate) fn json_line(document: &impl Serialize) -> Result<String, Failure> {
    json(serde_json::to_string(document))
}

/// A document as JSON on lines that people can read.
pub(crate) fn json_pretty(document: &impl Serialize) -> Result<String, Failure> {
    json(serde_json::to_string_pretty(document))
}

fn json(text: serde_json::Result<String>) -> Result<String, Failure> {
    text.map(|json| escape::escape_json(&json) + "\n")
        .map_err(|error| Failure::new(Status::Internal, format!("cannot write JSON: {error}")))
}

/// Says a line on standard error, [escaped](escape). That nobody reads it (a closed pipe) must not end a server.
pub(crate) fn say(line: &dyn Display) {
    let _ = writeln!(io::stderr().lock(), "ksf: {}", escape(&line.to_string()));
}

/// Joins the lines of `text`, and runs of spaces, by single spaces.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
