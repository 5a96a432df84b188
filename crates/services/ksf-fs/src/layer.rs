//! The layer: exports, what is open, and how a handle becomes a descriptor.

use std::ffi::{CStr, CString};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Mode as Permissions, OFlags, ResolveFlags};
use rustix::io::{Errno, Result as SysResult};
use rustix::process::{Resource, getrlimit};

use crate::account::Account;
use crate::attr::{ASKED, Attr, Before, FileType, Found};
use crate::attr_cache::{AttrCache, Changing};
use crate::credential::{Credential, Identity};
use crate::descriptors::{Descriptors, Mode};
use crate::error::{ErrorKind, FsError};
use crate::export::{Export, ExportError, ExportOptions};
use crate::groups::Groups;
use crate::handle::Handle;
use crate::handle_cache::HandleCache;
use crate::lane::{Identities, Lane};
use crate::name_cache::NameCache;
use crate::ops::{Access, OpenFiles};
use crate::owed::{Debt, Owed, What};
use crate::rights::{Question, WhoKeys};
use crate::sys;
use crate::uncommitted::{Uncommitted, Verifier};

/// Locks of an export that keep the changes of one object in order.
const LOCKS: usize = 1024;
/// Bytes of a name, at most.
pub(crate) const NAME_BYTES_MAX: usize = 255;

/// How a name is looked up: in its folder, on its mount, and never through a link.
pub(crate) const INSIDE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// Opens an object without its content.
pub(crate) const OBJECT: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The bounds of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsOptions {
    /// Descriptors of the layer, besides a few that each call has for its time. Default: all that the process may open
    /// (RLIMIT_NOFILE).
    pub open_max: usize,
    /// Descriptors that are kept open between calls, with those that wait to be closed; at most half of `open_max`. Default 4096.
    pub descriptors_max: usize,
    /// Objects whose place is known where the kernel opens no handles, for each export; about 250 bytes each. Default 262,144.
    pub table_entries_max: usize,
    /// Objects of exclusive exports whose attributes are kept; about 300 bytes each, if there is such an export. Default 16,384.
    pub attr_entries_max: usize,
    /// Users whose groups are kept (`manage_gids`). Default 1024.
    pub group_entries_max: usize,
    /// How long they are kept, in seconds. Default 60.
    pub group_seconds: u64,
    /// Files with data that was written and not yet committed, at most a quarter of `open_max`; each has a
    /// descriptor, beside those of `descriptors_max`. Connections have shares, as those of `open_files_max`. A write of one file more is
    /// synced by the thread that makes it. Default 2048.
    pub uncommitted_files_max: usize,
    /// Files and folders that are open for clients ([`Fs::open`]), at most what the other two leave of `open_max`. A connection has 8 of
    /// half of them, and of the other half gets one more while it has fewer than are free. Default 65,536.
    pub open_files_max: usize,
}

impl FsOptions {
    /// The least `open_max` that lowers none of the other bounds. `has_opens`: clients open files ([`Fs::open`]).
    pub fn open_wanted(&self, has_opens: bool) -> usize {
        let others = (self.descriptors_max * 2).max(self.uncommitted_files_max * 4);
        let sum = self.descriptors_max + self.uncommitted_files_max + self.open_files_max;
        if has_opens { others.max(sum) } else { others }
    }

    /// How many of `open_max` are kept open between calls, are of files with uncommitted data, and are open for clients.
    fn shares(&self) -> [usize; 3] {
        let descriptors = self.descriptors_max.min(self.open_max / 2);
        let uncommitted = self.uncommitted_files_max.min(self.open_max / 4);
        [descriptors, uncommitted, self.open_files_max.min(self.open_max - descriptors - uncommitted)]
    }
}

