//! File servers: nfs, 9p.
//!
//! GETATTR of NFS, and Tgetattr, are measured in every placement, with 1 and with 32 in flight, and so is every operation with 32 in
//! flight on 8 connections, 9P as IOR, and a busy connection of 9P beside idle ones. The other cases have the server on the other CPU.

use super::super::contestant::Contestant::{self, Diod, Ganesha, GaneshaTuned, Nfs, Ninep, PreadSend};
use super::{Case, Metric, ONE, Row, Service};
use crate::load::IOR;

/// Protocols of file servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileProtocol {
    Nfs,
    Ninep,
}

impl FileProtocol {
    /// As `ksf`, `ksf load` and URLs name it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            FileProtocol::Nfs => "nfs",
            FileProtocol::Ninep => "9p",
        }
    }
}

/// Whole listings by READDIRPLUS in place of a mix, by a client in the bench: a listing is a message.
pub(crate) const WHOLE_LISTING: &str = "listing";

/// A load for a file server, as the options of `ksf load nfs` and `ksf load 9p`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileLoad {
    pub(crate) protocol: FileProtocol,
    /// Operations with their shares; or [`IOR`], to which the rest does not apply, or [`WHOLE_LISTING`], to which only `files` does.
    pub(crate) mix: &'static str,
    /// Files that it is about.
    pub(crate) files: u32,
    pub(crate) file_bytes: u32,
    /// Bytes of a READ and of a WRITE.
    pub(crate) io_bytes: u32,
    /// When a WRITE of NFS is answered: `unstable` or `file`.
    pub(crate) stable: &'static str,
}

/// The cases whose system calls are counted.
pub(super) const COUNTED: [&str; 4] = ["nfs-getattr-1", "nfs-getattr-32", "9p-getattr-1", "9p-getattr-32"];

/// Data of a message of diod, which takes 64 KiB with the head. nfs-ganesha 4.3 ends at a longer read, whatever `_9P_TCP_Msize` says:
/// probably its buffer for replies is shorter.
pub(crate) const PEER_IO_BYTES_MAX: u32 = (64 << 10) - 24;

const SERVERS: &[Contestant] = &[Nfs, Ganesha, GaneshaTuned];
/// Beside what reads the same bytes from the page cache without a protocol.
const READ_SERVERS: &[Contestant] = &[PreadSend, Nfs, Ganesha, GaneshaTuned];
const NINEP_SERVERS: &[Contestant] = &[Ninep, Diod, Ganesha];

pub(crate) static NFS_GETATTR: FileLoad = small("getattr");
static LOOKUP: FileLoad = small("lookup");
static ACCESS: FileLoad = small("access");
static READDIRPLUS: FileLoad = FileLoad { files: 100, file_bytes: 4 << 10, ..small("readdirplus") };
static LISTING: FileLoad = FileLoad { files: 50_000, ..small(WHOLE_LISTING) };
pub(crate) static NFS_READ: FileLoad = small("read");
static WRITE: FileLoad = small("write");
pub(crate) static NFS_WRITE_STABLE: FileLoad = FileLoad { stable: "file", ..small("write") };
static READ_LARGE: FileLoad = large("read");
static WRITE_LARGE: FileLoad = large("write");
static WRITE_LARGE_STABLE: FileLoad = FileLoad { stable: "file", ..large("write") };
static SMALL_FILES: FileLoad = small("create=1,write=1,remove=1");
static SFS2008: FileLoad = small("sfs2008");

pub(crate) static NINEP_GETATTR: FileLoad = ninep_load("getattr", 4 << 10);
static NINEP_WALK: FileLoad = ninep_load("walk", 4 << 10);
static NINEP_READ_32: FileLoad = ninep_load("read", 32);
static NINEP_WRITE_32: FileLoad = ninep_load("write", 32);
static NINEP_READ: FileLoad = ninep_load("read", 4 << 10);
static NINEP_WRITE: FileLoad = ninep_load("write", 4 << 10);
static NINEP_READ_LARGE: FileLoad = ninep_load("read", 512 << 10);
static NINEP_WRITE_LARGE: FileLoad = ninep_load("write", 512 << 10);
static NINEP_IOR: FileLoad = ninep_load(IOR, 32);

