//! A lane: a thread whose file system calls run as callers.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::Arc;

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::Gid;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups};
use smallvec::SmallVec;

use crate::account::Account;
use crate::credential::Identity;
use crate::error::{ErrorKind, FsError};
use crate::owed::Owed;
use crate::syncs::Syncs;
use crate::sys;

/// What a lane keeps of the server's capabilities. Among the others is CAP_SYS_RESOURCE, which the kernel does not drop with the
/// file system uid: with it callers would exceed their quotas and use blocks that are reserved for root.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID);

/// What it must have to run calls as their callers. A container may lack the others: without CAP_DAC_READ_SEARCH handles end with
/// the server, without CAP_MKNOD nobody makes devices.
const NEEDED: CapabilitySet = KEPT.difference(CapabilitySet::MKNOD.union(CapabilitySet::DAC_READ_SEARCH));

/// What must be gone while a caller is not root (capabilities(7), "Effect of user ID changes on capabilities").
const OVERRIDES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD);

/// A user that is not root, to try what the kernel does with capabilities.
const ANOTHER_UID: u32 = 65_534;

/// Bytes of folder entries that are asked for at once.
pub(crate) const ENTRIES_BYTES: usize = 32 << 10;

/// As whom operations run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identities {
    /// Each call as its caller: the server is root.
    Callers,
    /// All calls as the user of the server, who is not root.
    Own,
}

/// Why a thread could not become a lane.
#[derive(Debug, thiserror::Error)]
pub enum LaneError {
    /// Its capabilities cannot be read or narrowed.
    #[error(
        "a thread for file operations cannot narrow its capabilities: {0}; allow capget and capset, or start the server without root"
    )]
    Capabilities(Errno),
    /// It is root without what it takes to run calls as their callers; as root itself it must not run them.
    #[error(
        "the server is root without {}, so it cannot carry requests out as their users: give it these capabilities \
         (CapabilityBoundingSet= of a unit, --cap-add of a container), or start it as another user, whose rights all requests then have",
        names(*.0)
    )]
    Incomplete(CapabilitySet),
    /// The kernel leaves capabilities in place when the file system uid changes, so no permission would be checked.
    #[error(
        "the kernel does not drop root's rights with the file system uid (securebits no_setuid_fixup, or user 65534 is not mapped): \
         start the server without securebits, or without root"
    )]
    NotDropped,
    /// The system refused a thread.
    #[error(
        "the system refused a thread for file operations: {0}; lower the number of lanes, or raise the limit of threads (ulimit -u)"
    )]
    Thread(std::io::Error),
}

/// The right to run operations on this thread. Only its thread has it.
///
/// In the state between operations the thread has the server's file system uid, and with it its capabilities. Gid and groups are
/// those of the last caller: the server itself creates nothing, so nothing comes of them, and each caller is given its own.
#[derive(Debug)]
pub struct Lane {
    identities: Identities,
    /// Gid and groups that the thread has; `None`: not known.
    current: Option<(u32, SmallVec<[Gid; 16]>)>,
    /// The thread could not go back to the server's identity.
    is_lost: bool,
    /// Modes of new files need no correction by the umask.
    has_own_umask: bool,
    entries: Vec<MaybeUninit<u8>>,
    /// Account for which the lane works.
    pub(crate) account: Account,
    /// Syncs that the operation of now leaves to others; `None`: it makes them itself.
    pub(crate) owed: Option<Owed>,
    /// Who makes them.
    syncs: Option<Arc<Syncs>>,
    /// Identities are the thread's: neither Send nor Sync.
    of_this_thread: PhantomData<*const ()>,
}

impl Lane {
    /// Makes the calling thread a lane, for as long as it lives: it keeps only the capabilities that file operations need, and
    /// gets a umask of its own, which is 0, where the system lets it.
    ///
    /// # Errors
    ///
    /// [`LaneError`]: root's rights cannot be narrowed, or the kernel would not drop them for callers.
    pub fn attach() -> Result<Self, LaneError> {
        let has_own_umask = sys::own_umask().is_ok();
        if has_own_umask {
            rustix::process::umask(Mode::empty());
        }
        let identities = narrow()?;
        Ok(Self {
            identities,
            current: None,
            is_lost: false,
            has_own_umask,
            entries: Vec::new(),
            account: Account::default(),
            owed: None,
            syncs: None,
            of_this_thread: PhantomData,
        })
    }

    /// As whom operations run here.
    pub fn identities(&self) -> Identities {
        self.identities
    }