impl Default for FsOptions {
    fn default() -> Self {
        Self {
            open_max: getrlimit(Resource::Nofile).current.map_or(usize::MAX, |max| max as usize),
            descriptors_max: 4096,
            table_entries_max: 262_144,
            attr_entries_max: 16_384,
            group_entries_max: 1024,
            group_seconds: 60,
            uncommitted_files_max: 2048,
            open_files_max: 65_536,
        }
    }
}

/// Figures of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FsCounters {
    /// Descriptors that are kept open now.
    pub descriptors: usize,
    /// Files and folders that are open for clients now.
    pub open_files: usize,
    /// Looks for a descriptor that found one.
    pub hits: u64,
    /// Looks that found none.
    pub misses: u64,
    /// Times that the attributes of an object were known without asking the kernel.
    pub attr_hits: u64,
    /// Objects whose descriptors were closed for others.
    pub evicted: u64,
    /// Handles of objects that were gone.
    pub stale: u64,
    /// Calls that were answered from memory, without a lane.
    pub warm: u64,
    /// Files with data that is not committed now.
    pub uncommitted_files: usize,
    /// Times that names or attributes were brought to the medium before a call was answered.
    pub settled: u64,
    /// Times that data could not be brought to the medium.
    pub write_back_failures: u64,
}

/// The file layer of a server: its exports and what is open of them.
#[derive(Debug)]
pub struct Fs {
    exports: Vec<Arc<Export>>,
    table_entries_max: usize,
    attr_entries_max: usize,
    pub(crate) attrs: AttrCache,
    pub(crate) descriptors: Arc<Descriptors>,
    pub(crate) handles: HandleCache,
    pub(crate) names: NameCache,
    pub(crate) groups: Groups,
    pub(crate) uncommitted: Arc<Uncommitted>,
    pub(crate) open_files: Arc<OpenFiles>,
    /// Random at the start of the server.
    first_verifier: u64,
    /// [`LOCKS`] of each export: who waits for the medium of one holds up nobody else.
    locks: Vec<Mutex<()>>,
    /// `/proc/self/fd`: opens the content of what is open without it.
    pub(crate) process: OwnedFd,
    stale: AtomicU64,
    pub(crate) settled: AtomicU64,
    /// As whom lanes run.
    pub(crate) identities: Identities,
    pub(crate) who_keys: WhoKeys,
    /// Calls that were answered without a lane.
    pub(crate) warm: AtomicU64,
}

/// An object that a handle leads to.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) descriptor: Arc<OwnedFd>,
    pub(crate) attr: Attr,
}

/// As whom a call runs, and on what.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) export: &'a Export,
    pub(crate) caller: Identity,
}

