//! Files in TOML: a mistake is told with its place.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::output::{Failure, Status, one_line};

/// Reads a file; a mistake in it is named with its line and column.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    let text = fs::read_to_string(path).map_err(|error| {
        let status = match error.kind() {
            std::io::ErrorKind::PermissionDenied => Status::NoPermission,
            _ => Status::NoInput,
        };
        Failure::new(status, format!("cannot read {}: {error}", path.display())).remedy("check the path")
    })?;
    toml::from_str(&text).map_err(|error| {
        let place = match error.span() {
            Some(span) => {
                let before = &text[..span.start.min(text.len())];
                let line = before.matches('\n').count() + 1;
                let column = before.rsplit('\n').next().map_or(0, str::len) + 1;
                format!("{}:{line}:{column}", path.display())
            }
            None => path.display().to_string(),
        };
        Failure::new(Status::Config, format!("{place}: {}", one_line(error.message()))).remedy("correct that line")
    })
}
