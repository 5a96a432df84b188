//! A plain folder with fids, as a client of 9P should see it: a fid is a descriptor that the kernel keeps for a path.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;

use super::{CONNECTIONS, Outcome, attributes, listed};
use ksf_proto::p9::{Request, UNLINK_DIRECTORY, open_flag};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, fstat, linkat, mkdirat, openat, renameat, unlinkat};
use rustix::io::Errno;

/// Known by a descriptor without its content.
type Node = Rc<OwnedFd>;

/// A name in a folder.
type Place = (Node, Vec<u8>);

#[derive(Clone)]
struct Fid {
    node: Node,
    place: Option<Place>,
    open: Option<Rc<File>>,
}

pub(super) struct Plain {
    root: Node,
    /// Of each connection.
    fids: [HashMap<u32, Fid>; CONNECTIONS],
}

fn look(dir: &OwnedFd, name: &[u8]) -> Result<Node, Errno> {
    Ok(Rc::new(openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?))
}

/// The object that a descriptor without its content is for.
fn path_of(node: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", node.as_raw_fd())
}

fn inode(node: &OwnedFd) -> u64 {
    fstat(node).unwrap().st_ino
}

fn has_name(node: &OwnedFd) -> bool {
    fstat(node).unwrap().st_nlink > 0
}

fn is_folder(node: &OwnedFd) -> bool {
    fstat(node).unwrap().st_mode & libc::S_IFMT == libc::S_IFDIR
}

fn is_at(fid: &Fid, (dir, name): &Place) -> bool {
    fid.place.as_ref().is_some_and(|(other, other_name)| inode(other) == inode(dir) && other_name == name)
}

fn how_of(flags: u32) -> OpenOptions {
    let access = flags & open_flag::ACCESS_MASK;
    let mut how = OpenOptions::new();
    how.read(access != open_flag::WRITE).write(access != 0).truncate(flags & open_flag::TRUNCATE != 0);
    how
}

fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap()
}

impl Plain {
    pub(super) fn new(folder: &Path) -> Self {
        let root = Rc::new(OwnedFd::from(File::open(folder).unwrap()));
        let mut plain = Self { root, fids: Default::default() };
        (0..CONNECTIONS).for_each(|connection| plain.attach(connection, super::ROOT));
        plain
    }

    pub(super) fn attach(&mut self, connection: usize, fid: u32) {
        let node = Rc::clone(&self.root);
        self.fids[connection].insert(fid, Fid { node, place: None, open: None });
    }

    /// The fids of a connection, and those of them that are open.
    pub(super) fn fids(&self, connection: usize) -> (Vec<u32>, Vec<u32>) {
        let fids = &self.fids[connection];
        let mut all: Vec<u32> = fids.keys().copied().collect();
        all.sort_unstable();
        let open = all.iter().copied().filter(|fid| fids[fid].open.is_some()).collect();
        (all, open)
    }

    /// What a request gives, of which the server has said `ours`. Where that may be one of several errors it is returned.
    pub(super) fn ask(&mut self, connection: usize, request: Request<'_>, ours: &Outcome) -> Outcome {
        if *ours == Err(libc::ESTALE) && self.may_be_stale(connection, request) {
            if let Request::Remove { fid } = request {
                self.fids[connection].remove(&fid);
            }
            return ours.clone();
        }
        let theirs = self.result(connection, request).map_err(Errno::raw_os_error);
        match request {
            // Both folders are looked up before the call.
            Request::Rename { .. } | Request::Renameat { .. } | Request::Link { .. } | Request::Remove { .. }
                if theirs.is_err() && theirs != Err(libc::EBADF) && ours.is_err() =>
            {
                ours.clone()
            }
            _ => theirs,
        }
    }

    /// True if the request is about an object without a name, by a fid that is not open.
    fn may_be_stale(&self, connection: usize, request: Request<'_>) -> bool {
        let fids = &self.fids[connection];
        let is_open = |node: &Node| fids.values().any(|fid| fid.open.is_some() && inode(&fid.node) == inode(node));
        let used = match request {
            Request::Getattr { fid, .. } | Request::Setattr { fid, .. } => {
                return fids.get(&fid).is_some_and(|fid| !has_name(&fid.node) && !is_open(&fid.node));
            }
            Request::Walk { fid, .. } | Request::Lopen { fid, .. } | Request::Lcreate { fid, .. } => [fid, fid],
            Request::Mkdir { dfid, .. } => [dfid, dfid],
            Request::Unlinkat { dirfid, .. } => [dirfid, dirfid],
            Request::Renameat { olddirfid, newdirfid, .. } => [olddirfid, newdirfid],
            Request::Rename { fid, dfid, .. } | Request::Link { dfid, fid, .. } => [fid, dfid],
            // It goes by the place, which may be another object's.
            Request::Remove { .. } => return true,
            _ => return false,
        };
        used.iter().filter_map(|fid| fids.get(fid)).any(|fid| !has_name(&fid.node))
    }