impl Fs {
    /// A layer without exports.
    ///
    /// # Errors
    ///
    /// [`ExportError`]: `/proc` is not there, or no random number for the verifier.
    pub fn new(options: FsOptions) -> Result<Self, ExportError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let process =
            rustix::fs::openat(CWD, c"/proc/self/fd", flags, Permissions::empty()).map_err(ExportError::NoProc)?;
        let mut verifier = [0; 8];
        let random = std::fs::File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut verifier));
        random.map_err(|error| ExportError::Io {
            path: "/dev/urandom".into(),
            what: "read random bytes for the verifier of writes",
            error,
        })?;
        let [descriptors_max, uncommitted_files_max, open_files_max] = options.shares();
        Ok(Self {
            exports: Vec::new(),
            table_entries_max: options.table_entries_max,
            attr_entries_max: options.attr_entries_max,
            attrs: AttrCache::default(),
            descriptors: Arc::new(Descriptors::new(descriptors_max)),
            handles: HandleCache::default(),
            names: NameCache::default(),
            groups: Groups::new(options.group_entries_max, Duration::from_secs(options.group_seconds)),
            uncommitted: Arc::new(Uncommitted::new(uncommitted_files_max)),
            open_files: Arc::new(OpenFiles::new(open_files_max)),
            first_verifier: u64::from_be_bytes(verifier),
            locks: Vec::new(),
            process,
            stale: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            identities: if rustix::process::geteuid().is_root() { Identities::Callers } else { Identities::Own },
            who_keys: WhoKeys::default(),
            warm: AtomicU64::new(0),
        })
    }

    /// Adds a folder that is served. Its key is kept in `state_folder`, which is made if it is missing.
    ///
    /// # Errors
    ///
    /// [`ExportError`]: the folder cannot be served, with the remedy.
    pub fn add_export(
        &mut self,
        path: &Path,
        state_folder: &Path,
        options: ExportOptions,
    ) -> Result<Arc<Export>, ExportError> {
        let is_first_exclusive = options.exclusive && !self.exports.iter().any(|export| export.options().exclusive);
        let export = Arc::new(Export::open(
            path,
            state_folder,
            options,
            &self.exports,
            self.table_entries_max,
            Verifier::new(self.first_verifier),
        )?);
        self.descriptors.add_export(export.id(), &export.closing);
        if export.options().manage_gids {
            let what = "start the thread that looks groups up";
            self.groups.start().map_err(|error| ExportError::Io { path: path.to_owned(), what, error })?;
        }
        if is_first_exclusive {
            self.attrs = AttrCache::new(self.attr_entries_max);
        }
        self.exports.push(Arc::clone(&export));
        self.locks.resize_with(self.exports.len() * LOCKS, Mutex::default);
        Ok(export)
    }

    /// In the order in which they were added.
    pub fn exports(&self) -> &[Arc<Export>] {
        &self.exports
    }

    /// The export of a handle; `None` for a handle of another layer.
    pub fn export_of(&self, handle: &Handle) -> Option<&Arc<Export>> {
        let id = handle.export_id();
        self.exports.iter().find(|export| export.id() == id)
    }

    /// The place of a handle's export among the exports; 0 for a handle of another layer.
    pub fn share_of(&self, handle: &Handle) -> usize {
        let id = handle.export_id();
        self.exports.iter().position(|export| export.id() == id).unwrap_or(0)
    }

    /// Checks bytes that should be a handle, without a system call.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::BadHandle`]: no export of this server made them.
    pub fn decode(&self, bytes: &[u8]) -> Result<Handle, FsError> {
        let claimed = Handle::claimed_export(bytes);
        let export = claimed.and_then(|id| self.exports.iter().find(|export| export.id() == id));
        let handle = export.and_then(|export| Handle::checked(bytes, export.key()));
        handle.ok_or_else(|| ErrorKind::BadHandle.into())
    }

    /// To be called once a second; calls no file system. Has a thread of each export close what is open for writing for two seconds,
    /// since nobody executes such a file, and what was not used for ten: a file that a local program removed keeps its space on the
    /// medium while it is open here. The thread also forgets files with uncommitted data that have no name any more.
    ///
    /// Files with data that nobody committed for 30 seconds are returned to be brought to the medium ([`Lanes::settle`]).
    ///
    /// [`Lanes::settle`]: crate::Lanes::settle
    pub fn close_idle(&self) -> Owed {
        self.groups.expire(Instant::now());
        self.handles.expire();
        self.names.expire();
        for export in &self.exports {
            let (id, descriptors, uncommitted) =
                (export.id(), Arc::clone(&self.descriptors), Arc::clone(&self.uncommitted));
            export.closing.tick(move |passed| {
                descriptors.close_idle(id, passed);
                if passed.looks() > 0 {
                    uncommitted.forget_gone(id, has_no_name);
                }
            });
        }
        let due = self.uncommitted.age().into_iter();
        let others = due.map(|(handle, written)| Debt { handle, what: What::Written(written) }).collect();
        Owed { others, ..Owed::default() }
    }

    /// Figures until now.
    pub fn counters(&self) -> FsCounters {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FsCounters {
            descriptors: self.descriptors.count(),
            open_files: self.open_files.count(),
            hits: count(&self.descriptors.hits),
            misses: count(&self.descriptors.misses),
            attr_hits: self.attrs.hits(),
            evicted: count(&self.descriptors.evicted),
            stale: count(&self.stale),
            warm: count(&self.warm),
            settled: count(&self.settled),
            uncommitted_files: self.uncommitted.len(),
            write_back_failures: self.uncommitted.failures(),
        }
    }

    /// The export of a handle that a call names.
    pub(crate) fn export(&self, handle: &Handle) -> Result<&Export, FsError> {
        self.export_of(handle).map(|export| &**export).ok_or_else(|| ErrorKind::BadHandle.into())
    }

    /// Finds out as whom a call runs, and whether it may change something here.
    pub(crate) fn begin(
        &self,
        lane: &Lane,
        credential: &Credential,
        handle: &Handle,
        changes: bool,
    ) -> Result<Call<'_>, FsError> {
        lane.check()?;
        let export = self.export(handle)?;
        let options = export.options();
        if changes && options.read_only {
            return Err(ErrorKind::ReadOnly.into());
        }
        if lane.identities() == Identities::Own {
            return Ok(Call { export, caller: Identity::own() });
        }
        let managed = match user_of(credential, options) {
            Some(_) if credential.managed.is_some() => credential.managed.clone(),
            Some(uid) => Some(self.groups.of(&lane.account, uid)?),
            None => None,
        };
        Ok(Call { export, caller: credential.identity(options, managed.as_deref()) })
    }

    /// As whom a call runs, if that is known without asking for groups.
    pub(crate) fn known_caller(&self, credential: &Credential, export: &Export) -> Option<Identity> {
        if self.identities == Identities::Own {
            return Some(Identity::own());
        }
        let options = export.options();
        let managed = credential.managed.as_deref();
        (user_of(credential, options).is_none() || managed.is_some()).then(|| credential.identity(options, managed))
    }

    /// Keeps for calls without a lane what the kernel said of a caller's rights.
    pub(crate) fn keep_rights(
        &self,
        call: &Call<'_>,
        handle: &Handle,
        question: Question,
        (asked_for, granted): (Access, Access),
    ) {
        if call.export.is_warm() {
            self.descriptors.keep_rights(handle, self.who_keys.who(&call.caller), question, asked_for, granted);
        }
    }

    /// True if the groups of a caller are known, which are then among `credential`, or if they do not matter to the export. If not,
    /// operations wait for them: see [`Fs::look_up_groups`].
    pub fn has_groups(&self, credential: &mut Credential, handle: &Handle) -> bool {
        let Some(uid) = self.user_to_ask_for(credential, handle) else { return true };
        credential.managed = self.groups.known(uid);
        credential.managed.is_some()
    }

    /// Looks the groups of a caller up on another thread, at the turn of its connection, and goes on with `then`, there or here.
    ///
    /// # Errors
    ///
    /// `then` is given [`ErrorKind::TryLater`] if that fails, or by [`Fs::close_idle`] if it takes longer than five seconds. After
    /// [`Fs::close`] it is dropped.
    pub fn look_up_groups(
        &self,
        account: &Account,
        mut credential: Credential,
        handle: &Handle,
        then: impl FnOnce(Result<Credential, FsError>) + Send + 'static,
    ) {
        let Some(uid) = self.user_to_ask_for(&credential, handle) else { return then(Ok(credential)) };
        let then = move |groups: Result<_, FsError>| {
            then(groups.map(|groups| {
                credential.managed = Some(groups);
                credential
            }));
        };
        self.groups.ask(account, uid, Box::new(then));
    }

    /// A server that is not root does not take its callers' groups.
    fn user_to_ask_for(&self, credential: &Credential, handle: &Handle) -> Option<u32> {
        let uid = user_of(credential, self.export(handle).ok()?.options())?;
        (self.identities == Identities::Callers).then_some(uid)
    }

    /// Drops the requests that wait for groups. Further ones are told to come later.
    pub fn close(&self) {
        self.groups.close();
    }

    /// The object of a handle and its attributes, as the server sees them.
    pub(crate) fn node(&self, lane: &Lane, handle: &Handle) -> Result<Node, FsError> {
        lane.check()?;
        let export = self.export(handle)?;
        let descriptor = match self.descriptors.get(handle, Mode::Path) {
            Some(descriptor) => descriptor,
            None => {
                let opened = self.open_object(export, handle);
                let descriptor = Arc::new(opened.inspect_err(|error| self.count_stale(error))?);
                drop(self.descriptors.put(handle, Mode::Path, &descriptor));
                descriptor
            }
        };
        let attr = self.live(export, handle, &descriptor)?;
        Ok(Node { descriptor, attr })
    }

    /// The attributes of an object that has a name still.
    pub(crate) fn live(&self, export: &Export, handle: &Handle, descriptor: &OwnedFd) -> Result<Attr, FsError> {
        let attr = attr_of(export, descriptor)?;
        if attr.nlink == 0 {
            self.descriptors.forget(handle);
            self.uncommitted.forget(handle);
            let error = ErrorKind::Stale.into();
            self.count_stale(&error);
            return Err(error);
        }
        Ok(attr)
    }

    fn count_stale(&self, error: &FsError) {
        if error.kind() == ErrorKind::Stale {
            self.stale.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn open_object(&self, export: &Export, handle: &Handle) -> Result<OwnedFd, FsError> {
        let Some(table) = &export.table else {
            let kernel = handle.kernel().ok_or(ErrorKind::BadHandle)?;
            let opened = self.with_room(export, || sys::open_by_handle(&export.root_descriptor, &kernel, OBJECT));
            // What the file system gave once and does not know now is gone; some say so by other numbers.
            return opened.map_err(|errno| match errno {
                Errno::NOENT | Errno::INVAL => ErrorKind::Stale.into(),
                errno => errno.into(),
            });
        };
        let root = (export.root(), &export.root_descriptor);
        let is_it = |opened: &OwnedFd| Ok(export.handle_of(opened)? == *handle);
        table.open(handle, root, |folder, name| self.open_name(export, folder, name), is_it)
    }

    /// A descriptor for the bytes of a regular file, which is opened only for a caller that may use it: while a file is open for
    /// writing nobody executes it. One that is kept may be of another caller, so permission is to be asked with each use.
    pub(crate) fn content(
        &self,
        lane: &mut Lane,
        caller: &Identity,
        handle: &Handle,
        mode: Mode,
    ) -> Result<Arc<OwnedFd>, FsError> {
        lane.check()?;
        if let Some(descriptor) = self.descriptors.get(handle, mode) {
            return Ok(descriptor);
        }
        let node = self.regular(lane, handle)?;
        let wanted = if mode == Mode::Write { WRITE_BIT } else { READ_BIT };
        lane.as_caller(caller, || permit(&node.descriptor, wanted, caller))??;
        self.open_content(&node, handle, mode)
    }

    /// A descriptor for reading, for the server itself: it brings a file to the medium, and nobody is kept from anything by it.
    pub(crate) fn to_sync(&self, file: &Node, handle: &Handle) -> Result<Arc<OwnedFd>, FsError> {
        match self.descriptors.get(handle, Mode::Read) {
            Some(descriptor) => Ok(descriptor),
            None => self.open_content(file, handle, Mode::Read),
        }
    }

    /// Other types than regular files are not opened: a FIFO or a device could block.
    pub(crate) fn regular(&self, lane: &Lane, handle: &Handle) -> Result<Node, FsError> {
        let node = self.node(lane, handle)?;
        match node.attr.file_type {
            FileType::Regular => Ok(node),
            FileType::Directory => Err(ErrorKind::IsDirectory.into()),
            _ => Err(ErrorKind::WrongType.into()),
        }
    }

    fn open_content(&self, node: &Node, handle: &Handle, mode: Mode) -> Result<Arc<OwnedFd>, FsError> {
        let access = if mode == Mode::Write { OFlags::WRONLY } else { OFlags::RDONLY };
        let descriptor = Arc::new(self.reopen(self.export(handle)?, &node.descriptor, access)?);
        drop(self.descriptors.put(handle, mode, &descriptor));
        Ok(descriptor)
    }

    /// Opens what is open without its content, as the identity of now.
    pub(crate) fn reopen(&self, export: &Export, object: &OwnedFd, access: OFlags) -> Result<OwnedFd, FsError> {
        let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let name = process_name(object);
        let open = || rustix::fs::openat(&self.process, name.as_c_str(), flags, Permissions::empty());
        Ok(self.with_room(export, open)?)
    }

    /// Opens something of an export, and once more with fewer other descriptors if there are none left.
    pub(crate) fn with_room<T>(&self, export: &Export, open: impl Fn() -> SysResult<T>) -> SysResult<T> {
        match open() {
            Err(Errno::MFILE | Errno::NFILE) => {
                self.descriptors.make_room(export.id());
                open()
            }
            other => other,
        }
    }

    /// Opens a name in a folder, without its content. A link is opened itself.
    pub(crate) fn open_name(&self, export: &Export, folder: &OwnedFd, name: &CStr) -> Result<OwnedFd, FsError> {
        self.with_room(export, || open_object(folder, name)).map_err(name_error)
    }

    /// The handle and the attributes of an object that was just opened, which is kept open. `place`: the folder and the name.
    pub(crate) fn found(
        &self,
        export: &Export,
        object: OwnedFd,
        mode: Mode,
        place: Option<(&Handle, &CStr)>,
    ) -> Result<Found, FsError> {
        let found = describe(export, &object, place)?;
        drop(self.descriptors.put(&found.handle, mode, &Arc::new(object)));
        Ok(found)
    }

    /// A name of an object was removed: it must not stay on the medium because it is open here.
    pub(crate) fn lost_name(&self, handle: &Handle) {
        self.descriptors.forget(handle);
        let Some(descriptor) = self.uncommitted.descriptor(handle) else { return };
        if has_no_name(&descriptor) {
            self.uncommitted.forget(handle);
        }
    }

    /// Keeps other changes of this object by this server out; a change of it begins.
    pub(crate) fn lock(&self, handle: &Handle) -> Order<'_> {
        let lock = self.lock_at(self.lock_of(handle));
        Order { changing: self.attrs.changing(handle), other: None, _locks: (lock, None) }
    }

    /// [`Fs::lock`] of two objects.
    pub(crate) fn lock_two(&self, one: &Handle, two: &Handle) -> Order<'_> {
        let (one_at, two_at) = (self.lock_of(one), self.lock_of(two));
        let (low, high) = (one_at.min(two_at), one_at.max(two_at));
        let first = self.lock_at(low);
        let second = (low != high).then(|| self.lock_at(high));
        let changing = self.attrs.changing(one);
        let other = (!changing.is_of(two)).then(|| self.attrs.changing(two));
        Order { changing, other, _locks: (first, second) }
    }

    /// What weak cache data has of an object before a change, asked for when the attributes after it are known. A client takes
    /// the change for the only one between the two, so it is there only if this is so: in an export that nothing else changes, and
    /// if no other change of this server was under way.
    pub(crate) fn before(&self, order: &Order<'_>, handle: &Handle, attr: &Attr) -> Option<Before> {
        let is_exclusive = self.export(handle).is_ok_and(|export| export.options().exclusive);
        (is_exclusive && order.of(handle).is_alone()).then(|| attr.before())
    }

    /// A change of an open object begins.
    pub(crate) fn changing_object(&self, export: &Export, object: &OwnedFd) -> Changing<'_> {
        export.handle_of(object).map_or_else(|_| self.attrs.changing_unknown(), |handle| self.attrs.changing(&handle))
    }

    fn lock_of(&self, handle: &Handle) -> usize {
        // Other bits than those that choose a part of the descriptor cache.
        self.share_of(handle) * LOCKS + ((handle.number() >> 8) % LOCKS as u64) as usize
    }

    fn lock_at(&self, at: usize) -> MutexGuard<'_, ()> {
        self.locks[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The user whose groups an export wants looked up.
fn user_of(credential: &Credential, options: &ExportOptions) -> Option<u32> {
    credential.user(options).filter(|_| options.manage_gids)
}

/// A change of one object or two. It ends, and then the next in order may begin.
pub(crate) struct Order<'a> {
    changing: Changing<'a>,
    other: Option<Changing<'a>>,
    _locks: (MutexGuard<'a, ()>, Option<MutexGuard<'a, ()>>),
}

