//! What requests ask for, and in which order.

use crate::drive::protocol;
use crate::files::shares::Draws;
use crate::files::{FileOperation, Shares};

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Attributes of a file.
    Getattr,
    /// A fid of a file by its name; or the end of such a fid, if there is one.
    Walk,
    /// Bytes of a file.
    Read,
    /// Bytes of a file, the ones that it has, or is to have.
    Write,
}

/// Shares of operations, as `getattr=64,read=7`.
pub type Mix = Shares<Operation>;

impl Operation {
    /// Bytes of the shortest reply to it.
    pub(super) fn reply_bytes(self, io_bytes: usize) -> usize {
        match self {
            Operation::Getattr => 160,
            // Rclunk.
            Operation::Walk => 7,
            Operation::Read => 11 + io_bytes,
            Operation::Write => 11,
        }
    }
}

impl FileOperation for Operation {
    const ALL: &'static [Self] = &[Self::Getattr, Self::Walk, Self::Read, Self::Write];
    const NOUN: &'static str = "operation";
    const PUBLISHED: Option<(&'static str, &'static str)> = None;

    fn name(self) -> &'static str {
        ["getattr", "walk", "read", "write"][self as usize]
    }

    fn number(self) -> u8 {
        self as u8
    }
}

/// The operations of a run.
#[derive(Debug, Clone)]
pub(super) enum Load {
    /// Drawn by shares.
    Mix(Mix),
    /// Each connection writes its file in so many parts, reads them, and begins anew.
    Ior { blocks: u64 },
}

impl Load {
    pub(super) fn has(&self, operation: Operation) -> bool {
        match self {
            Load::Mix(mix) => mix.has(operation),
            Load::Ior { .. } => matches!(operation, Operation::Read | Operation::Write),
        }
    }
}

/// The operations of a thread, which has one connection.
#[derive(Debug)]
pub(super) enum Sequence {
    Drawn(Draws<Operation>),
    Ior { blocks: u64, at: u64 },
}

impl Sequence {
    pub(super) fn new(load: &Load, seed: u64, thread: usize) -> Self {
        match load {
            Load::Mix(mix) => Sequence::Drawn(Draws::new(mix, seed, thread)),
            Load::Ior { blocks } => Sequence::Ior { blocks: *blocks, at: 0 },
        }
    }
}

impl protocol::Mix for Sequence {
    type Operation = Operation;

    fn draw(&mut self) -> Operation {
        match self {
            Sequence::Drawn(draws) => draws.draw(),
            Sequence::Ior { blocks, at } => {
                let operation = if *at < *blocks { Operation::Write } else { Operation::Read };
                *at = (*at + 1) % (2 * *blocks);
                operation
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::protocol::Mix as _;

    #[test]
    fn ior_writes_all_of_a_file_and_reads_it() {
        let mut sequence = Sequence::new(&Load::Ior { blocks: 2 }, 1, 0);
        use Operation::{Read, Write};
        let drawn: Vec<Operation> = (0..6).map(|_| sequence.draw()).collect();
        assert_eq!(drawn, [Write, Write, Read, Read, Write, Write]);
    }

    #[test]
    fn operations_have_their_place() {
        for (at, operation) in Operation::ALL.iter().enumerate() {
            assert_eq!(usize::from(operation.number()), at);
        }
        let error = "getattr=1,stat=2".parse::<Mix>().unwrap_err();
        assert_eq!(error, "\"stat\" is no operation; write NAME=SHARE,...; the names are getattr, walk, read, write");
    }
}