    fn result(&mut self, connection: usize, request: Request<'_>) -> Result<String, Errno> {
        let root = Rc::clone(&self.root);
        let fids = &mut self.fids[connection];
        let known = |fids: &HashMap<u32, Fid>, fid: u32| fids.get(&fid).cloned().ok_or(Errno::BADF);
        let opened = |fids: &HashMap<u32, Fid>, fid: u32| known(fids, fid)?.open.ok_or(Errno::BADF);
        let closed = |fids: &HashMap<u32, Fid>, fid: u32| {
            known(fids, fid).and_then(|fid| if fid.open.is_some() { Err(Errno::INVAL) } else { Ok(fid) })
        };
        match request {
            Request::Version { .. } => fids.clear(),
            Request::Attach { fid, .. } => {
                if fids.contains_key(&fid) {
                    return Err(Errno::INVAL);
                }
                self.attach(connection, fid);
            }
            Request::Walk { fid, newfid, names } => {
                let is_clone = names.is_empty();
                let from = if fid == newfid && !is_clone { closed(fids, fid)? } else { known(fids, fid)? };
                if fid != newfid && fids.contains_key(&newfid) {
                    return Err(Errno::INVAL);
                }
                let (mut at, mut found) = (Fid { open: None, ..from }, 0);
                for name in names.iter() {
                    let is_up = name == b"..";
                    let next = if is_up && inode(&at.node) == inode(&root) {
                        Ok(Rc::clone(&root))
                    } else {
                        look(&at.node, name)
                    };
                    match next {
                        Ok(node) => {
                            let place = (!is_up).then(|| (at.node, name.to_vec()));
                            (at, found) = (Fid { node, place, open: None }, found + 1);
                        }
                        Err(error) if found == 0 => return Err(error),
                        Err(_) => return Ok(format!("{found} found")),
                    }
                }
                if fid != newfid || !is_clone {
                    fids.insert(newfid, at);
                }
                return Ok(format!("{found} found"));
            }
            Request::Lopen { fid, flags } => {
                let at = closed(fids, fid)?;
                let open = Some(Rc::new(how_of(flags).open(path_of(&at.node)).map_err(errno)?));
                fids.insert(fid, Fid { open, ..at });
            }
            Request::Lcreate { fid, name, flags, mode, .. } => {
                let dir = closed(fids, fid)?.node;
                let flags = OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::from_bits_retain(flags);
                let file = File::from(openat(&dir, name, flags, Mode::from_raw_mode(mode))?);
                let node = look(&dir, name)?;
                fids.insert(fid, Fid { node, place: Some((dir, name.to_vec())), open: Some(Rc::new(file)) });
            }
            Request::Read { fid, offset, count } => {
                let mut bytes = vec![0; count as usize];
                let count = opened(fids, fid)?.read_at(&mut bytes, offset).map_err(errno)?;
                return Ok(bytes[..count].escape_ascii().to_string());
            }
            Request::Write { fid, offset, data } => {
                return Ok(opened(fids, fid)?.write_at(data.0, offset).map_err(errno)?.to_string());
            }
            Request::Readdir { fid, .. } => {
                let mut names = Vec::new();
                for entry in Dir::read_from(&*opened(fids, fid)?)? {
                    names.push(entry?.file_name().to_bytes().to_vec());
                }
                return Ok(listed(names));
            }
            Request::Getattr { fid, .. } => {
                let stat = fstat(&known(fids, fid)?.node)?;
                return Ok(attributes(stat.st_mode, stat.st_nlink, stat.st_size as u64));
            }
            Request::Setattr { fid, to } => {
                let file = OpenOptions::new().write(true).open(path_of(&known(fids, fid)?.node));
                file.and_then(|file| file.set_len(to.size)).map_err(errno)?;
            }
            Request::Mkdir { dfid, name, mode, .. } => {
                mkdirat(&known(fids, dfid)?.node, name, Mode::from_raw_mode(mode))?;
            }
            Request::Unlinkat { dirfid, name, flags } => {
                let flags = if flags & UNLINK_DIRECTORY != 0 { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                unlinkat(&known(fids, dirfid)?.node, name, flags)?;
            }
            Request::Renameat { olddirfid, oldname, newdirfid, newname } => {
                let from = (known(fids, olddirfid)?.node, oldname.to_vec());
                let to = (known(fids, newdirfid)?.node, newname.to_vec());
                rename(fids, &from, &to)?;
            }
            Request::Rename { fid, dfid, name } => {
                let moved = known(fids, fid)?;
                let to = (known(fids, dfid)?.node, name.to_vec());
                rename(fids, &found_at(&moved)?, &to)?;
            }
            Request::Link { dfid, fid, name } => {
                let (dir, node) = (known(fids, dfid)?.node, known(fids, fid)?.node);
                linkat(rustix::fs::CWD, path_of(&node), &dir, name, AtFlags::SYMLINK_FOLLOW)?;
            }
            Request::Clunk { fid } => drop(fids.remove(&fid).ok_or(Errno::BADF)?),
            Request::Remove { fid } => {
                let removed = fids.remove(&fid).ok_or(Errno::BADF)?;
                let (dir, name) = found_at(&removed)?;
                let flags = if is_folder(&removed.node) { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                unlinkat(&dir, name, flags)?;
            }
            other => panic!("{other:?} is not asked for"),
        }
        Ok(String::new())
    }
}

/// The name under which an object was found, if it has that still.
fn found_at(fid: &Fid) -> Result<Place, Errno> {
    let (dir, name) = fid.place.clone().ok_or(Errno::INVAL)?;
    let found = look(&dir, &name)?;
    if inode(&found) == inode(&fid.node) { Ok((dir, name)) } else { Err(Errno::STALE) }
}

/// Fids of the connection follow.
fn rename(fids: &mut HashMap<u32, Fid>, from: &Place, to: &Place) -> Result<(), Errno> {
    renameat(&from.0, &from.1[..], &to.0, &to.1[..])?;
    for fid in fids.values_mut().filter(|fid| is_at(fid, from)) {
        fid.place = Some(to.clone());
    }
    Ok(())
}