impl<'a> Order<'a> {
    fn of(&self, handle: &Handle) -> &Changing<'a> {
        self.other.as_ref().filter(|other| other.is_of(handle)).unwrap_or(&self.changing)
    }
}

pub(crate) fn attr_of(export: &Export, object: &OwnedFd) -> Result<Attr, FsError> {
    Ok(attr_and_device(export, object)?.0)
}

/// [`attr_of`], and the device on which the object is.
pub(crate) fn attr_and_device(export: &Export, object: &OwnedFd) -> Result<(Attr, (u32, u32)), FsError> {
    let stat = rustix::fs::statx(object, c"", AtFlags::EMPTY_PATH, ASKED)?;
    let device = (stat.stx_dev_major, stat.stx_dev_minor);
    let part = if device == export.device {
        0
    } else {
        part_of(device, rustix::fs::fstatvfs(object)?.f_fsid, export.file_system)
    };
    Ok((Attr::of(&stat, export.id(), part), device))
}

/// What tells the part of a file system that an object lies in from that of the root, whose id is `root`: its own id, which a
/// subvolume of btrfs keeps; else the device, which is another one after a start. Never 0, which is the root's.
fn part_of(device: (u32, u32), own: u64, root: u64) -> u32 {
    let part = if own == root { (device.0 << 20) ^ device.1 } else { (own >> 32) as u32 ^ own as u32 };
    part | 0x8000_0000
}