/// Few files, for each run makes them and waits for them to be on the medium.
const fn small(mix: &'static str) -> FileLoad {
    FileLoad {
        protocol: FileProtocol::Nfs,
        mix,
        files: 16,
        file_bytes: 64 << 10,
        io_bytes: 4 << 10,
        stable: "unstable",
    }
}

const fn large(mix: &'static str) -> FileLoad {
    FileLoad { protocol: FileProtocol::Nfs, mix, files: 4, file_bytes: 1 << 20, io_bytes: 1 << 20, stable: "unstable" }
}

/// Few and short files: each connection opens all of them.
const fn ninep_load(mix: &'static str, io_bytes: u32) -> FileLoad {
    let file_bytes = if io_bytes > 64 << 10 { io_bytes } else { 64 << 10 };
    FileLoad { protocol: FileProtocol::Ninep, mix, files: 4, file_bytes, io_bytes, stable: "unstable" }
}

/// Connections, each with so many calls in flight. With one call in all, the round trip is the figure.
const fn nfs(
    name: &'static str,
    title: &'static str,
    load: &'static FileLoad,
    [connections, in_flight]: [u32; 2],
) -> Case {
    Case {
        name,
        title,
        row: Row::Nfs,
        service: Service::Files(load),
        in_flight,
        connections,
        contestants: SERVERS,
        metric: if connections * in_flight == 1 { Metric::RttP50Us } else { Metric::MessagesPerS },
        ..ONE
    }
}

/// Connections, each with so many tags in flight.
const fn ninep(name: &'static str, title: &'static str, load: &'static FileLoad, tags: [u32; 2]) -> Case {
    Case { row: Row::Ninep, contestants: NINEP_SERVERS, ..nfs(name, title, load, tags) }
}

/// Data beyond the messages of the peers, which get it in several (see [`PEER_IO_BYTES_MAX`]): bytes are compared, not messages.
const fn large_ninep(name: &'static str, title: &'static str, load: &'static FileLoad, tags: [u32; 2]) -> Case {
    Case { metric: Metric::DataBytesPerS, ..ninep(name, title, load, tags) }
}

/// One busy connection beside so many that do nothing.
const fn one_busy(name: &'static str, title: &'static str, idle: u32) -> Case {
    Case { idle, metric: Metric::IdleRttRatio, ..ninep(name, title, &NINEP_GETATTR, [1, 1]) }
}

const fn variation(case: Case) -> Case {
    Case { is_variation: true, ..case }
}

/// Names of the cases of [`by_depth`] after that of their operation.
const DEPTHS: [&str; 4] = ["-1", "-32", "-1x8", "-32x8"];

/// Cases of one operation each, with 1 and 32 in flight on 1 and 8 connections.
macro_rules! by_depth {
    ($one:literal, $many:literal; $($case:ident($name:literal, $title:literal, $load:expr),)+) => {
        &[$(
            variation($case(concat!($name, "-1"), concat!($title, ", ", $one), $load, [1, 1])),
            variation($case(concat!($name, "-32"), concat!($title, ", ", $many), $load, [1, 32])),
            variation($case(
                concat!($name, "-1x8"),
                concat!($title, ", ", $one, " on each of 8 connections"),
                $load,
                [8, 1],
            )),
            $case(concat!($name, "-32x8"), concat!($title, ", ", $many, " on each of 8 connections"), $load, [8, 32]),
        )+]
    };
}

