//! Who serves which listener? Read from /proc, from outside.
//!
//! A socket in a process's table says little: children inherit sockets that they never use. What an epoll instance
//! watches is in its `fdinfo` (fs/eventpoll.c, `ep_show_fdinfo`; the inode since Linux 4.13), so of the processes that
//! have a listener, those that watch it serve it. Where none watches it, all that have it may.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A process, and the listening sockets that it serves.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Serves {
    /// Inode of each, with a descriptor number that it has in the process.
    pub(super) sockets: BTreeMap<u64, i32>,
}

/// What the processes have of the listening sockets.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Found {
    pub(super) servers: BTreeMap<u32, Serves>,
    /// All that any of them has open, served or not.
    pub(super) held: BTreeSet<u64>,
}

/// `listening`: inodes of all listening TCP sockets. Processes that ended meanwhile, or that may not be looked into, are
/// not in the result.
pub(super) fn look(pids: &BTreeSet<u32>, listening: &BTreeSet<u64>) -> Found {
    judge(&pids.iter().filter_map(|&pid| Some((pid, table(pid, listening)?))).collect())
}

fn judge(tables: &BTreeMap<u32, DescriptorTable>) -> Found {
    let watched: BTreeSet<u64> = tables.values().flat_map(|table| &table.watched).copied().collect();
    let serves = |table: &DescriptorTable| {
        let is_served = |inode: &u64| table.watched.contains(inode) || !watched.contains(inode);
        Serves { sockets: table.sockets.iter().filter(|it| is_served(it.0)).map(|(&inode, &fd)| (inode, fd)).collect() }
    };
    let servers = tables.iter().map(|(&pid, table)| (pid, serves(table)));
    Found {
        servers: servers.filter(|(_, serves)| !serves.sockets.is_empty()).collect(),
        held: tables.values().flat_map(|table| table.sockets.keys()).copied().collect(),
    }
}

/// Processes with all their descendants.
pub(super) fn family(roots: impl IntoIterator<Item = u32>) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut next: Vec<u32> = roots.into_iter().collect();
    while let Some(pid) = next.pop() {
        if found.insert(pid) {
            for tid in threads(pid) {
                // Children are listed with the thread that made them.
                let children = fs::read_to_string(format!("/proc/{pid}/task/{tid}/children")).unwrap_or_default();
                next.extend(children.split_ascii_whitespace().filter_map(|child| child.parse::<u32>().ok()));
            }
        }
    }
    found
}

/// Threads of a process; none if it has ended.
pub(super) fn threads(pid: u32) -> Vec<u32> {
    numbers(format!("/proc/{pid}/task").as_ref())
}

/// The command, as it was started.
pub(super) fn command(pid: u32) -> Vec<String> {
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = words.strip_suffix(b"\0").unwrap_or(&words);
    words.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// A process's descriptors, as far as they matter.
struct DescriptorTable {
    sockets: BTreeMap<u64, i32>,
    watched: BTreeSet<u64>,
}

fn table(pid: u32, listening: &BTreeSet<u64>) -> Option<DescriptorTable> {
    let folder = format!("/proc/{pid}/fd");
    // Without the right to look, the folder cannot be read.
    fs::read_dir(&folder).ok()?;
    let mut table = DescriptorTable { sockets: BTreeMap::new(), watched: BTreeSet::new() };
    for fd in numbers(folder.as_ref()) {
        let Ok(target) = fs::read_link(format!("{folder}/{fd}")) else { continue };
        let Some(target) = target.to_str() else { continue };
        if let Some(inode) = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')) {
            match inode.parse() {
                Ok(inode) if listening.contains(&inode) => drop(table.sockets.insert(inode, fd as i32)),
                _ => {}
            }
        } else if target == "anon_inode:[eventpoll]" {
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
            table.watched.extend(watched(&info).filter(|inode| listening.contains(inode)));
        }
    }
    Some(table)
}

/// Inodes of what an epoll instance watches.
fn watched(info: &str) -> impl Iterator<Item = u64> + '_ {
    let lines = info.lines().filter(|line| line.starts_with("tfd:"));
    lines.filter_map(|line| {
        let mut words = line.split_ascii_whitespace().flat_map(|word| word.split(':'));
        words.find(|word| *word == "ino")?;
        u64::from_str_radix(words.next()?, 16).ok()
    })
}

/// The entries of a folder whose name is a number.
fn numbers(folder: &Path) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::event::epoll;

    use super::*;

    #[test]
    fn what_an_epoll_instance_watches_is_read() {
        let info = "pos:\t0\nflags:\t02000002\ntfd:        6 events:       19 data: 6  pos:0 ino:1f2e sdev:9\n\
                    tfd:        7 events:       19 data: 7\n";
        assert_eq!(watched(info).collect::<Vec<_>>(), [0x1f2e]);
    }

    #[test]
    fn of_those_who_have_a_listener_those_who_watch_it_serve_it() {
        let own = std::process::id();
        let sockets = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let inodes = sockets.each_ref().map(|socket| rustix::fs::fstat(socket).unwrap().st_ino);
        let all = BTreeSet::from(inodes);
        let serves = || look(&family([own]), &all).servers.remove(&own).unwrap().sockets;
        assert_eq!(serves().keys().copied().collect::<BTreeSet<_>>(), all, "nobody watches: whoever has them");
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(&epoll, &sockets[0], epoll::EventData::new_u64(1), epoll::EventFlags::IN).unwrap();
        assert_eq!(serves().get(&inodes[0]), Some(&sockets[0].as_raw_fd()));
        // In a table of tables, one that is watched by nobody counts as before.
        assert!(serves().contains_key(&inodes[1]));
        assert_eq!(look(&BTreeSet::from([own]), &BTreeSet::new()), Found::default());
    }

    #[test]
    fn children_serve_what_they_watch_of_what_they_have_from_their_parent() {
        let table = |sockets: &[u64], watched: &[u64]| DescriptorTable {
            sockets: sockets.iter().map(|&inode| (inode, 3)).collect(),
            watched: watched.iter().copied().collect(),
        };
        // As nginx with reuseport: all have all, and each watches its own.
        let tables = [(1, table(&[7, 8], &[])), (2, table(&[7, 8], &[7])), (3, table(&[7, 8], &[8]))];
        let found = judge(&tables.into_iter().collect());
        let of = |pid: u32| found.servers.get(&pid).map(|serves| serves.sockets.keys().copied().collect::<Vec<_>>());
        assert_eq!([of(1), of(2), of(3)], [None, Some(vec![7]), Some(vec![8])]);
        assert_eq!(found.held, BTreeSet::from([7, 8]));
    }

    #[test]
    fn a_family_has_its_children() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let family = family([std::process::id()]);
        assert!(family.contains(&child.id()) && family.contains(&std::process::id()));
        // exec() lets its parent go on before the new command can be read.
        while command(child.id()) != ["sleep", "60"] {
            assert!(child.try_wait().unwrap().is_none());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(threads(child.id()).is_empty());
    }
}
