//! Programs that know procedure 0 alone.

use std::ops::RangeInclusive;

use ksf_proto::oncrpc::{MOUNT_PROGRAM, NFS_PROGRAM, PROC_NULL};

use super::call::{ProcError, RpcCall};
use super::program::Program;
use super::reply::{Answered, RpcReply};

/// A program that answers NULL, and PROC_UNAVAIL to everything else.
///
/// NULL takes void. Bytes behind the verifier are therefore arguments that
/// cannot be decoded, and are answered GARBAGE_ARGS, as RFC 5531 section 9 asks.
/// (The servers in use, Linux nfsd and those on libtirpc, decode void by looking
/// at nothing and answer SUCCESS. A client that means NULL sends no bytes, so
/// being exact costs nobody and shows a broken encoder early.)
#[derive(Clone, Debug)]
pub struct NullProgram {
    name: String,
    number: u32,
    versions: RangeInclusive<u32>,
}

impl NullProgram {
    /// Answers NULL of `number` in all `versions`.
    pub fn new(name: impl Into<String>, number: u32, versions: RangeInclusive<u32>) -> Self {
        Self { name: name.into(), number, versions }
    }
}

/// NULL of NFSv3 (RFC 1813).
pub fn nfs_null() -> NullProgram {
    NullProgram::new("nfs", NFS_PROGRAM, 3..=3)
}

/// NULL of MOUNTv3 (RFC 1813 appendix I).
pub fn mount_null() -> NullProgram {
    NullProgram::new("mount", MOUNT_PROGRAM, 3..=3)
}

impl Program for NullProgram {
    fn name(&self) -> &str {
        &self.name
    }

    fn number(&self) -> u32 {
        self.number
    }

    fn versions(&self) -> RangeInclusive<u32> {
        self.versions.clone()
    }

    #[inline]
    fn call(&self, call: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered {
        match call.procedure {
            PROC_NULL if call.args.is_empty() => reply.void(),
            PROC_NULL => reply.error(ProcError::GarbageArgs),
            _ => reply.error(ProcError::ProcUnavail),
        }
    }
}
