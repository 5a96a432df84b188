//! A key-value server that acknowledges only what is on the medium: `kind = "store"`, `ksf store`.

mod memory;
mod slots;
mod tools;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueHint};
use ksf::limits::Limits;
use ksf_kv::disk::{BLOCK_BYTES, Disk, DiskError, DiskOptions};
use ksf_kv::offline::Recovery;
use ksf_kv::{Durability, EndError, Kv, Medium, Settings};
use serde::Deserialize;

use self::slots::{NodeTable, SlotMap};
use self::tools::StoreTool;
use crate::number::{Number, number};
use crate::output::{Failure, Status, say};
use crate::serve::args::{ProcessArgs, ServerArgs};
use crate::serve::kind::{ServiceKind, Single};
use crate::serve::launch::Launch;
use crate::serve::limits::help_of;
use crate::serve::running::{Running, State};
use crate::toml_file::{Mistake, Table};

/// Port of Redis.
const PORT: u16 = 6379;

/// Bytes of the log of a shard where nothing is said.
const LOG_BYTES: u64 = 1 << 30;
/// The least that cleaning can work with.
const LOG_BYTES_MIN: u64 = 8 << 20;
const LOG_BYTES_MAX: u64 = 500 * SEGMENT_BYTES_MAX;
/// The least memory with which a store is worth its name.
const MEMORY_BYTES_MIN: u64 = 1 << 20;
const MEMORY_BYTES_MAX: u64 = 1 << 50;
/// A segment holds the longest value, and is the unit in which space comes back.
const SEGMENT_BYTES_MIN: u64 = 2 << 20;
const SEGMENT_BYTES_MAX: u64 = 64 << 20;
/// Segments of a log, where these bounds allow it.
const SEGMENTS: u64 = 64;

/// Key-value server for clients of Redis and of HTTP: a write is acknowledged when it is on the disk
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, mut_args(help_of(limits())))]
pub(crate) struct StoreArgs {
    #[command(subcommand)]
    pub(crate) tool: Option<StoreTool>,
    /// Folder of the store; it is made where there is none
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, required = true)]
    data: Option<PathBuf>,
    /// Bytes of the log of each shard, when the store is made: all that it may take on the disk
    #[arg(long, value_name = "BYTES", default_value = "1g", value_parser = number::<LOG_BYTES_MIN, LOG_BYTES_MAX>)]
    log_bytes: u64,
    /// Bytes of memory for keys and values, above which values are read from the disk; keys, and values of at most 256 bytes,
    /// stay in memory [default: half of what this machine has]
    #[arg(long, value_name = "BYTES", value_parser = number::<MEMORY_BYTES_MIN, MEMORY_BYTES_MAX>)]
    memory_max: Option<u64>,
    /// When the reply to a write leaves: always (it is on the disk), every=MS (at once, while no write waits longer for the
    /// disk), none (at once)
    #[arg(long, value_name = "always|every=MS|none", default_value_t)]
    durability: Durability,
    /// What the logs are written through: block (any disk), pmem (persistent memory: a DAX file system with MAP_SYNC),
    /// pmem-memory (the same on tmpfs, for measuring: a power cut takes everything)
    #[arg(long, value_name = "block|pmem|pmem-memory", default_value_t)]
    medium: Medium,
    /// File with the password of the clients; without one only this machine is served
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    password_file: Option<PathBuf>,
    /// File with a map of slots, the same for all nodes: this store has a part of the keys, and clients of a cluster find the
    /// other parts
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "cluster_node")]
    cluster_file: Option<PathBuf>,
    /// Which node of that map this store is: its address there
    #[arg(long, value_name = "HOST:PORT", requires = "cluster_file")]
    cluster_node: Option<String>,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    process: ProcessArgs,
}