fn has_no_name(object: &OwnedFd) -> bool {
    let stat = rustix::fs::statx(object, c"", AtFlags::EMPTY_PATH, ASKED);
    stat.is_ok_and(|stat| stat.stx_nlink == 0)
}

/// The handle and the attributes of an open object.
pub(crate) fn describe(export: &Export, object: &OwnedFd, place: Option<(&Handle, &CStr)>) -> Result<Found, FsError> {
    let handle = export.handle_of(object)?;
    if let Some((folder, name)) = place {
        export.learn(&handle, folder, name);
    }
    Ok(Found { handle, attr: attr_of(export, object)? })
}

/// The name of a descriptor in `/proc/self/fd`.
pub(crate) fn process_name(object: &OwnedFd) -> CString {
    CString::new(object.as_raw_fd().to_string()).unwrap_or_default()
}

/// Opens a name in a folder, without its content. A link is opened itself.
fn open_object(folder: &OwnedFd, name: &CStr) -> SysResult<OwnedFd> {
    rustix::fs::openat2(folder, name, OBJECT, Permissions::empty(), INSIDE)
}

/// What a name inside of a folder failed with.
pub(crate) fn name_error(errno: Errno) -> FsError {
    match errno {
        Errno::XDEV => ErrorKind::MountPoint.into(),
        errno => errno.into(),
    }
}

