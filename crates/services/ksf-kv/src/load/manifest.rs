//! The manifest of an AOF of Redis 7: which files it consists of.
//!
//! ```text
//!   file appendonly.aof.2.base.rdb seq 2 type b      the base: an RDB snapshot, or commands
//!   file appendonly.aof.4.incr.aof seq 4 type i      what was written since, by growing numbers
//!   file appendonly.aof.1.base.rdb seq 1 type h      of before: Redis removes it
//! ```

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ksf_proto::resp;

use super::{Fault, LoadError, in_file};
use crate::whole::parent;

/// What a manifest has at most: Redis writes some hundred bytes.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// See [`super::files`].
pub(super) fn files(path: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let io_error = |path| move |error: io::Error| in_file(path)(error.into());
    if fs::metadata(path).map_err(io_error(path))?.is_dir() {
        let entries =
            fs::read_dir(path).and_then(|entries| entries.collect::<io::Result<Vec<_>>>()).map_err(io_error(path))?;
        let manifests: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).filter(|path| is_manifest(path)).collect();
        return match &manifests[..] {
            [manifest] => listed(manifest),
            _ => Err(in_file(path)(Fault::Folder { found: manifests.len() })),
        };
    }
    if is_manifest(path) { listed(path) } else { Ok(vec![path.to_owned()]) }
}

fn is_manifest(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "manifest")
}

/// The files that a manifest lists, in their order.
fn listed(manifest: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let read = fs::metadata(manifest).and_then(|found| {
        let is_short = found.len() <= MANIFEST_BYTES_MAX;
        if is_short { fs::read(manifest) } else { Err(io::ErrorKind::FileTooLarge.into()) }
    });
    let names = read.map_err(Fault::from).and_then(|text| names(&text)).map_err(in_file(manifest))?;
    let folder = parent(manifest);
    Ok(names.iter().map(|name| folder.join(OsStr::from_bytes(name))).collect())
}

/// The names in a manifest: the base, then the others by their numbers.
fn names(text: &[u8]) -> Result<Vec<Vec<u8>>, Fault> {
    let (mut base, mut others): (Option<Vec<u8>>, Vec<Vec<u8>>) = (None, Vec::new());
    let mut number_before = None;
    for (line, text) in (1..).zip(text.split(|byte| *byte == b'\n')) {
        let wrong = |what| Fault::Manifest { line, what };
        if text.trim_ascii().is_empty() || text.starts_with(b"#") {
            continue;
        }
        let words = resp::inline(text).map_err(|_| wrong("has quotes that do not match"))?;
        let (pairs, rest) = words.as_chunks::<2>();
        let value = |name: &[u8]| pairs.iter().find(|[key, _]| key.eq_ignore_ascii_case(name)).map(|[_, value]| value);
        let (Some(name), Some(number), Some(kind)) = (value(b"file"), value(b"seq"), value(b"type")) else {
            return Err(wrong("lacks one of file, seq and type"));
        };
        if !rest.is_empty() || name.is_empty() || name.contains(&b'/') || name == b"." || name == b".." {
            return Err(wrong("has no name of a file in this folder, or a word too many"));
        }
        let number: Option<u64> = std::str::from_utf8(number).ok().and_then(|number| number.parse().ok());
        let number = number.ok_or_else(|| wrong("has a seq that is no number"))?;
        match &kind[..] {
            b"b" if base.is_none() => base = Some(name.clone()),
            b"b" => return Err(wrong("has a second base")),
            b"i" if number_before.is_some_and(|before| before >= number) => {
                return Err(wrong("has a seq that does not grow"));
            }
            b"i" => {
                number_before = Some(number);
                others.push(name.clone());
            }
            b"h" => {}
            _ => return Err(wrong("has a type that is none of b, i and h")),
        }
    }
    if base.is_none() && others.is_empty() {
        return Err(Fault::Manifest { line: 1, what: "begins a list without files" });
    }
    Ok(base.into_iter().chain(others).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_lists_its_files_in_their_order() {
        let read = |text: &str| {
            let names = names(text.as_bytes()).map_err(|fault| fault.to_string())?;
            Ok::<_, String>(names.into_iter().map(|name| String::from_utf8(name).unwrap()).collect::<Vec<_>>())
        };
        let whole = "# a comment\nfile a.1.incr.aof seq 1 type i\n\nfile a.0.base.rdb seq 9 type h\nfile \"a 2\" seq 2 type i\n\
                     file a.1.base.rdb seq 1 type b\n";
        assert_eq!(read(whole).unwrap(), ["a.1.base.rdb", "a.1.incr.aof", "a 2"]);
        for (text, part) in [
            ("", "line 1 begins a list without files"),
            ("file a seq 1 type h", "without files"),
            ("file a seq 1", "line 1 lacks one of"),
            ("\nfile a seq 1 type x", "line 2 has a type"),
            ("file a seq x type b", "seq that is no number"),
            ("file ../a seq 1 type b", "no name of a file"),
            ("file .. seq 1 type b", "no name of a file"),
            ("file a seq 1 type b more", "a word too many"),
            ("file \"a seq 1 type b", "quotes"),
            ("file a seq 1 type b\nfile b seq 2 type b", "line 2 has a second base"),
            ("file a seq 2 type i\nfile b seq 2 type i", "line 2 has a seq that does not grow"),
        ] {
            let told = read(text).unwrap_err();
            assert!(told.contains(part), "{text}: {told}");
        }
    }
}