impl StoreArgs {
    pub(crate) fn single(self) -> Result<Single<Store>, Failure> {
        let Self {
            tool: _,
            data,
            log_bytes,
            memory_max,
            durability,
            medium,
            password_file,
            cluster_file,
            cluster_node,
            server,
            process,
        } = self;
        let Some(data) = data else {
            return Err(Failure::new(Status::Usage, "no folder was given").remedy("see ksf store --help"));
        };
        let slots = cluster_file.zip(cluster_node).map(|(file, node)| SlotMap::File { file, node });
        let store = Store { data, log_bytes, memory_max, durability, medium, password_file, slots };
        Ok(Single::new("store", store, server, process))
    }
}

/// What the table of a service says of a store.
#[derive(Debug, Deserialize)]
struct StoreTable {
    /// Its folder, relative to the file.
    data: PathBuf,
    /// Bytes of the log of each shard.
    log_bytes: Option<Number<LOG_BYTES_MIN, LOG_BYTES_MAX>>,
    /// Bytes of memory for keys and values.
    memory_max: Option<Number<MEMORY_BYTES_MIN, MEMORY_BYTES_MAX>>,
    /// When the reply to a write leaves.
    durability: Option<String>,
    /// What the logs are written through.
    medium: Option<String>,
    /// File with the password, relative to the file.
    password_file: Option<PathBuf>,
    /// A map of slots.
    cluster: Option<Vec<NodeTable>>,
    /// File with one, relative to the file.
    cluster_file: Option<PathBuf>,
    /// Which node of the map this is.
    cluster_node: Option<String>,
}

/// The store.
#[derive(Debug)]
pub(crate) struct Store {
    data: PathBuf,
    log_bytes: u64,
    memory_max: Option<u64>,
    durability: Durability,
    medium: Medium,
    password_file: Option<PathBuf>,
    slots: Option<SlotMap>,
}

impl ServiceKind for Store {
    fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let StoreTable {
            data,
            log_bytes,
            memory_max,
            durability,
            medium,
            password_file,
            cluster,
            cluster_file,
            cluster_node,
        } = table.take()?;
        let cluster_file = cluster_file.map(|file| table.folder().join(file));
        let slots = SlotMap::of(cluster, cluster_file, cluster_node).map_err(|error| table.mistake(error))?;
        let durability = durability.map_or(Ok(Durability::default()), |text| text.parse());
        let medium = medium.map_or(Ok(Medium::default()), |text| text.parse());
        Ok(Store {
            data: table.folder().join(data),
            log_bytes: log_bytes.map_or(LOG_BYTES, |number| number.0),
            memory_max: memory_max.map(|number| number.0),
            durability: durability.map_err(|error: String| table.mistake(format!("durability: {error}")))?,
            medium: medium.map_err(|error: String| table.mistake(format!("medium: {error}")))?,
            password_file: password_file.map(|file| table.folder().join(file)),
            slots,
        })
    }

    fn port(&self) -> Option<u16> {
        Some(PORT)
    }

    fn has_datagrams(&self) -> bool {
        false
    }

    fn limits(&self) -> Limits {
        limits()
    }

    fn start(&self, launch: Launch) -> Result<Running, Failure> {
        let password = self.password_file.as_deref().map(read_password).transpose()?;
        let memory_bytes_max = self.memory_max.unwrap_or_else(memory::half_of_the_machine);
        let memory_bytes_max = usize::try_from(memory_bytes_max).unwrap_or(usize::MAX);
        let cluster = self.slots.as_ref().map(SlotMap::read).transpose()?;
        let part = cluster.as_ref().map(|cluster| {
            let (address, slots, nodes) = (cluster.address(), cluster.own_slots(), cluster.node_count());
            format!(" node={address} slots={slots} nodes={nodes}")
        });
        let settings = Settings { durability: self.durability, password, memory_bytes_max, cluster };
        let started = Instant::now();
        let options = DiskOptions { medium: self.medium, ..options(self.log_bytes, launch.shards()) };
        let disk = Disk::open(&self.data, options).map_err(explain)?;
        let direct = disk.direct;
        let (logs, log_bytes, threads) = (disk.logs.len(), disk.found_bytes(), disk.threads.get());
        let service = launch.name().to_owned();
        let folder = self.data.clone();
        let kv = Kv::new(disk, settings, move |error| {
            say(&format_args!(
                "{service}: a write to {} failed: {error}; what waits for it is not acknowledged, and the process ends",
                folder.display()
            ));
            std::process::exit(i32::from(Status::Os as u8));
        });
        let kv = kv.map_err(explain)?;
        let medium = describe(self.medium, direct, kv.flush_instruction());
        let recovery = Recovery { keys: kv.store().keys(), log_bytes, threads, took: started.elapsed() };
        let line = format!(
            "{} {}: medium={medium} durability={} logs={logs} keys={} memory={} of {}{} recovered in {recovery}",
            launch.name(),
            self.data.display(),
            self.durability,
            recovery.keys,
            kv.store().memory().sizes().used,
            memory_bytes_max,
            part.unwrap_or_default(),
        );
        let kv = Arc::new(kv);
        let mut running = launch.serve_on_shards(Arc::clone(&kv))?.start(Serving { kv, folder: self.data.clone() })?;
        running.ready.insert(0, line);
        Ok(running)
    }
}

