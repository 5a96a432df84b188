//! The socket that people ask for status on.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};

use crate::status::Reply;

/// Questions at a time.
const CONNS_MAX: usize = 64;

pub(crate) struct StatusSocket {
    socket: OwnedFd,
    path: PathBuf,
    conns: HashMap<u64, OwnedFd>,
    next: u64,
}

impl StatusSocket {
    /// `PID.sock`, or `PID-2.sock` and so on where this process has several holders.
    pub(crate) fn bind(folder: &Path) -> io::Result<Self> {
        // Only its owner may ask; the socket itself says the same.
        match std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        remove_stale(folder);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // It gets its name when it listens: a reader takes a socket without a listener for one of the dead.
        let unnamed = folder.join(format!(".{}", crate::sys::unique_name()?));
        rustix::net::bind(&socket, &SocketAddrUnix::new(&unnamed)?)?;
        let path = std::fs::set_permissions(&unnamed, std::fs::Permissions::from_mode(0o600))
            .and_then(|()| Ok(rustix::net::listen(&socket, 16)?))
            .and_then(|()| name(&unnamed, folder));
        std::fs::remove_file(&unnamed)?;
        Ok(Self { socket, path: path?, conns: HashMap::new(), next: 1 })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// What somebody wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Question {
    Status,
    Pause,
    Resume,
    Unknown,
}

impl StatusSocket {
    /// Takes in who connects. `watch`: has the number called back with [`StatusSocket::question`] when something is said.
    pub(crate) fn accept(&mut self, watch: impl FnOnce(BorrowedFd<'_>, u64) -> bool) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(&self.socket, flags) else { return };
        if self.conns.len() >= CONNS_MAX {
            // The oldest has had its time.
            let oldest = self.conns.keys().min().copied();
            oldest.and_then(|oldest| self.conns.remove(&oldest));
        }
        let number = self.next;
        self.next += 1;
        if watch(socket.as_fd(), number) {
            self.conns.insert(number, socket);
        }
    }

    /// One question per connection; it ends when the socket is dropped.
    pub(crate) fn question(&mut self, number: u64) -> Option<(OwnedFd, Question)> {
        let socket = self.conns.remove(&number)?;
        let mut word = [0; 16];
        let (len, _) = rustix::net::recv(&socket, &mut word, RecvFlags::DONTWAIT).ok()?;
        let question = match &word[..len] {
            b"status" => Question::Status,
            b"pause" => Question::Pause,
            b"resume" => Question::Resume,
            _ => Question::Unknown,
        };
        Some((socket, question))
    }
}

impl AsFd for StatusSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Gives a socket the first free name of this process.
fn name(unnamed: &Path, folder: &Path) -> io::Result<PathBuf> {
    let pid = std::process::id();
    let mut number = 1;
    loop {
        let name = if number == 1 { format!("{pid}.sock") } else { format!("{pid}-{number}.sock") };
        let path = folder.join(name);
        match std::fs::hard_link(unnamed, &path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Err(_) if is_stale(&SocketAddrUnix::new(&path)?) => std::fs::remove_file(&path)?,
            Err(_) => number += 1,
        }
    }
}

/// Removes what holders have left that were killed: as a rule by systemd, which kills what is left of a service when its
/// main process has ended (`KillMode=mixed`).
fn remove_stale(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_socket = path.extension().is_some_and(|extension| extension == "sock");
        if is_socket && SocketAddrUnix::new(&path).is_ok_and(|address| is_stale(&address)) {
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Nobody listens there: its process was killed.
fn is_stale(address: &SocketAddrUnix) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .is_ok_and(|socket| rustix::net::connect(&socket, address) == Err(Errno::CONNREFUSED))
}

/// Sends the answer; who does not get it says so by itself.
pub(crate) fn answer(socket: BorrowedFd<'_>, reply: &Reply) -> io::Result<()> {
    let file = std::fs::File::from(rustix::fs::memfd_create("ksf_status", MemfdFlags::CLOEXEC)?);
    serde_json::to_writer(io::BufWriter::new(&file), reply)?;
    io::Seek::rewind(&mut &file)?;
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[io::IoSlice::new(b"json")], &mut control, flags)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_the_killed_are_removed_and_those_of_the_living_stay() {
        let folder = tempfile::tempdir().unwrap();
        let names = || {
            let mut names: Vec<_> =
                std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let dead = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&dead, &SocketAddrUnix::new(folder.path().join("1.sock")).unwrap()).unwrap();
        drop(dead);
        std::fs::write(folder.path().join("note"), "not a socket").unwrap();
        let first = StatusSocket::bind(folder.path()).unwrap();
        let own = |number: &str| std::ffi::OsString::from(format!("{}{number}.sock", std::process::id()));
        assert_eq!(names(), [own(""), "note".into()]);
        let second = StatusSocket::bind(folder.path()).unwrap();
        assert_eq!(names(), [own("-2"), own(""), "note".into()]);
        drop((first, second));
        assert_eq!(names(), ["note"]);
    }
}