/// The four cases of an operation of [`NFS_BY_DEPTH`] or [`NINEP_BY_DEPTH`].
pub(crate) fn by_depth(operation: &str) -> [&'static str; 4] {
    DEPTHS.map(|depth| {
        let mut cases = [NFS_BY_DEPTH, NINEP_BY_DEPTH].into_iter().flatten();
        let case = cases.find(|case| case.name.strip_prefix(operation) == Some(depth));
        case.unwrap_or_else(|| panic!("no case {operation}{depth}")).name
    })
}

pub(super) const NFS_BY_DEPTH: &[Case] = by_depth!["1 in flight", "32 in flight";
    nfs("nfs-getattr", "NFS GETATTR", &NFS_GETATTR),
    nfs("nfs-lookup", "NFS LOOKUP", &LOOKUP),
    nfs("nfs-access", "NFS ACCESS", &ACCESS),
    nfs("nfs-read-4k", "NFS READ of 4 KiB", &NFS_READ),
    nfs("nfs-write-4k", "NFS WRITE of 4 KiB, unstable", &WRITE),
    nfs("nfs-stable-4k", "NFS WRITE of 4 KiB, on the medium", &NFS_WRITE_STABLE),
    nfs("nfs-readdirplus", "NFS READDIRPLUS of a folder of 100 files", &READDIRPLUS),
    nfs("nfs-read-1m", "NFS READ of 1 MiB", &READ_LARGE),
    nfs("nfs-write-1m", "NFS WRITE of 1 MiB, unstable", &WRITE_LARGE),
    nfs("nfs-stable-1m", "NFS WRITE of 1 MiB, on the medium", &WRITE_LARGE_STABLE),
];

pub(super) const NFS: &[Case] = &[
    nfs("nfs-listing-50000", "NFS listing of 50,000 files by READDIRPLUS, page after page", &LISTING, [1, 1]),
    // Beside pread+send, which has one connection.
    Case { contestants: READ_SERVERS, ..nfs("nfs-read-1m-4", "NFS READ of 1 MiB, 4 in flight", &READ_LARGE, [1, 4]) },
    // One in flight: nfs-ganesha answers NFS3ERR_STALE where one name is created and removed at the same time.
    nfs("nfs-small-files-1x8", "NFS CREATE, WRITE of 4 KiB and REMOVE, 8 connections", &SMALL_FILES, [8, 1]),
    nfs("nfs-sfs2008-1x8", "NFS with the mix of SPECsfs2008, 8 connections", &SFS2008, [8, 1]),
];

pub(super) const NINEP_BY_DEPTH: &[Case] = by_depth!["1 tag", "32 tags";
    ninep("9p-getattr", "9P getattr", &NINEP_GETATTR),
    ninep("9p-walk", "9P walk and clunk", &NINEP_WALK),
    ninep("9p-read-32b", "9P read of 32 bytes", &NINEP_READ_32),
    ninep("9p-write-32b", "9P write of 32 bytes", &NINEP_WRITE_32),
    ninep("9p-read-4k", "9P read of 4 KiB", &NINEP_READ),
    ninep("9p-write-4k", "9P write of 4 KiB", &NINEP_WRITE),
    large_ninep("9p-read-512k", "9P read of 512 KiB", &NINEP_READ_LARGE),
    large_ninep("9p-write-512k", "9P write of 512 KiB", &NINEP_WRITE_LARGE),
];

pub(super) const NINEP: &[Case] = &[
    // With one connection: 9p-getattr-1.
    variation(one_busy("9p-busy-1-of-10", "9P getattr, 1 tag on 1 of 10 connections", 9)),
    variation(one_busy("9p-busy-1-of-100", "9P getattr, 1 tag on 1 of 100 connections", 99)),
    one_busy("9p-busy-1-of-1000", "9P getattr, 1 tag on 1 of 1,000 connections", 999),
    ninep("9p-ior", "9P as IOR: 32 connections write and read 32 bytes", &NINEP_IOR, [32, 1]),
];