/// A store that is served.
struct Serving {
    kv: Arc<Kv>,
    folder: PathBuf,
}

impl State for Serving {
    fn stop(self: Box<Self>) -> io::Result<()> {
        let folder = self.folder.display();
        self.kv.ended().map_err(|EndError { log, source }| {
            let why = match log {
                Some(log) => format!(
                    "writing log {log} of {folder}: {source}; acknowledged writes that were not on the disk are lost"
                ),
                None => format!("writing the ends of the logs to {folder}/superblock: {source}; the store is whole"),
            };
            io::Error::new(source.kind(), why)
        })
    }
}

/// What a store is written through, and how that becomes durable.
fn describe(medium: Medium, direct: bool, flush: Option<&str>) -> String {
    let flush = flush.unwrap_or_default();
    match medium {
        Medium::Block if direct => "file (O_DIRECT and RWF_DSYNC)".to_owned(),
        Medium::Block => "file (RWF_DSYNC through the page cache)".to_owned(),
        Medium::Pmem => format!("pmem (DAX with MAP_SYNC, {flush} and sfence)"),
        Medium::PmemMemory => format!("pmem-memory (tmpfs, {flush} and sfence; a power cut takes everything)"),
    }
}

/// The limits of a store where nothing is said.
fn limits() -> Limits {
    Limits { message_bytes_max: 8 << 20, connection_bytes_max: 32 << 20, ..Limits::default() }
}

/// How a store is made whose logs have so many bytes.
fn options(log_bytes: u64, shards: usize) -> DiskOptions {
    let segment_bytes = (log_bytes / SEGMENTS).clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX);
    let segment_bytes = segment_bytes.next_multiple_of(BLOCK_BYTES as u64);
    // A list of all segments fits into the block that each begins with: 504 of them.
    let places = (log_bytes / segment_bytes).min(500) as u32;
    let logs = shards.min(usize::from(u16::MAX)) as u16;
    DiskOptions { logs, segment_bytes, places, ..DiskOptions::default() }
}

/// Longest password: with what is around it, also as base64, it fits into what a client may send before it has told it.
const PASSWORD_BYTES_MAX: usize = 8 << 10;

