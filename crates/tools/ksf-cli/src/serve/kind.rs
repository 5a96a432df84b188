//! What a kind of service is: its keys in the file, its defaults, and how it is started.

use std::fmt::Debug;

use ksf::limits::Limits;

use super::args::{ProcessArgs, ServerArgs};
use super::launch::Launch;
use super::running::{Running, ShardCounts};
use crate::output::Failure;
use crate::toml_file::{Mistake, Table};

/// One kind of service, as its table in the file or its command describes it.
pub(crate) trait ServiceKind: Debug {
    /// Reads and checks the keys that this kind has besides the [common ones](super::config::CommonTable).
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake>
    where
        Self: Sized;

    /// The port on loopback where it listens if nothing is said; `None`: an address must be given.
    fn port(&self) -> Option<u16>;

    /// Whether it answers datagrams, too: then an address without a transport stands for TCP and UDP.
    fn has_datagrams(&self) -> bool {
        true
    }

    /// Whether a program in the kernel can answer for it.
    fn has_kernel_half(&self) -> bool {
        false
    }

    /// Its limits where neither file nor flags say more.
    fn limits(&self) -> Limits {
        Limits::default()
    }

    /// Descriptors that it may have besides those of its connections and a few of its own: of files, and of connections to backends.
    fn descriptors_max(&self, _: &Limits) -> usize {
        0
    }

    /// Starts it. What is to be kept while it runs and to be ended is its [state](super::running::State).
    fn start(&self, launch: Launch) -> Result<Running, Failure>;
}

/// One service, described by the flags of a command.
pub(crate) struct Single<K> {
    pub(crate) name: String,
    pub(crate) kind: K,
    pub(crate) server: ServerArgs,
    pub(crate) process: ProcessArgs,
    pub(crate) reporter: Option<Reporter>,
}

/// Starts to report what the shards of the service count. It is given what reads them, and ends by itself when there is
/// nothing left to read.
pub(crate) type Reporter = Box<dyn FnOnce(ShardReader) -> Result<(), Failure>>;

/// Reads what the shards count; `None` once the service drains.
pub(crate) type ShardReader = Box<dyn Fn() -> Option<Vec<ShardCounts>> + Send>;

impl<K> Single<K> {
    pub(crate) fn new(name: &str, kind: K, server: ServerArgs, process: ProcessArgs) -> Self {
        Single { name: name.to_owned(), kind, server, process, reporter: None }
    }

    /// The same with its kind in the list of kinds.
    pub(crate) fn of<L>(self, list: fn(K) -> L) -> Single<L> {
        let Single { name, kind, server, process, reporter } = self;
        Single { name, kind: list(kind), server, process, reporter }
    }
}