/// A name that can be looked up.
pub(crate) fn checked_name(name: &[u8]) -> Result<CString, FsError> {
    if name.is_empty() {
        return Err(FsError::of_call(ErrorKind::Invalid, Errno::NOENT));
    }
    if name.contains(&b'/') {
        return Err(ErrorKind::Invalid.into());
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(ErrorKind::NameTooLong.into());
    }
    CString::new(name).map_err(|_| ErrorKind::Invalid.into())
}

/// A name that can be made or removed; `dots`: the error for '.' and '..'.
pub(crate) fn entry_name(name: &[u8], dots: FsError) -> Result<CString, FsError> {
    match name {
        b"." | b".." => Err(dots),
        name => checked_name(name),
    }
}

/// May this caller, as whom the thread runs, read (R_OK) or write (W_OK) a file by its handle?
///
/// A file that was opened by its owner stays usable for the owner when its mode changes, and what may be executed must be
/// read for that; a server that knows no opens lets both pass (RFC 1813, section 4.4).
pub(crate) fn permit(file: &OwnedFd, wanted: u32, caller: &Identity) -> SysResult<()> {
    let denied = match sys::access(file, wanted) {
        Err(Errno::ACCESS) => Errno::ACCESS,
        other => return other,
    };
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, ASKED)?;
    let is_owner = stat.stx_uid == caller.uid;
    let may_execute = || wanted == READ_BIT && sys::access(file, EXECUTE_BIT).is_ok();
    if is_owner || may_execute() { Ok(()) } else { Err(denied) }
}

