//! Account of a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::shares::Counts;

/// Shares of a connection in the file layer: its turn on the lanes, its open files, and its files with uncommitted data. Clones are
/// the same account; the default is a new one.
#[derive(Clone, Debug)]
pub struct Account(Arc<Owned>);

#[derive(Debug)]
struct Owned {
    number: u64,
    open_files: Counts,
    uncommitted_files: Counts,
}

impl Account {
    /// Number that no other account of this process has.
    pub(crate) fn number(&self) -> u64 {
        self.0.number
    }

    /// Open files of the connection.
    pub(crate) fn open_files(&self) -> &Counts {
        &self.0.open_files
    }

    /// Files with uncommitted data that count for the connection.
    pub(crate) fn uncommitted_files(&self) -> &Counts {
        &self.0.uncommitted_files
    }
}

impl Default for Account {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(Arc::new(Owned {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            open_files: Counts::default(),
            uncommitted_files: Counts::default(),
        }))
    }
}
