//! Sockets that a process answers questions about itself on: one line in, one line out, then the end.
//!
//! `ksf stat` asks servers there, `ksf accel status` asks holders; what the lines say is theirs (JSON, by convention). A
//! [`StatusSocket`] never waits: a client that is silent, or reads nothing, keeps no other client from being answered.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::threads;

/// Clients at a time; one more ends the oldest.
const CLIENTS_MAX: usize = 64;
/// When to look for a descriptor again, where there was none for a client.
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Bytes of a question.
const QUESTION_BYTES_MAX: usize = 4096;
/// Bytes of an answer that a client takes.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// How long a client waits for the next piece of an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// A listening socket in the file system, for its owner and root (mode 0600). Dropping it removes it, and the folder if it
/// was made for it and no other code uses it.
///
/// Its descriptor ([`AsFd`]) is readable when [`serve`](Self::serve) has something to do.
#[derive(Debug)]
pub struct StatusSocket {
    path: PathBuf,
    folder: SocketFolder,
    name: OsString,
    made_folder: Option<PathBuf>,
    socket: OwnedFd,
    epoll: OwnedFd,
    clients: BTreeMap<u64, Client>,
    next: u64,
    /// There was no descriptor for a client that waits.
    refused: bool,
}

/// The number of the listening socket among the events; clients count on from here.
const LISTENER: u64 = 0;

#[derive(Debug)]
struct Client {
    socket: OwnedFd,
    question: Vec<u8>,
    /// What is left to be sent, once the question is whole.
    answer: Option<Vec<u8>>,
    sent: usize,
}

impl StatusSocket {
    /// Listens at a path. A socket without a listener is replaced, the last folder of the path is made.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::AddrInUse`] if a server listens there or it is no socket; [`io::ErrorKind::PermissionDenied`] if
    /// another user could put files of its own in the socket's place: the folder is neither root's nor this process's, or
    /// all may write there without the sticky bit. Else what the file system says.
    pub fn at(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        let parent = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let made = parent.map(|folder| make(folder, false)).transpose()?.flatten();
        let folder = SocketFolder::open(parent.unwrap_or(Path::new(".")))?;
        let place = folder.place(&name);
        if is_stale(&place) {
            folder.remove(&name)?;
        }
        // By its own path, which ss(8) shows.
        let socket = bind(path)?;
        if rustix::fs::statat(&folder.0, &name, AtFlags::SYMLINK_NOFOLLOW).is_err() {
            let why = format!("{} has come to lead to another folder", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        Self::new(socket, path.to_owned(), folder, name, made)
    }

    /// Listens in a folder, which is made, by the name `PID.sock`, or `PID-2.sock` and so on where this process has several.
    /// Sockets that killed processes have left there are removed.
    ///
    /// # Errors
    ///
    /// Those of [`StatusSocket::at`].
    pub fn in_folder(path: &Path) -> io::Result<Self> {
        // Its last user may remove the folder at any moment.
        for _ in 0..100 {
            let made = make(path, true)?;
            let folder = match SocketFolder::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                folder => folder?,
            };
            folder.remove_stale();
            // It gets its name when it listens: others take a socket without a listener for one of the dead.
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let unnamed = OsString::from(format!(".{}-{count}", std::process::id()));
            let _ = folder.remove(&unnamed);
            let named = bind(&folder.place(&unnamed)).and_then(|socket| Ok((socket, folder.name(&unnamed)?)));
            let _ = folder.remove(&unnamed);
            match named {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                named => {
                    return named.and_then(|(socket, name)| Self::new(socket, path.join(&name), folder, name, made));
                }
            }
        }
        Err(io::ErrorKind::NotFound.into())
    }

    fn new(
        socket: OwnedFd,
        path: PathBuf,
        folder: SocketFolder,
        name: OsString,
        made_folder: Option<PathBuf>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        // By edges: where no descriptor is left, the server does not spin. A client that waits is served with the next that comes,
        // and on a thread of its own a little later.
        epoll::add(&epoll, &socket, EventData::new_u64(LISTENER), EventFlags::IN | EventFlags::ET)?;
        let (clients, next) = (BTreeMap::new(), LISTENER + 1);
        Ok(Self { path, folder, name, made_folder, socket, epoll, clients, next, refused: false })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Does what can be done without waiting. `answer`: from a question to its answer, each without the newline.
    pub fn serve(&mut self, mut answer: impl FnMut(&str) -> String) {
        let mut events = Vec::with_capacity(16);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&now)).is_err() {
            return;
        }
        for event in &events {
            match event.data.u64() {
                LISTENER => self.accept(),
                number => self.advance(number, &mut answer),
            }
        }
    }

