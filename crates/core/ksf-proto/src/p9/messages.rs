//! The messages, with the numbers and the order of fields of the specification.

use super::HEADER_BYTES;
use super::field::{Data, Field, Names, P9Error, Qids, Reader};
use super::types::{GetLock, Lock, Qid, SetStat, Stat, StatFs};

/// What each message begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Type of the message.
    pub kind: u8,
    /// What a reply has in common with its request.
    pub tag: u16,
}

impl Header {
    /// Reads it, without a look at what follows.
    ///
    /// # Errors
    ///
    /// [`P9Error`]: the message is shorter, or has another length than it says.
    pub fn parse(message: &[u8]) -> Result<Self, P9Error> {
        Self::take(&mut Reader::new(message), message.len())
    }

    fn take(reader: &mut Reader<'_>, found: usize) -> Result<Self, P9Error> {
        let said = u32::take(reader)?;
        let header = Self { kind: u8::take(reader)?, tag: u16::take(reader)? };
        if said as usize == found { Ok(header) } else { Err(P9Error::Size { said, found }) }
    }
}

macro_rules! messages {
    (
        $(#[$doc:meta])*
        $name:ident {
            $($(#[$kind_doc:meta])* $kind:ident $text:literal = $number:literal { $($field:ident: $type:ty),* })+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "fields have the names of the specification")]
        pub enum $name<'a> {
            $($(#[$kind_doc])* $kind { $($field: $type),* },)+
        }

        impl<'a> $name<'a> {
            /// Types of messages with their names.
            pub const KINDS: &'static [(u8, &'static str)] = &[$(($number, $text)),+];

            /// Type of the message.
            pub const fn kind(&self) -> u8 {
                match self {
                    $(Self::$kind { .. } => $number,)+
                }
            }

            /// Reads a whole message, with its size: its tag, and what it says.
            ///
            /// # Errors
            ///
            /// [`P9Error`]: the bytes are not one message of this direction.
            pub fn parse(message: &'a [u8]) -> Result<(u16, Self), P9Error> {
                let mut reader = Reader::new(message);
                let Header { kind, tag } = Header::take(&mut reader, message.len())?;
                let read = match kind {
                    $($number => Self::$kind { $($field: Field::take(&mut reader)?),* },)+
                    kind => return Err(P9Error::Kind { kind }),
                };
                reader.finish()?;
                Ok((tag, read))
            }

            /// Appends the whole message.
            ///
            /// # Errors
            ///
            /// [`P9Error::TooLong`]: a string or the whole. Nothing was appended.
            pub fn put(&self, tag: u16, out: &mut Vec<u8>) -> Result<(), P9Error> {
                let start = out.len();
                self.put_all(tag, out).inspect_err(|_| out.truncate(start))
            }

            fn put_all(&self, tag: u16, out: &mut Vec<u8>) -> Result<(), P9Error> {
                let start = out.len();
                out.extend_from_slice(&[0; 4]);
                self.kind().put(out)?;
                tag.put(out)?;
                match self {
                    $(Self::$kind { $($field),* } => { $($field.put(out)?;)* })+
                }
                let (bytes, limit) = (out.len() - start, u32::MAX as usize);
                let size = u32::try_from(bytes).map_err(|_| P9Error::TooLong { bytes, limit })?;
                out[start..start + 4].copy_from_slice(&size.to_le_bytes());
                Ok(())
            }
        }
    };
}

messages! {
    /// A message of a client.
    Request {
        /// The room of a file system.
        Statfs "statfs" = 8 { fid: u32 }
        /// Opens what a fid names.
        Lopen "lopen" = 12 { fid: u32, flags: u32 }
        /// Makes a file in the directory of a fid, and opens it: the fid is the file's.
        Lcreate "lcreate" = 14 { fid: u32, name: &'a [u8], flags: u32, mode: u32, gid: u32 }
        /// Makes a symbolic link.
        Symlink "symlink" = 16 { dfid: u32, name: &'a [u8], target: &'a [u8], gid: u32 }
        /// Makes a special file.
        Mknod "mknod" = 18 { dfid: u32, name: &'a [u8], mode: u32, major: u32, minor: u32, gid: u32 }
        /// Moves what a fid names.
        Rename "rename" = 20 { fid: u32, dfid: u32, name: &'a [u8] }
        /// What a symbolic link holds.
        Readlink "readlink" = 22 { fid: u32 }
        /// Attributes.
        Getattr "getattr" = 24 { fid: u32, mask: u64 }
        /// Changes attributes.
        Setattr "setattr" = 26 { fid: u32, to: SetStat }
        /// Makes a fid of an extended attribute, or of their list.
        Xattrwalk "xattrwalk" = 30 { fid: u32, newfid: u32, name: &'a [u8] }
        /// Turns a fid into one to write an extended attribute.
        Xattrcreate "xattrcreate" = 32 { fid: u32, name: &'a [u8], size: u64, flags: u32 }
        /// Entries of an open directory.
        Readdir "readdir" = 40 { fid: u32, offset: u64, count: u32 }
        /// Brings a file to the medium.
        Fsync "fsync" = 50 { fid: u32, datasync: u32 }
        /// Takes a lock, or gives it back.
        Lock "lock" = 52 { fid: u32, lock: Lock<'a> }
        /// Looks for a lock in the way of this one.
        Getlock "getlock" = 54 { fid: u32, lock: GetLock<'a> }
        /// Makes another name of what a fid names.
        Link "link" = 70 { dfid: u32, fid: u32, name: &'a [u8] }
        /// Makes a directory.
        Mkdir "mkdir" = 72 { dfid: u32, name: &'a [u8], mode: u32, gid: u32 }
        /// Moves a name.
        Renameat "renameat" = 74 { olddirfid: u32, oldname: &'a [u8], newdirfid: u32, newname: &'a [u8] }
        /// Removes a name.
        Unlinkat "unlinkat" = 76 { dirfid: u32, name: &'a [u8], flags: u32 }
        /// Begins a session.
        Version "version" = 100 { msize: u32, version: &'a [u8] }
        /// Begins to prove a user.
        Auth "auth" = 102 { afid: u32, uname: &'a [u8], aname: &'a [u8], n_uname: u32 }
        /// Makes a fid of the root of an export.
        Attach "attach" = 104 { fid: u32, afid: u32, uname: &'a [u8], aname: &'a [u8], n_uname: u32 }
        /// Waits for a request, or has it answered no more.
        Flush "flush" = 108 { oldtag: u16 }
        /// Makes a fid of what is found by names.
        Walk "walk" = 110 { fid: u32, newfid: u32, names: Names<'a> }
        /// Bytes of an open file.
        Read "read" = 116 { fid: u32, offset: u64, count: u32 }
        /// Writes bytes of an open file.
        Write "write" = 118 { fid: u32, offset: u64, data: Data<'a> }
        /// Gives a fid back.
        Clunk "clunk" = 120 { fid: u32 }
        /// Removes what a fid names, and gives the fid back.
        Remove "remove" = 122 { fid: u32 }
    }
}

messages! {
    /// A message of a server.
    Reply {
        /// A request failed, with a number of errno(3) on Linux.
        Lerror "lerror" = 7 { ecode: u32 }
        /// To Tstatfs.
        Statfs "statfs" = 9 { stat: StatFs }
        /// To Tlopen.
        Lopen "lopen" = 13 { qid: Qid, iounit: u32 }
        /// To Tlcreate.
        Lcreate "lcreate" = 15 { qid: Qid, iounit: u32 }
        /// To Tsymlink.
        Symlink "symlink" = 17 { qid: Qid }
        /// To Tmknod.
        Mknod "mknod" = 19 { qid: Qid }
        /// To Trename.
        Rename "rename" = 21 {}
        /// To Treadlink.
        Readlink "readlink" = 23 { target: &'a [u8] }
        /// To Tgetattr.
        Getattr "getattr" = 25 { stat: Stat }
        /// To Tsetattr.
        Setattr "setattr" = 27 {}
        /// To Txattrwalk.
        Xattrwalk "xattrwalk" = 31 { size: u64 }
        /// To Txattrcreate.
        Xattrcreate "xattrcreate" = 33 {}
        /// To Treaddir: [`DirEntry`](super::DirEntry) after entry.
        Readdir "readdir" = 41 { data: Data<'a> }
        /// To Tfsync.
        Fsync "fsync" = 51 {}
        /// To Tlock: 0 granted, 1 blocked, 2 failed, 3 the server has just started.
        Lock "lock" = 53 { status: u8 }
        /// To Tgetlock.
        Getlock "getlock" = 55 { lock: GetLock<'a> }
        /// To Tlink.
        Link "link" = 71 {}
        /// To Tmkdir.
        Mkdir "mkdir" = 73 { qid: Qid }
        /// To Trenameat.
        Renameat "renameat" = 75 {}
        /// To Tunlinkat.
        Unlinkat "unlinkat" = 77 {}
        /// To Tversion.
        Version "version" = 101 { msize: u32, version: &'a [u8] }
        /// To Tauth.
        Auth "auth" = 103 { aqid: Qid }
        /// To Tattach.
        Attach "attach" = 105 { qid: Qid }
        /// To Tflush.
        Flush "flush" = 109 {}
        /// To Twalk: as many as names were found.
        Walk "walk" = 111 { qids: Qids<'a> }
        /// To Tread.
        Read "read" = 117 { data: Data<'a> }
        /// To Twrite.
        Write "write" = 119 { count: u32 }
        /// To Tclunk.
        Clunk "clunk" = 121 {}
        /// To Tremove.
        Remove "remove" = 123 {}
    }
}

impl Reply<'_> {
    /// Appends an Rread or Rreaddir as far as its data, of which `bytes` follow.
    pub fn put_read_head(kind: u8, tag: u16, bytes: u32, out: &mut Vec<u8>) {
        let size = (HEADER_BYTES as u32 + 4).saturating_add(bytes);
        out.extend_from_slice(&size.to_le_bytes());
        out.push(kind);
        out.extend_from_slice(&tag.to_le_bytes());
        out.extend_from_slice(&bytes.to_le_bytes());
    }
}
