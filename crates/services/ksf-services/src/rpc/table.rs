//! Which programs a service answers, and the way from a message to its answer.

use std::any::Any;
use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::sync::Arc;

use ksf::logged::Mode;
use ksf::{Message, Reply};
use ksf_proto::oncrpc::{Accepted, Call, CallError, MOUNT_PROGRAM, NFS_PROGRAM, ReplyStatus};

use super::call::RpcCall;
use super::reply::{Answered, Resumed, RpcReply};
use super::stats::RpcStats;

/// A program, or some of its versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    name: Cow<'static, str>,
    number: u32,
    versions: RangeInclusive<u32>,
}

impl Program {
    /// NFSv3 (RFC 1813).
    pub const NFS_V3: Self = Self { name: Cow::Borrowed("nfs"), number: NFS_PROGRAM, versions: 3..=3 };
    /// MOUNTv3 (RFC 1813 appendix I).
    pub const MOUNT_V3: Self = Self { name: Cow::Borrowed("mount"), number: MOUNT_PROGRAM, versions: 3..=3 };

    /// The `versions` of the program `number`; the name is for people.
    pub fn new(name: impl Into<Cow<'static, str>>, number: u32, versions: RangeInclusive<u32>) -> Self {
        Self { name: name.into(), number, versions }
    }

    fn answers(&self, number: u32, version: u32) -> bool {
        self.number == number && self.versions.contains(&version)
    }
}

/// The programs of a service, and what went wrong with their calls.
///
/// A service that serves RPC programs hands each message to [`call`](Self::call), and each state that comes back to
/// [`resume`](Self::resume).
///
/// Several entries may share a number as long as their versions do not overlap: NFSv3 and NFSv4 can come from different hands.
#[derive(Clone, Debug, Default)]
pub struct ProgramTable {
    /// In the order of registration; few enough that a scan is the fastest look-up.
    programs: Vec<Program>,
    stats: Arc<RpcStats>,
}

impl ProgramTable {
    /// A table without programs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a program.
    ///
    /// # Errors
    ///
    /// It answers no version, or one that another program answers.
    pub fn register(&mut self, program: Program) -> Result<(), TableError> {
        let Program { ref name, number, ref versions } = program;
        let (low, high) = (*versions.start(), *versions.end());
        if versions.is_empty() {
            return Err(TableError::NoVersion { name: name.to_string(), number, low, high });
        }
        if let Some(other) = self.of(number).find(|e| low <= *e.versions.end() && *e.versions.start() <= high) {
            return Err(TableError::Overlap {
                name: name.to_string(),
                number,
                versions: low..=high,
                other: other.name.to_string(),
                other_versions: other.versions.clone(),
            });
        }
        self.programs.push(program);
        Ok(())
    }

    /// Number and versions of every entry.
    pub fn programs(&self) -> impl Iterator<Item = (u32, RangeInclusive<u32>)> + '_ {
        self.programs.iter().map(|e| (e.number, e.versions.clone()))
    }

    /// Has `answer` answer the call in a message, if it is one to a program and version of this table. Every other call is answered
    /// with the error of RFC 5531 section 9. A message that has no answer closes a stream (the bytes behind it are not to be
    /// trusted) and is dropped as a datagram; both are counted by cause.
    #[inline]
    pub fn call<M: Mode>(
        &self,
        message: &Message<'_>,
        reply: &mut Reply<'_, M>,
        answer: impl FnOnce(&RpcCall<'_>, RpcReply<'_, M>) -> Answered,
    ) {
        let call = match Call::parse(message.bytes()) {
            Ok(call) => call,
            Err(error) => return self.refuse(error, reply),
        };
        let found = self.find(call.program, call.version);
        let reply = RpcReply::new(call.xid, reply, &self.stats);
        let Answered { .. } = match found {
            Ok(_) => answer(&RpcCall::new(call, message), reply),
            Err(accepted) => reply.plain().status(ReplyStatus::Accepted(accepted)),
        };
    }

    #[cold]
    fn refuse<M: Mode>(&self, error: CallError, reply: &mut Reply<'_, M>) {
        if let CallError::Unanswerable(why) = error {
            self.stats.count_unanswerable(why);
            reply.close();
        } else if let Some((xid, status)) = error.reply() {
            let Answered { .. } = RpcReply::new(xid, reply, &self.stats).plain().status(status);
        }
    }

    /// Has `answer` go on with a call that was deferred and [resumed](super::RpcDeferred::resume) with this state.
    pub fn resume<M: Mode>(
        &self,
        state: Box<dyn Any + Send>,
        reply: &mut Reply<'_, M>,
        answer: impl FnOnce(Box<dyn Any + Send>, RpcReply<'_, M>) -> Answered,
    ) {
        // The framework brings back what `RpcDeferred::resume` gave it, and nothing else is resumed by such a service.
        let Ok(resumed) = state.downcast::<Resumed>() else { return reply.close() };
        let Answered { .. } = answer(resumed.state, RpcReply::new(resumed.xid, reply, &self.stats));
    }

    /// How often each error was answered, or a message had no answer: for [`Service::counters`](ksf::Service::counters).
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        self.stats.read()
    }

    /// The program that answers, or the error to answer.
    #[inline]
    fn find(&self, number: u32, version: u32) -> Result<&Program, Accepted> {
        self.programs.iter().find(|e| e.answers(number, version)).ok_or_else(|| self.why_not(number))
    }

    /// PROG_MISMATCH tells the lowest and the highest version (RFC 5531 section
    /// 9), also where versions between them are missing.
    #[cold]
    fn why_not(&self, number: u32) -> Accepted {
        let low = self.of(number).map(|e| *e.versions.start()).min();
        let high = self.of(number).map(|e| *e.versions.end()).max();
        match (low, high) {
            (Some(low), Some(high)) => Accepted::ProgMismatch { low, high },
            _ => Accepted::ProgUnavail,
        }
    }

    fn of(&self, number: u32) -> impl Iterator<Item = &Program> {
        self.programs.iter().filter(move |e| e.number == number)
    }
}