    /// Serves on a thread of that name, until the returned value is dropped.
    pub fn spawn(mut self, name: &str, mut answer: impl FnMut(&str) -> String + Send + 'static) -> io::Result<Served> {
        let (path, stop) = (self.path.clone(), Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?));
        let told = Arc::clone(&stop);
        let work = move || {
            loop {
                let mut both = [PollFd::new(&*told, PollFlags::IN), PollFd::new(&self, PollFlags::IN)];
                let waited = poll(&mut both, self.refused.then_some(&AGAIN));
                if both[0].revents().contains(PollFlags::IN) || waited.is_err_and(|error| error != Errno::INTR) {
                    return;
                }
                if self.refused {
                    self.accept();
                }
                self.serve(&mut answer);
            }
        };
        let thread = threads::start(name, work)?;
        Ok(Served { path, stop, thread: Some(thread) })
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            let accepted = rustix::net::accept_with(&self.socket, flags);
            // A flood of connections may take all descriptors for a moment.
            self.refused = matches!(accepted, Err(Errno::MFILE | Errno::NFILE));
            let Ok(socket) = accepted else { return };
            if self.clients.len() >= CLIENTS_MAX {
                self.clients.pop_first();
            }
            let number = self.next;
            self.next += 1;
            if epoll::add(&self.epoll, &socket, EventData::new_u64(number), EventFlags::IN).is_ok() {
                self.clients.insert(number, Client { socket, question: Vec::new(), answer: None, sent: 0 });
            }
        }
    }

    fn advance(&mut self, number: u64, answer: &mut impl FnMut(&str) -> String) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let has_asked = client.answer.is_some();
        let mut done = client.receive(answer);
        done = done.and_then(|()| client.send());
        if matches!(done, Err(Errno::AGAIN | Errno::INTR)) {
            let data = EventData::new_u64(number);
            let is_watched = has_asked
                || client.answer.is_none()
                || epoll::modify(&self.epoll, &client.socket, data, EventFlags::OUT).is_ok();
            if is_watched {
                return;
            }
        }
        self.clients.remove(&number);
    }
}

impl Client {
    /// Ok when the question is whole and the answer there.
    fn receive(&mut self, answer: &mut impl FnMut(&str) -> String) -> Result<(), Errno> {
        while self.answer.is_none() {
            let mut piece = [0; 1024];
            let (bytes, _) = rustix::net::recv(&self.socket, &mut piece, RecvFlags::DONTWAIT)?;
            self.question.extend_from_slice(&piece[..bytes]);
            if self.question.is_empty() {
                // It has gone without a question.
                return Err(Errno::PIPE);
            }
            let line = self.question.split(|byte| *byte == b'\n').next().unwrap_or_default();
            if bytes > 0 && line.len() == self.question.len() {
                if line.len() > QUESTION_BYTES_MAX {
                    return Err(Errno::TOOBIG);
                }
                continue;
            }
            let mut text = answer(&String::from_utf8_lossy(line)).into_bytes();
            text.push(b'\n');
            self.answer = Some(text);
        }
        Ok(())
    }

    /// Ok when all is sent.
    fn send(&mut self) -> Result<(), Errno> {
        let answer = self.answer.as_deref().unwrap_or_default();
        while self.sent < answer.len() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            self.sent += rustix::net::send(&self.socket, &answer[self.sent..], flags)?;
        }
        Ok(())
    }
}

