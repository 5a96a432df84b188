//! What the loads of file servers share: files of which every byte is known (`content`), the options for them (`args`), and
//! operations drawn by their shares (`shares`).

pub(crate) mod args;
pub(crate) mod content;
pub(crate) mod shares;

use crate::record::Fault;

pub use self::args::FileArgs;
pub use self::shares::{FileOperation, Shares};

/// What is wrong with a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// It reports a failure, with the protocol's number for it.
    Status(u32),
    /// It ends too early, or has a value that cannot be there.
    Malformed(&'static str),
    /// A value in it is another one than that of the file.
    Untrue(&'static str),
}

impl Wrong {
    /// The fault that is counted.
    pub(crate) fn fault(&self) -> Fault {
        match self {
            Wrong::Status(_) => Fault::Rejected,
            Wrong::Malformed(_) => Fault::Malformed,
            Wrong::Untrue(_) => Fault::Corrupt,
        }
    }
}