/// R_OK, W_OK and X_OK of access(2).
pub(crate) const READ_BIT: u32 = 4;
pub(crate) const WRITE_BIT: u32 = 2;
pub(crate) const EXECUTE_BIT: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::Served;

    #[test]
    fn with_the_descriptors_that_it_wants_no_bound_is_lower() {
        let shares = |open_max| FsOptions { open_max, ..FsOptions::default() }.shares();
        let [nfs, ninep] = [false, true].map(|has_opens| FsOptions::default().open_wanted(has_opens));
        assert_eq!(shares(nfs)[..2], [4096, 2048]);
        assert!(shares(nfs - 4)[..2] < [4096, 2048][..]);
        assert_eq!(shares(ninep), [4096, 2048, 65_536]);
        assert_eq!(shares(ninep - 1), [4096, 2048, 65_535]);
        assert_eq!(shares(100), [50, 25, 25]);
    }

    #[test]
    fn no_handle_has_a_lock_of_another_export() {
        let mut served = Served::open_to_all();
        let other = ksf_test::Folder::to_export();
        let [state, data] = ["state", "data"].map(|name| other.path(name));
        std::fs::create_dir(&data).unwrap();
        served.fs.add_export(&data, &state, ExportOptions::default()).unwrap();
        let fs = &served.fs;
        let [one, two] = [0, 1].map(|at| Arc::clone(&fs.exports()[at]));
        let _changing = fs.lock(one.root());
        for number in 0..20_000u64 {
            let kernel = sys::KernelHandle::new(1, &number.to_ne_bytes()).unwrap();
            let at = fs.lock_of(&two.handle(&kernel).unwrap());
            assert!(fs.locks[at].try_lock().is_ok(), "handle {number}");
        }
    }

    #[test]
    fn a_part_of_a_file_system_is_told_by_its_id_and_by_its_device_if_it_has_none() {
        let root = 0x1111_2222_3333_4444;
        let subvolume = part_of((0, 50), 0x1111_2222_3333_4445, root);
        assert_eq!(subvolume, part_of((0, 99), 0x1111_2222_3333_4445, root), "the same after a start");
        assert_ne!(subvolume, part_of((0, 50), 0x1111_2222_3333_4446, root));
        assert_ne!(part_of((0, 50), root, root), part_of((0, 51), root, root));
        assert!([subvolume, part_of((0, 0), root, root), part_of((1, 1), 0, root)].iter().all(|part| *part != 0));
    }
}
