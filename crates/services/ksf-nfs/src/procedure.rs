//! The procedures of NFSv3 (RFC 1813 section 3.3).

macro_rules! procedures {
    ($($name:ident $text:literal,)+) => {
        /// A procedure; its number is its place.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Procedure {
            $(#[doc = concat!("`NFSPROC3_", $text, "`")] $name,)+
        }

        impl Procedure {
            /// All of them, by number.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The RFC's name, in small letters.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)+
                }
            }
        }
    };
}

procedures! {
    Null "null",
    Getattr "getattr",
    Setattr "setattr",
    Lookup "lookup",
    Access "access",
    Readlink "readlink",
    Read "read",
    Write "write",
    Create "create",
    Mkdir "mkdir",
    Symlink "symlink",
    Mknod "mknod",
    Remove "remove",
    Rmdir "rmdir",
    Rename "rename",
    Link "link",
    Readdir "readdir",
    Readdirplus "readdirplus",
    Fsstat "fsstat",
    Fsinfo "fsinfo",
    Pathconf "pathconf",
    Commit "commit",
}

impl Procedure {
    /// The procedure of a number.
    pub fn of(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

    /// It moves data or lists a folder, so it may wait for the medium many times.
    pub(crate) fn is_long(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::Readdir | Self::Readdirplus)
    }

    /// False where a call that is carried out a second time has the same end as the first: its reply need not be kept.
    pub fn changes(self) -> bool {
        matches!(
            self,
            Self::Setattr
                | Self::Write
                | Self::Create
                | Self::Mkdir
                | Self::Symlink
                | Self::Mknod
                | Self::Remove
                | Self::Rmdir
                | Self::Rename
                | Self::Link
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_rfc() {
        for (number, name) in
            [(0, "null"), (6, "read"), (7, "write"), (12, "remove"), (17, "readdirplus"), (21, "commit")]
        {
            assert_eq!(Procedure::of(number).map(Procedure::name), Some(name));
        }
        assert_eq!(Procedure::of(22), None);
    }
}
