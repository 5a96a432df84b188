//! File servers: nfs.
//!
//! GETATTR is measured in every placement, with 1 and with 32 in flight. The other procedures have the server on the other CPU.

use super::super::contestant::Contestant::{self, Ganesha, GaneshaTuned, Nfs};
use super::{Case, Metric, ONE, Row, Service};

/// A load for an NFSv3 server, as the options of `ksf load nfs`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FileLoad {
    /// Procedures with their shares.
    pub(crate) mix: &'static str,
    /// Files that it is about.
    pub(crate) files: u32,
    pub(crate) file_bytes: u32,
    /// Bytes of a READ and of a WRITE.
    pub(crate) io_bytes: u32,
    /// When a WRITE is answered: `unstable` or `file`.
    pub(crate) stable: &'static str,
}

/// The cases that are measured in every placement, and whose system calls are counted.
pub(super) const NFS_MAIN: [&str; 2] = ["nfs-getattr-1", "nfs-getattr-32"];

const SERVERS: &[Contestant] = &[Nfs, Ganesha, GaneshaTuned];

pub(crate) static NFS_GETATTR: FileLoad = small("getattr");
static LOOKUP: FileLoad = small("lookup");
static ACCESS: FileLoad = small("access");
static READDIRPLUS: FileLoad = FileLoad { files: 100, file_bytes: 4 << 10, ..small("readdirplus") };
pub(crate) static NFS_READ: FileLoad = small("read");
static WRITE: FileLoad = small("write");
pub(crate) static NFS_WRITE_STABLE: FileLoad = FileLoad { stable: "file", ..small("write") };
static READ_LARGE: FileLoad = large("read");
static WRITE_LARGE: FileLoad = large("write");
static SMALL_FILES: FileLoad = small("create=1,write=1,remove=1");
static SFS2008: FileLoad = small("sfs2008");

/// Few files, for each run makes them and waits for them to be on the medium.
const fn small(mix: &'static str) -> FileLoad {
    FileLoad { mix, files: 16, file_bytes: 64 << 10, io_bytes: 4 << 10, stable: "unstable" }
}

const fn large(mix: &'static str) -> FileLoad {
    FileLoad { mix, files: 4, file_bytes: 1 << 20, io_bytes: 1 << 20, stable: "unstable" }
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

pub(super) const CASES: &[Case] = &[
    Case { metric: Metric::RttP50Us, ..nfs(NFS_MAIN[0], "NFS GETATTR, 1 in flight", &NFS_GETATTR, [1, 1]) },
    nfs(NFS_MAIN[1], "NFS GETATTR, 32 in flight", &NFS_GETATTR, [1, 32]),
    nfs("nfs-getattr-32x8", "NFS GETATTR, 32 in flight on each of 8 connections", &NFS_GETATTR, [8, 32]),
    nfs("nfs-lookup-32", "NFS LOOKUP, 32 in flight", &LOOKUP, [1, 32]),
    nfs("nfs-access-32", "NFS ACCESS, 32 in flight", &ACCESS, [1, 32]),
    nfs("nfs-readdirplus-32", "NFS READDIRPLUS of a folder of 100 files, 32 in flight", &READDIRPLUS, [1, 32]),
    nfs("nfs-read-4k-32", "NFS READ of 4 KiB, 32 in flight", &NFS_READ, [1, 32]),
    nfs("nfs-read-1m-4", "NFS READ of 1 MiB, 4 in flight", &READ_LARGE, [1, 4]),
    nfs("nfs-write-4k-32", "NFS WRITE of 4 KiB, unstable, 32 in flight", &WRITE, [1, 32]),
    nfs("nfs-write-1m-4", "NFS WRITE of 1 MiB, unstable, 4 in flight", &WRITE_LARGE, [1, 4]),
    nfs("nfs-stable-4k-1", "NFS WRITE of 4 KiB, on the medium, 1 in flight", &NFS_WRITE_STABLE, [1, 1]),
    nfs("nfs-stable-4k-32", "NFS WRITE of 4 KiB, on the medium, 32 in flight", &NFS_WRITE_STABLE, [1, 32]),
    // One in flight: nfs-ganesha answers NFS3ERR_STALE where one name is created and removed at the same time.
    nfs("nfs-small-files-1x8", "NFS CREATE, WRITE of 4 KiB and REMOVE, 8 connections", &SMALL_FILES, [8, 1]),
    nfs("nfs-sfs2008-1x8", "NFS with the mix of SPECsfs2008, 8 connections", &SFS2008, [8, 1]),
];