impl AsFd for StatusSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        // Another process may have removed it already.
        let _ = self.folder.remove(&self.name);
        if let Some(folder) = &self.made_folder {
            // Fails, and should, while another process has a socket there.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// A [`StatusSocket`] that is served by a thread of its own. Dropping it ends both.
#[derive(Debug)]
pub struct Served {
    path: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Asks the process behind a socket. The question and the answer are lines, without the newline.
///
/// # Errors
///
/// [`io::ErrorKind::ConnectionRefused`] and [`io::ErrorKind::NotFound`]: there is no such process any more;
/// [`io::ErrorKind::UnexpectedEof`]: it ended, or hung up, instead of answering; [`io::ErrorKind::WouldBlock`]: it did not
/// say anything for 5 s.
pub fn ask(path: &Path, question: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{question}\n").as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream).take(ANSWER_BYTES_MAX).read_line(&mut answer)?;
    match answer.strip_suffix('\n') {
        Some(line) => Ok(line.to_owned()),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Lists the sockets of this user and root in a folder, with and without a listener. A missing folder has none.
///
/// # Errors
///
/// [`io::ErrorKind::PermissionDenied`] if another user could replace the sockets, as for [`StatusSocket::at`]. Else what
/// the file system says.
pub fn sockets(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let names = match SocketFolder::open(folder).and_then(|open| open.sockets()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        names => names?,
    };
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// Makes a folder for sockets, with those above it if they are wanted. The folder, if it was not there.
fn make(folder: &Path, with_parents: bool) -> io::Result<Option<PathBuf>> {
    if folder.exists() {
        return Ok(None);
    }
    // All users may look, and use it for other things; each socket has a mode of its own.
    match DirBuilder::new().recursive(with_parents).mode(0o755).create(folder) {
        // Another process that starts now was first.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        result => result.map(|()| Some(folder.to_owned())),
    }
}

/// A socket that listens. Its file has the mode 0600 from its first moment: the kernel makes it with the socket's own
/// (net/unix/af_unix.c, `unix_bind_bsd`), and no path is followed a second time.
fn bind(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 16)?;
    Ok(socket)
}

/// An open folder in which no other user but root can rename or remove this process's sockets. Everything in it is reached
/// by its descriptor, so a path that leads elsewhere meanwhile changes nothing.
#[derive(Debug)]
struct SocketFolder(OwnedFd);

impl SocketFolder {
    fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = fs::File::from(rustix::fs::open(path, flags, Mode::empty())?);
        let metadata = folder.metadata()?;
        if !is_trusted(metadata.uid()) || metadata.mode() & 0o1002 == 0o002 {
            let why = format!("{} is a folder in which another user could take the socket's place", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        Ok(Self(folder.into()))
    }

    /// A path to a file of the folder that does not lead over the folder's own path. It is short, too: an address of a Unix
    /// socket has 108 bytes.
    fn place(&self, name: &OsString) -> PathBuf {
        Path::new("/proc/self/fd").join(self.0.as_raw_fd().to_string()).join(name)
    }

    fn remove(&self, name: &OsString) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }

    /// Gives a socket the first free name of this process.
    fn name(&self, unnamed: &OsString) -> io::Result<OsString> {
        let pid = std::process::id();
        let mut number = 1;
        loop {
            let name = OsString::from(if number == 1 { format!("{pid}.sock") } else { format!("{pid}-{number}.sock") });
            match rustix::fs::linkat(&self.0, unnamed, &self.0, &name, AtFlags::empty()) {
                Ok(()) => return Ok(name),
                Err(Errno::EXIST) if is_stale(&self.place(&name)) => self.remove(&name)?,
                Err(Errno::EXIST) => number += 1,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Names of the sockets that this user or root owns: where all may write, as in `/tmp`, others have theirs, too.
    fn sockets(&self) -> io::Result<Vec<OsString>> {
        let is_wanted = |name: &OsString| {
            let file = rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW);
            Path::new(name).extension().is_some_and(|extension| extension == "sock")
                && file.is_ok_and(|file| FileType::from_raw_mode(file.st_mode).is_socket() && is_trusted(file.st_uid))
        };
        let entries = fs::read_dir(self.place(&OsString::new()))?;
        Ok(entries.flatten().map(|entry| entry.file_name()).filter(is_wanted).collect())
    }

    /// Removes sockets that killed processes have left.
    fn remove_stale(&self) {
        for name in self.sockets().unwrap_or_default() {
            if is_stale(&self.place(&name)) {
                // Another process that starts now may have been first.
                let _ = self.remove(&name);
            }
        }
    }
}

/// True for root and the user of this process.
fn is_trusted(owner: u32) -> bool {
    [0, rustix::process::geteuid().as_raw()].contains(&owner)
}

/// A socket without a listener: its process was killed.
fn is_stale(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .is_ok_and(|socket| rustix::net::connect(&socket, &address) == Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use ksf_test::Folder;
    use rustix::fs::inotify;

    use super::*;

    /// Names in a folder, sorted.
    fn names(folder: &Path) -> Vec<String> {
        let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    fn dead(path: &Path) {
        drop(bind(path).unwrap());
    }

    fn louder(question: &str) -> String {
        question.to_uppercase()
    }

    #[test]
    fn questions_are_answered_line_by_line() {
        let folder = Folder::new();
        let served = StatusSocket::at(&folder.path("x.sock")).unwrap().spawn("status", louder).unwrap();
        assert_eq!(ask(served.path(), "how are you?").unwrap(), "HOW ARE YOU?");
        assert_eq!(ask(served.path(), "").unwrap(), "");
        // In pieces, and without a newline at the end.
        let mut stream = UnixStream::connect(served.path()).unwrap();
        stream.write_all(b"in p").unwrap();
        assert_eq!(ask(served.path(), "between").unwrap(), "BETWEEN");
        stream.write_all(b"ieces").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(io::read_to_string(stream).unwrap(), "IN PIECES\n");
        let mode = fs::metadata(served.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    /// A mode that is set by path later could be that of another file by then.
    #[test]
    fn its_file_is_made_with_its_mode() {
        use inotify::{CreateFlags, ReadFlags, WatchFlags};
        let folder = Folder::new();
        let changes = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&changes, folder.path(""), WatchFlags::CREATE | WatchFlags::ATTRIB).unwrap();
        let sockets = [StatusSocket::at(&folder.path("x.sock")), StatusSocket::in_folder(&folder.path(""))];
        for socket in sockets {
            let mode = fs::metadata(socket.unwrap().path()).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&changes, &mut buffer);
        let mut made = 0;
        while let Ok(event) = events.next() {
            assert!(!event.events().contains(ReadFlags::ATTRIB), "{event:?}: its mode was changed");
            made += usize::from(event.events().contains(ReadFlags::CREATE));
        }
        assert!(made >= 2, "{made} files");
    }

    #[test]
    fn folders_in_which_others_could_take_its_place_are_refused() {
        if !ksf_test::is_root() {
            return ksf_test::skip("needs root: a folder of another user");
        }
        let folder = Folder::new();
        let target = folder.write("target", "another's");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let before = mode(&target);
        let refuses = |path: &Path| {
            let results = [StatusSocket::at(&path.join("x.sock")), StatusSocket::in_folder(path)];
            results.into_iter().all(|result| result.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied))
        };
        // Of a user who puts a link to a foreign file there while the socket is made.
        let theirs = folder.path("theirs");
        fs::create_dir(&theirs).unwrap();
        std::os::unix::fs::chown(&theirs, Some(65534), Some(65534)).unwrap();
        std::os::unix::fs::symlink(&target, theirs.join("x.sock")).unwrap();
        assert!(refuses(&theirs));
        // By a link, too.
        std::os::unix::fs::symlink(&theirs, folder.path("link")).unwrap();
        assert!(refuses(&folder.path("link")));
        assert_eq!(sockets(&theirs).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        let open = folder.path("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        assert!(refuses(&open));
        // As /tmp is.
        fs::set_permissions(&open, Permissions::from_mode(0o1777)).unwrap();
        assert!(!refuses(&open));
        assert_eq!(mode(&target), before);
        let socket = StatusSocket::at(&open.join("y.sock")).unwrap();
        assert_eq!(mode(socket.path()), 0o600);
        // What others put there is not listed.
        let planted = StatusSocket::at(&open.join("z.sock")).unwrap();
        std::os::unix::fs::chown(planted.path(), Some(65534), None).unwrap();
        fs::write(open.join("file.sock"), "not a socket").unwrap();
        assert_eq!(sockets(&open).unwrap(), [socket.path()]);
        drop(planted);
        // The folder's name is another's by the time it goes: the socket is removed where it is.
        fs::rename(&open, folder.path("moved")).unwrap();
        fs::create_dir(&open).unwrap();
        fs::write(open.join("y.sock"), "another's").unwrap();
        drop(socket);
        assert!(open.join("y.sock").exists() && !folder.path("moved/y.sock").exists());
    }

    #[test]
    fn who_reads_nothing_or_says_nothing_holds_up_nobody() {
        let folder = Folder::new();
        let large = || "x".repeat(8 << 20);
        let answer = move |question: &str| if question == "large" { large() } else { louder(question) };
        let served = StatusSocket::at(&folder.path("x.sock")).unwrap().spawn("status", answer).unwrap();
        let mut slow = UnixStream::connect(served.path()).unwrap();
        slow.set_read_timeout(Some(ksf_test::PATIENCE)).unwrap();
        slow.write_all(b"large\n").unwrap();
        let silent: Vec<UnixStream> =
            (0..CLIENTS_MAX - 2).map(|_| UnixStream::connect(served.path()).unwrap()).collect();
        assert_eq!(ask(served.path(), "quick").unwrap(), "QUICK");
        assert_eq!(io::read_to_string(&slow).unwrap().len(), (8 << 20) + 1);
        // The oldest go when there are too many.
        let more: Vec<UnixStream> = (0..CLIENTS_MAX).map(|_| UnixStream::connect(served.path()).unwrap()).collect();
        assert_eq!(ask(served.path(), "quick").unwrap(), "QUICK");
        silent[0].set_read_timeout(Some(ksf_test::PATIENCE)).unwrap();
        assert_eq!((&silent[0]).read(&mut [0]).unwrap(), 0);
        drop(more);
    }

    #[test]
    fn a_question_without_an_end_is_hung_up_on() {
        let folder = Folder::new();
        let served = StatusSocket::at(&folder.path("x.sock")).unwrap().spawn("status", louder).unwrap();
        let error = ask(served.path(), &"x".repeat(100_000)).unwrap_err();
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        assert!(matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe), "{error}");
        assert_eq!(ask(served.path(), "quick").unwrap(), "QUICK");
    }

    #[test]
    fn sockets_of_the_killed_are_removed_and_those_of_the_living_stay() {
        let folder = Folder::new();
        dead(&folder.path("1.sock"));
        fs::write(folder.path("note"), "not a socket").unwrap();
        let first = StatusSocket::in_folder(&folder.path("")).unwrap();
        let own = |number: &str| format!("{}{number}.sock", std::process::id());
        assert_eq!(names(&folder.path("")), [own(""), "note".into()]);
        let second = StatusSocket::in_folder(&folder.path("")).unwrap();
        assert_eq!(names(&folder.path("")), [own("-2"), own(""), "note".into()]);
        assert_eq!(sockets(&folder.path("")).unwrap().len(), 2);
        drop((first, second));
        assert_eq!(names(&folder.path("")), ["note"]);
    }

    #[test]
    fn a_path_is_taken_from_the_dead_only_and_its_folder_goes_with_it() {
        let folder = Folder::new();
        let path = folder.path("x.sock");
        dead(&path);
        let first = StatusSocket::at(&path).unwrap();
        assert_eq!(StatusSocket::at(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(!path.exists());
        let nested = folder.path("made/x.sock");
        let [first, second] = [nested, folder.path("made/y.sock")].map(|path| StatusSocket::at(&path).unwrap());
        drop(first);
        drop(second);
        // The second has not made it.
        assert!(names(&folder.path("made")).is_empty());
        fs::remove_dir(folder.path("made")).unwrap();
        drop(StatusSocket::at(&folder.path("made/x.sock")).unwrap());
        assert!(!folder.path("made").exists());
        assert!(StatusSocket::at(&folder.path("no/such/x.sock")).is_err());
        assert!(StatusSocket::in_folder(&folder.path("no/such")).is_ok());
        assert_eq!(sockets(&folder.path("missing")).unwrap(), Vec::<PathBuf>::new());
    }
}
