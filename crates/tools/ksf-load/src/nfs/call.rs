//! NFS 3 as a client sees it (RFC 1813): arguments as bytes, and results with what they must say.
//!
//! Written independently of the server's codec, so that a mistake there is not repeated here.

use crate::files::Wrong;

/// Program numbers and versions.
pub(super) const NFS: (u32, u32) = (100_003, 3);
pub(super) const MOUNT: (u32, u32) = (100_005, 3);

/// Length of the attributes of an object (`fattr3`).
const ATTR_BYTES: usize = 84;

/// The longest handle (`NFS3_FHSIZE`).
const HANDLE_BYTES_MAX: usize = 64;

/// What a request asks for, in the order of their numbers in the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Procedure {
    /// Nothing.
    Null,
    /// Attributes of a file.
    Getattr,
    /// A mode, the one that the file has.
    Setattr,
    /// A file of the folder by its name.
    Lookup,
    /// All rights to a file.
    Access,
    /// The target of the symbolic link.
    Readlink,
    /// Bytes of a file.
    Read,
    /// Bytes of a file, the ones that it has.
    Write,
    /// A file of the connection's own, which may be there.
    Create,
    /// The same file, which may be gone.
    Remove,
    /// The names of the folder, from the first one on.
    Readdir,
    /// The same with attributes and handles.
    Readdirplus,
    /// The room of the file system.
    Fsstat,
    /// The limits of the server.
    Fsinfo,
    /// The limits of names.
    Pathconf,
    /// What was written to a file.
    Commit,
}

impl Procedure {
    pub(super) const ALL: [Procedure; 16] = [
        Procedure::Null,
        Procedure::Getattr,
        Procedure::Setattr,
        Procedure::Lookup,
        Procedure::Access,
        Procedure::Readlink,
        Procedure::Read,
        Procedure::Write,
        Procedure::Create,
        Procedure::Remove,
        Procedure::Readdir,
        Procedure::Readdirplus,
        Procedure::Fsstat,
        Procedure::Fsinfo,
        Procedure::Pathconf,
        Procedure::Commit,
    ];

    /// Its number in the protocol.
    pub(super) fn number(self) -> u32 {
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 18, 19, 20, 21][self as usize]
    }

    /// As `--mix` has it.
    pub(super) fn name(self) -> &'static str {
        [
            "null",
            "getattr",
            "setattr",
            "lookup",
            "access",
            "readlink",
            "read",
            "write",
            "create",
            "remove",
            "readdir",
            "readdirplus",
            "fsstat",
            "fsinfo",
            "pathconf",
            "commit",
        ][self as usize]
    }
}

/// When a write is done (`stable_how`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Stable {
    /// When the server has the data.
    Unstable,
    /// When the data is on the medium.
    Data,
    /// When data and attributes are on the medium.
    File,
}

/// A file of the tree that is worked on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct File {
    pub(super) handle: Vec<u8>,
    pub(super) fileid: u64,
}

pub(super) fn put(out: &mut Vec<u8>, word: u32) {
    out.extend_from_slice(&word.to_be_bytes());
}

pub(super) fn put_long(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_be_bytes());
}

pub(super) fn put_opaque(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u32);
    out.extend_from_slice(bytes);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// `sattr3` with a mode and nothing else.
pub(super) fn put_mode(out: &mut Vec<u8>, mode: u32) {
    [1, mode, 0, 0, 0, 0, 0].into_iter().for_each(|word| put(out, word));
}

/// Reads results. Nothing panics on what a server sent.
#[derive(Debug)]
pub(super) struct Results<'a> {
    rest: &'a [u8],
}

impl<'a> Results<'a> {
    pub(super) fn new(rest: &'a [u8]) -> Self {
        Self { rest }
    }

    pub(super) fn word(&mut self) -> Result<u32, Wrong> {
        let (word, rest) = self.rest.split_first_chunk::<4>().ok_or(Wrong::Malformed("a number is missing"))?;
        self.rest = rest;
        Ok(u32::from_be_bytes(*word))
    }

    pub(super) fn long(&mut self) -> Result<u64, Wrong> {
        Ok(u64::from(self.word()?) << 32 | u64::from(self.word()?))
    }

    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Wrong> {
        let (bytes, rest) = self.rest.split_at_checked(count).ok_or(Wrong::Malformed("bytes are missing"))?;
        self.rest = rest;
        Ok(bytes)
    }

    pub(super) fn opaque(&mut self, bytes_max: usize) -> Result<&'a [u8], Wrong> {
        let count = self.word()? as usize;
        if count > bytes_max {
            return Err(Wrong::Malformed("bytes are more than there may be"));
        }
        let bytes = self.bytes(count)?;
        self.bytes(count.next_multiple_of(4) - count)?;
        Ok(bytes)
    }

    pub(super) fn handle(&mut self) -> Result<&'a [u8], Wrong> {
        self.opaque(HANDLE_BYTES_MAX)
    }

    pub(super) fn flag(&mut self) -> Result<bool, Wrong> {
        match self.word()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Wrong::Malformed("a truth value is neither 0 nor 1")),
        }
    }

    /// `fattr3`.
    pub(super) fn attr(&mut self) -> Result<Attr, Wrong> {
        let mut attr = Results::new(self.bytes(ATTR_BYTES)?);
        let file_type = attr.word()?;
        attr.bytes(16)?;
        let size = attr.long()?;
        attr.bytes(24)?;
        Ok(Attr { file_type, size, fileid: attr.long()? })
    }

    /// `post_op_attr`.
    pub(super) fn attr_after(&mut self) -> Result<Option<Attr>, Wrong> {
        if self.flag()? { self.attr().map(Some) } else { Ok(None) }
    }

    /// `wcc_data`.
    pub(super) fn wcc(&mut self) -> Result<Option<Attr>, Wrong> {
        if self.flag()? {
            self.bytes(24)?;
        }
        self.attr_after()
    }

    /// Nothing may be left.
    pub(super) fn end(self) -> Result<(), Wrong> {
        if self.rest.is_empty() { Ok(()) } else { Err(Wrong::Malformed("there is something behind the results")) }
    }
}

/// What is compared of the attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attr {
    pub(super) file_type: u32,
    pub(super) size: u64,
    pub(super) fileid: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = Vec::new();
        put(&mut bytes, 1);
        put_long(&mut bytes, 1 << 40);
        put_opaque(&mut bytes, b"abcde");
        let mut results = Results::new(&bytes);
        assert_eq!((results.flag(), results.long(), results.opaque(5)), (Ok(true), Ok(1 << 40), Ok(&b"abcde"[..])));
        assert_eq!(results.end(), Ok(()));
        assert!(matches!(Results::new(&bytes).opaque(0), Err(Wrong::Malformed(_))));
        assert!(matches!(Results::new(&[0, 0, 0, 2]).flag(), Err(Wrong::Malformed(_))));
    }

    #[test]
    fn procedures_have_their_place_and_a_name() {
        for (at, procedure) in Procedure::ALL.into_iter().enumerate() {
            assert_eq!(procedure as usize, at);
        }
        assert_eq!((Procedure::Remove.number(), Procedure::Commit.number()), (12, 21));
        assert_eq!((Procedure::Remove.name(), Procedure::Commit.name()), ("remove", "commit"));
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut results = Results::new(&bytes);
            while results.wcc().is_ok() && results.opaque(64).is_ok() {}
            prop_assert!(results.rest.len() <= bytes.len());
        }
    }
}
