//! File servers: nfs, 9p.
//!
//! GETATTR of NFS, and Tgetattr, are measured in every placement, with 1 and with 32 in flight. The other operations have the server on the other CPU.

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

/// The cases that are measured in every placement, and whose system calls are counted.
pub(super) const MAIN: [&str; 4] = ["nfs-getattr-1", "nfs-getattr-32", "9p-getattr-1", "9p-getattr-32"];

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

/// Connections, each with so many calls in flight.
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
        metric: Metric::MessagesPerS,
        ..ONE
    }
}

/// Connections, each with so many tags in flight.
const fn ninep(name: &'static str, title: &'static str, load: &'static FileLoad, tags: [u32; 2]) -> Case {
    Case { row: Row::Ninep, contestants: NINEP_SERVERS, ..nfs(name, title, load, tags) }
}

/// Messages that diod does not take. nfs-ganesha 4.3 ends at the first such read, whatever `_9P_TCP_Msize` says: probably its buffer for
/// replies is shorter.
const fn large_ninep(name: &'static str, title: &'static str, load: &'static FileLoad) -> Case {
    Case { contestants: &[Ninep], ..ninep(name, title, load, [1, 4]) }
}

/// One busy connection beside so many that do nothing.
const fn one_busy(name: &'static str, title: &'static str, idle: u32) -> Case {
    Case { idle, metric: Metric::IdleRttRatio, ..ninep(name, title, &NINEP_GETATTR, [1, 1]) }
}

pub(super) const CASES: &[Case] = &[
    Case { metric: Metric::RttP50Us, ..nfs(MAIN[0], "NFS GETATTR, 1 in flight", &NFS_GETATTR, [1, 1]) },
    nfs(MAIN[1], "NFS GETATTR, 32 in flight", &NFS_GETATTR, [1, 32]),
    nfs("nfs-getattr-32x8", "NFS GETATTR, 32 in flight on each of 8 connections", &NFS_GETATTR, [8, 32]),
    nfs("nfs-lookup-32", "NFS LOOKUP, 32 in flight", &LOOKUP, [1, 32]),
    nfs("nfs-access-32", "NFS ACCESS, 32 in flight", &ACCESS, [1, 32]),
    nfs("nfs-readdirplus-32", "NFS READDIRPLUS of a folder of 100 files, 32 in flight", &READDIRPLUS, [1, 32]),
    Case {
        metric: Metric::RttP50Us,
        ..nfs("nfs-listing-50000", "NFS listing of 50,000 files by READDIRPLUS, page after page", &LISTING, [1, 1])
    },
    nfs("nfs-read-4k-32", "NFS READ of 4 KiB, 32 in flight", &NFS_READ, [1, 32]),
    Case { contestants: READ_SERVERS, ..nfs("nfs-read-1m-4", "NFS READ of 1 MiB, 4 in flight", &READ_LARGE, [1, 4]) },
    nfs("nfs-write-4k-32", "NFS WRITE of 4 KiB, unstable, 32 in flight", &WRITE, [1, 32]),
    nfs("nfs-write-1m-4", "NFS WRITE of 1 MiB, unstable, 4 in flight", &WRITE_LARGE, [1, 4]),
    nfs("nfs-stable-4k-1", "NFS WRITE of 4 KiB, on the medium, 1 in flight", &NFS_WRITE_STABLE, [1, 1]),
    nfs("nfs-stable-4k-32", "NFS WRITE of 4 KiB, on the medium, 32 in flight", &NFS_WRITE_STABLE, [1, 32]),
    // One in flight: nfs-ganesha answers NFS3ERR_STALE where one name is created and removed at the same time.
    nfs("nfs-small-files-1x8", "NFS CREATE, WRITE of 4 KiB and REMOVE, 8 connections", &SMALL_FILES, [8, 1]),
    nfs("nfs-sfs2008-1x8", "NFS with the mix of SPECsfs2008, 8 connections", &SFS2008, [8, 1]),
    Case { metric: Metric::RttP50Us, ..ninep(MAIN[2], "9P getattr, 1 tag", &NINEP_GETATTR, [1, 1]) },
    ninep(MAIN[3], "9P getattr, 32 tags", &NINEP_GETATTR, [1, 32]),
    // With one connection: the case of one tag above.
    one_busy("9p-busy-1-of-10", "9P getattr, 1 tag on 1 of 10 connections", 9),
    one_busy("9p-busy-1-of-100", "9P getattr, 1 tag on 1 of 100 connections", 99),
    one_busy("9p-busy-1-of-1000", "9P getattr, 1 tag on 1 of 1,000 connections", 999),
    ninep("9p-getattr-32x8", "9P getattr, 32 tags on each of 8 connections", &NINEP_GETATTR, [8, 32]),
    ninep("9p-walk-32", "9P walk and clunk, 32 tags", &NINEP_WALK, [1, 32]),
    ninep("9p-walk-32x8", "9P walk and clunk, 32 tags on each of 8 connections", &NINEP_WALK, [8, 32]),
    ninep("9p-read-32b-1", "9P read of 32 bytes, 1 tag", &NINEP_READ_32, [1, 1]),
    ninep("9p-read-32b-32x8", "9P read of 32 bytes, 32 tags on each of 8 connections", &NINEP_READ_32, [8, 32]),
    ninep("9p-write-32b-1", "9P write of 32 bytes, 1 tag", &NINEP_WRITE_32, [1, 1]),
    ninep("9p-write-32b-32x8", "9P write of 32 bytes, 32 tags on each of 8 connections", &NINEP_WRITE_32, [8, 32]),
    ninep("9p-read-4k-32", "9P read of 4 KiB, 32 tags", &NINEP_READ, [1, 32]),
    ninep("9p-write-4k-32", "9P write of 4 KiB, 32 tags", &NINEP_WRITE, [1, 32]),
    large_ninep("9p-read-512k-4", "9P read of 512 KiB, 4 tags", &NINEP_READ_LARGE),
    large_ninep("9p-write-512k-4", "9P write of 512 KiB, 4 tags", &NINEP_WRITE_LARGE),
    ninep("9p-ior", "9P as IOR: 32 connections write and read 32 bytes", &NINEP_IOR, [32, 1]),
];
