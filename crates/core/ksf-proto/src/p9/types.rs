//! What several fields stand for together.

use super::field::{Field, P9Error, Reader};

macro_rules! group {
    ($(#[$doc:meta])* $name:ident $(<$life:lifetime>)? { $($(#[$field_doc:meta])* $field:ident: $type:ty,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name $(<$life>)? {
            $($(#[$field_doc])* pub $field: $type,)+
        }

        impl<'a> Field<'a> for $name $(<$life>)? {
            fn take(reader: &mut Reader<'a>) -> Result<Self, P9Error> {
                Ok(Self { $($field: Field::take(reader)?,)+ })
            }

            fn put(&self, out: &mut Vec<u8>) -> Result<(), P9Error> {
                $(self.$field.put(out)?;)+
                Ok(())
            }
        }
    };
}

group! {
    /// Names an object, and a state of its content.
    Qid {
        /// What it is: [`qid_kind`](super::qid_kind).
        kind: u8,
        /// Another number when the content has changed.
        version: u32,
        /// The same number for the same object.
        path: u64,
    }
}

group! {
    /// Attributes of an object (Rgetattr).
    Stat {
        /// Which of them are there: [`STAT_BASIC`](super::STAT_BASIC).
        valid: u64,
        /// The object.
        qid: Qid,
        /// Type and permissions as in stat(2).
        mode: u32,
        /// The owner.
        uid: u32,
        /// The group.
        gid: u32,
        /// Names of the object.
        nlink: u64,
        /// Numbers of a device, as stat(2) has them.
        rdev: u64,
        /// Length in bytes.
        size: u64,
        /// Bytes that are good to read and write at a time.
        block_bytes: u64,
        /// Blocks of 512 bytes that it takes.
        blocks: u64,
        /// Last access: seconds.
        atime_seconds: u64,
        /// And nanoseconds.
        atime_nanos: u64,
        /// Last change of the content: seconds.
        mtime_seconds: u64,
        /// And nanoseconds.
        mtime_nanos: u64,
        /// Last change: seconds.
        ctime_seconds: u64,
        /// And nanoseconds.
        ctime_nanos: u64,
        /// Creation: seconds.
        btime_seconds: u64,
        /// And nanoseconds.
        btime_nanos: u64,
        /// Generation of the inode.
        generation: u64,
        /// Counts changes of the content.
        data_version: u64,
    }
}

group! {
    /// Attributes to be set (Tsetattr).
    SetStat {
        /// Which of them: [`set_bit`](super::set_bit).
        valid: u32,
        /// Permissions.
        mode: u32,
        /// The owner.
        uid: u32,
        /// The group.
        gid: u32,
        /// Length in bytes.
        size: u64,
        /// Last access: seconds.
        atime_seconds: u64,
        /// And nanoseconds.
        atime_nanos: u64,
        /// Last change of the content: seconds.
        mtime_seconds: u64,
        /// And nanoseconds.
        mtime_nanos: u64,
    }
}

group! {
    /// The room of a file system (Rstatfs).
    StatFs {
        /// Its kind, as statfs(2) has it.
        kind: u32,
        /// Bytes of a block.
        block_bytes: u32,
        /// Blocks in all.
        blocks: u64,
        /// Free blocks.
        blocks_free: u64,
        /// Free blocks without those that are reserved for root.
        blocks_available: u64,
        /// Inodes in all.
        files: u64,
        /// Free inodes.
        files_free: u64,
        /// Its id.
        id: u64,
        /// Bytes of a name, at most.
        name_bytes_max: u32,
    }
}

group! {
    /// A lock that is asked for (Tlock).
    Lock<'a> {
        /// 0 for reading, 1 for writing, 2: is given back.
        kind: u8,
        /// 1: the client would wait.
        flags: u32,
        /// The first byte.
        start: u64,
        /// Bytes; 0: to the end.
        length: u64,
        /// The process at the client.
        process: u32,
        /// The client.
        client: &'a [u8],
    }
}

group! {
    /// A lock that is looked for (Tgetlock), and that was found (Rgetlock).
    GetLock<'a> {
        /// 0 for reading, 1 for writing, 2: there is none.
        kind: u8,
        /// The first byte.
        start: u64,
        /// Bytes; 0: to the end.
        length: u64,
        /// The process at the client.
        process: u32,
        /// The client.
        client: &'a [u8],
    }
}

group! {
    /// An entry in the data of Rreaddir.
    DirEntry<'a> {
        /// The object.
        qid: Qid,
        /// Where a listing goes on behind this entry.
        offset: u64,
        /// Its type: DT_REG and others of readdir(3).
        kind: u8,
        /// Its name.
        name: &'a [u8],
    }
}

impl<'a> DirEntry<'a> {
    /// Bytes of an entry without its name.
    pub const HEAD_BYTES: usize = 13 + 8 + 1 + 2;

    /// Appends the entry.
    ///
    /// # Errors
    ///
    /// [`P9Error::TooLong`]: the name. Nothing was appended.
    pub fn put(&self, out: &mut Vec<u8>) -> Result<(), P9Error> {
        let start = out.len();
        Field::put(self, out).inspect_err(|_| out.truncate(start))
    }

    /// The entries in the data of Rreaddir, up to an error.
    pub fn all(data: &'a [u8]) -> impl Iterator<Item = Result<Self, P9Error>> {
        let mut reader = Some(Reader::new(data));
        std::iter::from_fn(move || {
            let at = reader.as_mut().filter(|at| !at.is_at_end())?;
            let entry = Self::take(at);
            if entry.is_err() {
                reader = None;
            }
            Some(entry)
        })
    }
}
