//! Account of a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ops::OpenCounts;

/// Shares of a connection in the file layer: its turn on the lanes, and its open files. Clones are the same account; the default is
/// a new one.
#[derive(Clone, Debug)]
pub struct Account(Arc<Shares>);

#[derive(Debug)]
struct Shares {
    number: u64,
    open_files: OpenCounts,
}

impl Account {
    /// Number that no other account of this process has.
    pub(crate) fn number(&self) -> u64 {
        self.0.number
    }

    /// Open files of the connection.
    pub(crate) fn open_files(&self) -> &OpenCounts {
        &self.0.open_files
    }
}

impl Default for Account {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(Arc::new(Shares { number: NEXT.fetch_add(1, Ordering::Relaxed), open_files: OpenCounts::default() }))
    }
}