    /// Gives the lane somebody to leave syncs to.
    pub(crate) fn leave_to(&mut self, syncs: Option<Arc<Syncs>>) {
        self.syncs = syncs;
    }

    pub(crate) fn syncs(&self) -> Option<&Arc<Syncs>> {
        self.syncs.as_ref()
    }

    /// Runs operations without their syncs, and returns those. The results count only after [`Fs::settle_owed`](crate::Fs::settle_owed).
    pub fn owing<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> (T, Owed) {
        self.owed = Some(Owed::default());
        let done = work(self);
        (done, self.owed.take().unwrap_or_default())
    }

    /// Runs `work` as another user, and goes back to the server's identity, also after a panic.
    ///
    /// # Errors
    ///
    /// The thread could not take the identity: `work` did not run.
    pub(crate) fn as_caller<T>(&mut self, caller: &Identity, work: impl FnOnce() -> T) -> Result<T, FsError> {
        self.check()?;
        if self.identities == Identities::Own {
            return Ok(work());
        }
        self.take_groups(caller)?;
        let back = Back(self);
        // An identity that is not there now is of a user that is not mapped into this user namespace.
        if !sys::set_fs_uid(caller.uid) {
            return Err(ErrorKind::Access.into());
        }
        let done = work();
        drop(back);
        Ok(done)
    }

    /// An error if the thread is not known to have the server's identity.
    pub(crate) fn check(&self) -> Result<(), FsError> {
        if self.is_lost { Err(ErrorKind::TryLater.into()) } else { Ok(()) }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Plays a thread that could not go back.
    #[cfg(test)]
    pub(crate) fn lose(&mut self) {
        self.is_lost = true;
    }

    /// False: a mode that a new file was asked for may lack what the process's umask took.
    pub(crate) fn has_own_umask(&self) -> bool {
        self.has_own_umask
    }

    /// Memory for the entries of a folder; given back by [`Lane::put_entries`].
    pub(crate) fn take_entries(&mut self) -> Vec<MaybeUninit<u8>> {
        let mut entries = std::mem::take(&mut self.entries);
        entries.resize(ENTRIES_BYTES, MaybeUninit::uninit());
        entries
    }

    pub(crate) fn put_entries(&mut self, entries: Vec<MaybeUninit<u8>>) {
        self.entries = entries;
    }

    fn take_groups(&mut self, caller: &Identity) -> Result<(), FsError> {
        let current = self.current.take();
        let (gid, groups) = current.unzip();
        if groups.as_ref() != Some(&caller.groups) {
            set_thread_groups(&caller.groups)?;
        }
        if gid != Some(caller.gid) && !sys::set_fs_gid(caller.gid) {
            return Err(ErrorKind::Access.into());
        }
        self.current =
            Some((caller.gid, groups.filter(|known| *known == caller.groups).unwrap_or_else(|| caller.groups.clone())));
        Ok(())
    }
}

/// Goes back to the server's identity when it is dropped.
struct Back<'a>(&'a mut Lane);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        if !sys::set_fs_uid(0) {
            self.0.is_lost = true;
        }
    }
}

/// Takes from this thread what operations do not need, and finds out whether calls can run as their callers.
fn narrow() -> Result<Identities, LaneError> {
    let had = capabilities(None).map_err(LaneError::Capabilities)?;
    if !rustix::process::geteuid().is_root() {
        return Ok(Identities::Own);
    }
    let missing = NEEDED.difference(had.effective);
    if !missing.is_empty() {
        return Err(LaneError::Incomplete(missing));
    }
    let kept = had.permitted & KEPT;
    let narrowed = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, narrowed).map_err(LaneError::Capabilities)?;
    // What the kernel is said to do is tried: all depends on it.
    let changed = sys::set_fs_uid(ANOTHER_UID);
    let as_another = capabilities(None).map_err(LaneError::Capabilities)?;
    let back = sys::set_fs_uid(0);
    let again = capabilities(None).map_err(LaneError::Capabilities)?;
    let dropped = changed && !as_another.effective.intersects(OVERRIDES);
    if !(dropped && back && again.effective.contains(NEEDED)) {
        return Err(LaneError::NotDropped);
    }
    Ok(Identities::Callers)
}