fn read_password(path: &Path) -> Result<Vec<u8>, Failure> {
    let read = fs::read(path).map_err(|error| {
        Failure::new(Status::of_input(&error), format!("cannot read the password in {}: {error}", path.display()))
    })?;
    let password = read.strip_suffix(b"\n").unwrap_or(&read);
    if password.is_empty() {
        return Err(Failure::new(Status::Data, format!("the password in {} is empty", path.display()))
            .remedy("write one, or leave out --password-file: then only this machine is served"));
    }
    if password.len() > PASSWORD_BYTES_MAX {
        let (path, bytes) = (path.display(), password.len());
        return Err(Failure::new(Status::Data, format!("the password in {path} has {bytes} bytes")).remedy(format!(
            "write one of at most {PASSWORD_BYTES_MAX} bytes: before it was told, a client may send little more"
        )));
    }
    Ok(password.to_vec())
}

/// Why a store does not open, with its status and the remedy.
fn explain(error: DiskError) -> Failure {
    let what = format!("cannot open the store: {error}");
    match error {
        DiskError::Foreign { owner, .. } => Failure::new(Status::NoPermission, what)
            .remedy(format!("start it as user {owner}, or give the folder, with all that is in it, to its user")),
        DiskError::InUse(_) => {
            Failure::new(Status::Unavailable, what).remedy("stop that process, or choose another folder with --data")
        }
        DiskError::Medium { .. } => {
            Failure::new(Status::Unavailable, what).remedy("use --medium block, which any file system can be")
        }
        DiskError::LateWrites { .. } => Failure::new(Status::Unavailable, what)
            .remedy("start again when that write is done; if it does not end, look at the kernel's log: dmesg"),
        DiskError::Io { action: "locking", .. } => {
            Failure::new(Status::Os, what).remedy("choose a folder on a file system that has locks: flock(2)")
        }
        DiskError::Io { source, .. } => match source.kind() {
            ErrorKind::PermissionDenied => Failure::new(Status::NoPermission, what)
                .remedy("give the folder to the user that runs ksf, or choose another one with --data"),
            ErrorKind::ReadOnlyFilesystem => Failure::new(Status::NoPermission, what).remedy(
                "choose a folder that can be written: with packaging/ksf.service one below /var/lib/ksf, or name it in \
                 ReadWritePaths= of the unit",
            ),
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                Failure::new(Status::Os, what).remedy("make room, or make a smaller store with --log-bytes")
            }
            ErrorKind::NotADirectory | ErrorKind::AlreadyExists => {
                Failure::new(Status::NoInput, what).remedy("choose a folder with --data")
            }
            _ => Failure::new(Status::Os, what).remedy("look at the kernel's log: dmesg"),
        },
        DiskError::Format { .. } => Failure::new(Status::Data, what).remedy("run the version of ksf that made it"),
        DiskError::NoStore(_) => {
            Failure::new(Status::NoInput, what).remedy("name the folder that `ksf store` had as --data")
        }
        DiskError::NoLock(_) => Failure::new(Status::NoInput, what),
        // They say what can be done.
        DiskError::NoSuperblock(_)
        | DiskError::NoLog(_)
        | DiskError::LogLength { .. }
        | DiskError::ForeignLog { .. }
        | DiskError::OldLog { .. }
        | DiskError::Recover(_) => Failure::new(Status::Data, what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_that_no_client_could_tell_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        for (password, is_taken) in [
            ("x".repeat(PASSWORD_BYTES_MAX), true),
            ("x".repeat(PASSWORD_BYTES_MAX + 1), false),
            (String::new(), false),
        ] {
            fs::write(&path, format!("{password}\n")).unwrap();
            assert_eq!(read_password(&path).ok(), is_taken.then(|| password.into_bytes()));
        }
    }

    #[test]
    fn a_log_has_as_many_bytes_as_were_asked_for() {
        for (bytes, segment_bytes, places) in
            [(8 << 20, 2 << 20, 4), (1 << 30, 16 << 20, 64), (16 << 30, 64 << 20, 256), (LOG_BYTES_MAX, 64 << 20, 500)]
        {
            let options = options(bytes, 3);
            assert_eq!((options.segment_bytes, options.places, options.logs), (segment_bytes, places, 3));
        }
    }
}