/// Why a program cannot be registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The range of versions is empty.
    #[error("program {name} ({number}) has no version: its range {low}-{high} is empty")]
    NoVersion {
        /// Name of the program.
        name: String,
        /// Its number.
        number: u32,
        /// First version.
        low: u32,
        /// Last version, below the first.
        high: u32,
    },
    /// Another entry answers some of the versions already.
    #[error(
        "program {name} ({number}) versions {}-{} overlap {other} versions {}-{}; \
         register each version once",
        .versions.start(), .versions.end(), .other_versions.start(), .other_versions.end()
    )]
    Overlap {
        /// Name of the program.
        name: String,
        /// Number of both.
        number: u32,
        /// Versions of the program.
        versions: RangeInclusive<u32>,
        /// Name of the other.
        other: String,
        /// Versions of the other.
        other_versions: RangeInclusive<u32>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn null(number: u32, versions: RangeInclusive<u32>) -> Program {
        Program::new("test", number, versions)
    }

    fn find(table: &ProgramTable, number: u32, version: u32) -> Result<&str, Accepted> {
        table.find(number, version).map(|program| &*program.name)
    }

    #[test]
    fn finds_by_number_and_version() {
        let mut table = ProgramTable::new();
        table.register(Program::NFS_V3).unwrap();
        table.register(Program::MOUNT_V3).unwrap();
        table.register(null(100_003, 5..=6)).unwrap();
        assert_eq!(find(&table, 100_003, 3), Ok("nfs"));
        assert_eq!(find(&table, 100_003, 5), Ok("test"));
        assert_eq!(find(&table, 100_003, 6), Ok("test"));
        assert_eq!(find(&table, 100_005, 3), Ok("mount"));
        for version in [0, 2, 4, 7, u32::MAX] {
            assert_eq!(
                find(&table, 100_003, version),
                Err(Accepted::ProgMismatch { low: 3, high: 6 }),
                "version {version}"
            );
        }
        assert_eq!(find(&table, 100_004, 3), Err(Accepted::ProgUnavail));
    }

    #[test]
    fn refuses_overlaps_and_empty_ranges() {
        let mut table = ProgramTable::new();
        table.register(null(7, 2..=4)).unwrap();
        for versions in [2..=2, 4..=9, 0..=2, 0..=u32::MAX] {
            let error = table.register(null(7, versions)).unwrap_err();
            assert!(matches!(error, TableError::Overlap { number: 7, .. }));
        }
        table.register(null(7, 5..=5)).unwrap();
        table.register(null(7, 0..=1)).unwrap();
        #[expect(clippy::reversed_empty_ranges, reason = "an empty range is the point")]
        let empty = table.register(null(8, 3..=2)).unwrap_err();
        assert!(matches!(empty, TableError::NoVersion { number: 8, .. }));
        assert_eq!(table.programs().collect::<Vec<_>>(), [(7, 2..=4), (7, 5..=5), (7, 0..=1)]);
    }

    #[test]
    fn errors_name_both_sides() {
        let mut table = ProgramTable::new();
        table.register(Program::NFS_V3).unwrap();
        assert_eq!(
            table.register(null(100_003, 2..=4)).unwrap_err().to_string(),
            "program test (100003) versions 2-4 overlap nfs versions 3-3; register each version once"
        );
    }
}