/// `CAP_CHOWN, CAP_SETUID`.
fn names(capabilities: CapabilitySet) -> String {
    let names: Vec<String> = capabilities.iter_names().map(|(name, _)| format!("CAP_{name}")).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use ksf_test::root_or_skip;

    use super::*;
    use crate::credential::Credential;
    use crate::credential::Squash;
    use crate::export::ExportOptions;

    /// Each value of a line of /proc/thread-self/status.
    fn status(name: &str) -> Vec<String> {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().skip(1).map(str::to_owned).collect()
    }

    fn identity(uid: u32, gid: u32, groups: &[u32]) -> Identity {
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        Credential::unix(uid, gid, groups).identity(&options, None)
    }

    #[test]
    fn work_runs_as_its_caller_and_the_thread_goes_back() {
        let Some(()) = root_or_skip("identities") else { return };
        std::thread::spawn(|| {
            let mut lane = Lane::attach().unwrap();
            assert_eq!(lane.identities(), Identities::Callers);
            let many: Vec<u32> = (5000..5040).collect();
            for (uid, gid, groups) in [(1000, 100, &[4, 5][..]), (1000, 100, &[4]), (1001, 7, &many), (0, 0, &[])] {
                lane.as_caller(&identity(uid, gid, groups), || {
                    assert_eq!(status("Uid:")[3], uid.to_string());
                    assert_eq!(status("Gid:")[3], gid.to_string());
                    let expected: Vec<String> = groups.iter().map(u32::to_string).collect();
                    assert_eq!(status("Groups:"), expected);
                    let effective = u64::from_str_radix(&status("CapEff:")[0], 16).unwrap();
                    let overrides = effective & OVERRIDES.bits();
                    assert_eq!(overrides == 0, uid != 0, "{effective:x}");
                    assert_eq!(effective & CapabilitySet::SYS_RESOURCE.bits(), 0);
                })
                .unwrap();
                assert_eq!(status("Uid:")[3], "0");
                let effective = u64::from_str_radix(&status("CapEff:")[0], 16).unwrap();
                assert_eq!(effective & NEEDED.bits(), NEEDED.bits());
            }
        })
        .join()
        .unwrap();
        assert_eq!(status("Uid:")[3], rustix::process::geteuid().as_raw().to_string(), "no other thread changes");
    }

    /// Attaches a lane on a thread that lacks some of root's capabilities.
    fn attach_without(lacking: CapabilitySet) -> Result<Identities, LaneError> {
        let attach = move || {
            let had = capabilities(None).unwrap();
            let effective = had.effective.difference(lacking);
            set_capabilities(None, CapabilitySets { effective, permitted: effective, ..had }).unwrap();
            Lane::attach().map(|lane| lane.identities())
        };
        std::thread::spawn(attach).join().unwrap()
    }

    #[test]
    fn root_without_the_capabilities_for_identities_serves_nobody() {
        let Some(()) = root_or_skip("identities") else { return };
        let lacking = CapabilitySet::CHOWN | CapabilitySet::SETUID;
        let error = attach_without(lacking).unwrap_err().to_string();
        assert!(error.contains("CAP_CHOWN, CAP_SETUID") && !error.contains("CAP_FOWNER"), "{error}");
        assert_eq!(error.lines().count(), 1);
        for one in NEEDED {
            assert!(attach_without(one).is_err(), "{one:?}");
        }
        // As containers have it: handles need the first, devices the second, identities neither.
        let lacking = CapabilitySet::DAC_READ_SEARCH | CapabilitySet::MKNOD;
        assert_eq!(attach_without(lacking).unwrap(), Identities::Callers);
    }

    #[test]
    fn a_panic_goes_back_too() {
        let Some(()) = root_or_skip("identities") else { return };
        std::thread::spawn(|| {
            let mut lane = Lane::attach().unwrap();
            let caller = identity(1000, 100, &[]);
            let panicked = catch_unwind(AssertUnwindSafe(|| lane.as_caller(&caller, || panic!("of the test"))));
            assert!(panicked.is_err());
            assert_eq!(status("Uid:")[3], "0");
            assert!(!lane.is_lost());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_lost_lane_runs_nothing() {
        std::thread::spawn(|| {
            let mut lane = Lane::attach().unwrap();
            lane.lose();
            let ran = lane.as_caller(&identity(1000, 100, &[]), || ());
            assert_eq!(ran.unwrap_err().kind(), ErrorKind::TryLater);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_umask_of_other_threads_stays() {
        let before = status("Umask:");
        std::thread::spawn(|| {
            let lane = Lane::attach().unwrap();
            if lane.has_own_umask() {
                assert_eq!(status("Umask:"), ["0000"]);
            }
        })
        .join()
        .unwrap();
        assert_eq!(status("Umask:"), before);
    }
}
