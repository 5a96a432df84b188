//! Which program answers which number and version.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use ksf_proto::oncrpc::Accepted;

use super::local::AnyProgram;
use super::logged::{LoggedProgram, OfLogged};
use super::program::ShardProgram;

/// The programs of a server.
///
/// Several entries may share a number as long as their versions do not overlap:
/// NFSv3 and NFSv4 can come from different hands.
#[derive(Clone, Default)]
pub struct ProgramTable {
    /// In the order of registration; few enough that a scan is the fastest look-up.
    entries: Vec<Entry>,
}

#[derive(Clone)]
struct Entry {
    number: u32,
    low: u32,
    high: u32,
    program: Arc<dyn AnyProgram>,
}

impl ProgramTable {
    /// A table without programs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a program, with state or without.
    ///
    /// # Errors
    ///
    /// It answers no version, or one that another program answers.
    pub fn register(&mut self, program: impl ShardProgram) -> Result<(), TableError> {
        self.register_shared(Arc::new(program))
    }

    /// Adds a program whose replies wait for logs.
    ///
    /// # Errors
    ///
    /// As [`ProgramTable::register`].
    pub fn register_logged(&mut self, program: impl LoggedProgram) -> Result<(), TableError> {
        self.register(OfLogged(program))
    }

    /// Adds a program that others hold as well.
    ///
    /// # Errors
    ///
    /// As [`ProgramTable::register`].
    pub fn register_shared(&mut self, program: Arc<impl ShardProgram>) -> Result<(), TableError> {
        let number = program.number();
        let (low, high) = program.versions().into_inner();
        if low > high {
            return Err(TableError::NoVersion { name: program.name().to_owned(), number, low, high });
        }
        if let Some(other) = self.of(number).find(|e| low <= e.high && e.low <= high) {
            return Err(TableError::Overlap {
                name: program.name().to_owned(),
                number,
                versions: low..=high,
                other: other.program.name().to_owned(),
                other_versions: other.low..=other.high,
            });
        }
        self.entries.push(Entry { number, low, high, program });
        Ok(())
    }

    /// Number and versions of every entry.
    pub fn programs(&self) -> impl Iterator<Item = (u32, RangeInclusive<u32>)> + '_ {
        self.entries.iter().map(|e| (e.number, e.low..=e.high))
    }

    /// The place of the program that answers, or the error to answer.
    #[inline]
    pub(super) fn find(&self, number: u32, version: u32) -> Result<usize, Accepted> {
        let answers = |e: &Entry| e.number == number && e.low <= version && version <= e.high;
        self.entries.iter().position(answers).ok_or_else(|| self.why_not(number))
    }

    /// The program at a place that [`Self::find`] gave.
    #[inline]
    pub(super) fn program(&self, at: usize) -> &dyn AnyProgram {
        &*self.entries[at].program
    }

    /// All programs, in the order of their places.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<dyn AnyProgram>> {
        self.entries.iter().map(|e| &e.program)
    }

    /// PROG_MISMATCH tells the lowest and the highest version (RFC 5531 section
    /// 9), also where versions between them are missing.
    #[cold]
    fn why_not(&self, number: u32) -> Accepted {
        let low = self.of(number).map(|e| e.low).min();
        let high = self.of(number).map(|e| e.high).max();
        match (low, high) {
            (Some(low), Some(high)) => Accepted::ProgMismatch { low, high },
            _ => Accepted::ProgUnavail,
        }
    }

    fn of(&self, number: u32) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |e| e.number == number)
    }
}

impl fmt::Debug for ProgramTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.entries.iter().map(|e| {
            let Entry { number, low, high, .. } = e;
            (e.program.name(), format!("{number} v{low}-{high}"))
        });
        f.debug_map().entries(entries).finish()
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
    use super::super::{NullProgram, mount_null, nfs_null};
    use super::*;

    fn null(number: u32, versions: RangeInclusive<u32>) -> NullProgram {
        NullProgram::new("test", number, versions)
    }

    fn find(table: &ProgramTable, number: u32, version: u32) -> Result<&str, Accepted> {
        table.find(number, version).map(|at| table.program(at).name())
    }

    #[test]
    fn finds_by_number_and_version() {
        let mut table = ProgramTable::new();
        table.register(nfs_null()).unwrap();
        table.register(mount_null()).unwrap();
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
        table.register(nfs_null()).unwrap();
        assert_eq!(
            table.register(null(100_003, 2..=4)).unwrap_err().to_string(),
            "program test (100003) versions 2-4 overlap nfs versions 3-3; register each version once"
        );
    }
}
