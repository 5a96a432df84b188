//! Whole listings of a directory by READDIRPLUS: page after page, each asked for when the one before has come.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::call::{MOUNT, NFS, Procedure, Results, put_opaque};
use super::client::put_listing;
use super::tree::{Caller, MNT, MountTarget, told};
use super::{PATIENCE, oncrpc};
use crate::error::LoadError;
use crate::files::Wrong;

/// A directory in an export of a server on 127.0.0.1.
#[derive(Debug, Clone)]
pub struct Listing {
    /// Port of NFS.
    pub port: u16,
    /// Port of MOUNT.
    pub mount_port: u16,
    /// Path of the export.
    pub export: String,
    /// Name of the directory in the export.
    pub name: String,
    /// Entries that the directory has, without `.` and `..`.
    pub entries: usize,
}

impl Listing {
    /// Lists the directory until `wanted` returns false; it gets the duration of each listing. A listing is whole: each entry comes
    /// once, with attributes and handle.
    ///
    /// # Errors
    ///
    /// [`LoadError`]: no connection, an export that cannot be mounted, an entry that is missing, incomplete or there twice.
    pub fn measure(&self, mut wanted: impl FnMut(Duration) -> bool) -> Result<(), LoadError> {
        let place = MountTarget {
            host: "127.0.0.1".to_owned(),
            port: self.port,
            mount_port: self.mount_port,
            path: self.export.clone(),
            credential: oncrpc::credential("sys")?,
            timeout: PATIENCE,
        };
        let wrong = |wrong: Wrong| LoadError::system("a reply cannot be used", told(wrong));
        let mut path = Vec::new();
        put_opaque(&mut path, self.export.as_bytes());
        let mounted = Caller::connect(&place, MOUNT, place.mount_port)?.call("cannot mount", MNT, &path)?;
        let mut nfs = Caller::connect(&place, NFS, place.port)?;
        let mut named = Vec::new();
        put_opaque(&mut named, Results::new(&mounted).handle().map_err(wrong)?);
        put_opaque(&mut named, self.name.as_bytes());
        let looked = nfs.call("cannot look the directory up", Procedure::Lookup.number(), &named)?;
        let dir = Results::new(&looked).handle().map_err(wrong)?;
        loop {
            let began = Instant::now();
            let mut pages = Vec::new();
            let mut from = (0, 0);
            loop {
                let mut args = Vec::new();
                put_listing(&mut args, dir, from, true);
                let page = nfs.call("cannot list", Procedure::Readdirplus.number(), &args)?;
                let Page { last, verifier, eof, .. } = Page::read(&page).map_err(wrong)?;
                pages.push(page);
                if eof {
                    break;
                }
                from = (last, verifier);
            }
            let took = began.elapsed();
            self.check(&pages).map_err(wrong)?;
            if !wanted(took) {
                return Ok(());
            }
        }
    }

    fn check(&self, pages: &[Vec<u8>]) -> Result<(), Wrong> {
        let mut names = HashSet::new();
        for page in pages {
            for (name, is_whole) in Page::read(page)?.entries {
                if !is_whole {
                    return Err(Wrong::Untrue("an entry without attributes or without a handle"));
                }
                if !names.insert(name) {
                    return Err(Wrong::Untrue("an entry that is there twice"));
                }
            }
        }
        if names.len() != self.entries {
            return Err(Wrong::Untrue("another number of entries than the directory has"));
        }
        Ok(())
    }
}

/// Results of READDIRPLUS behind the status.
struct Page<'a> {
    verifier: u64,
    /// Names but `.` and `..`, each with whether attributes and handle are there.
    entries: Vec<(&'a [u8], bool)>,
    /// Cookie of the last entry.
    last: u64,
    eof: bool,
}

impl<'a> Page<'a> {
    fn read(results: &'a [u8]) -> Result<Self, Wrong> {
        let mut results = Results::new(results);
        results.attr_after()?;
        let mut page = Self { verifier: results.long()?, entries: Vec::new(), last: 0, eof: false };
        while results.flag()? {
            results.long()?;
            let name = results.opaque(255)?;
            page.last = results.long()?;
            let has_attr = results.attr_after()?.is_some();
            let has_handle = results.flag()? && !results.handle()?.is_empty();
            if !matches!(name, b"." | b"..") {
                page.entries.push((name, has_attr && has_handle));
            }
        }
        page.eof = results.flag()?;
        results.end()?;
        if page.last == 0 && !page.eof {
            return Err(Wrong::Untrue("a page without entries that is not the last one"));
        }
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::super::call::{put, put_long};
    use super::*;

    fn page(names: &[&str], eof: u32) -> Vec<u8> {
        let mut out = Vec::new();
        put(&mut out, 0);
        put_long(&mut out, 7);
        for (at, name) in names.iter().enumerate() {
            put(&mut out, 1);
            put_long(&mut out, 100);
            put_opaque(&mut out, name.as_bytes());
            put_long(&mut out, at as u64 + 1);
            put(&mut out, 1);
            out.resize(out.len() + 84, 0);
            put(&mut out, 1);
            put_opaque(&mut out, b"handle");
        }
        put(&mut out, 0);
        put(&mut out, eof);
        out
    }

    #[test]
    fn a_listing_is_whole_or_wrong() {
        let listing = Listing { port: 0, mount_port: 0, export: String::new(), name: String::new(), entries: 3 };
        let check = |pages: &[Vec<u8>]| listing.check(pages);
        assert_eq!(check(&[page(&[".", "..", "a"], 0), page(&["b", "c"], 1)]), Ok(()));
        assert!(matches!(check(&[page(&["a", "b"], 1)]), Err(Wrong::Untrue(_))));
        assert!(matches!(check(&[page(&["a", "b"], 0), page(&["b", "c"], 1)]), Err(Wrong::Untrue(_))));
        assert!(matches!(check(&[page(&[], 0)]), Err(Wrong::Untrue(_))), "it would never end");
        let read = page(&["a", "b"], 0);
        let Page { verifier, last, eof, .. } = Page::read(&read).unwrap();
        assert_eq!((verifier, last, eof), (7, 2, false));
        for length in 0..read.len() {
            assert!(Page::read(&read[..length]).is_err(), "cut after {length} bytes");
        }
    }
}
