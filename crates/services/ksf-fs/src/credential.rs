//! Who calls, and as whom the call runs.

use rustix::process::{Gid, Uid};
use smallvec::SmallVec;

use crate::export::ExportOptions;
use crate::groups::GroupList;

/// Supplementary groups that the kernel takes, at most (NGROUPS_MAX).
pub(crate) const GROUPS_MAX: usize = 65_536;

/// Which callers an export takes for its anonymous user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Squash {
    /// None.
    None,
    /// User 0; and group 0 of any user.
    #[default]
    Root,
    /// All.
    All,
}

/// The caller, as the wire names it.
#[derive(Clone, Debug)]
pub struct Credential {
    unix: Option<Unix>,
    /// Groups that were looked up for an export that asks for that: [`Fs::look_up_groups`](crate::Fs::look_up_groups).
    pub(crate) managed: Option<GroupList>,
}

#[derive(Clone, Debug)]
struct Unix {
    uid: u32,
    /// `None`: the first of the groups that are looked up.
    gid: Option<u32>,
    groups: SmallVec<[u32; 16]>,
    /// Group of new objects, if the caller may choose it.
    group_of_new: Option<u32>,
}

impl Credential {
    /// A user with groups, as AUTH_UNIX has them; groups beyond 65,536 are cut off.
    pub fn unix(uid: u32, gid: u32, groups: &[u32]) -> Self {
        let groups = SmallVec::from_slice(&groups[..groups.len().min(GROUPS_MAX)]);
        Self { unix: Some(Unix { uid, gid: Some(gid), groups, group_of_new: None }), managed: None }
    }

    /// A user whose groups are not on the wire: those that this system knows, for an export that has them looked up
    /// (`manage_gids`). A user whom it does not know has the anonymous user's group.
    pub fn of_user(uid: u32) -> Self {
        Self { unix: Some(Unix { uid, gid: None, groups: SmallVec::new(), group_of_new: None }), managed: None }
    }

    /// The same caller, whose new objects have this group if it is one of the caller's or the caller is root, as with
    /// setfsgid(2). Any other leaves them the caller's first group: it gives no right that the caller does not have.
    pub fn with_group(&self, gid: u32) -> Self {
        let mut with = self.clone();
        if let Some(unix) = &mut with.unix {
            unix.group_of_new = Some(gid);
        }
        with
    }

    /// A caller without a name (AUTH_NONE): the anonymous user of the export.
    pub fn anonymous() -> Self {
        Self { unix: None, managed: None }
    }

    /// Whose groups are to be looked up for `manage_gids`; `None`: the caller is squashed anyway.
    pub(crate) fn user(&self, options: &ExportOptions) -> Option<u32> {
        let unix = self.unix.as_ref()?;
        let squashed = match options.squash {
            Squash::All => true,
            Squash::Root => unix.uid == 0,
            Squash::None => false,
        };
        (!squashed && unix.uid != u32::MAX).then_some(unix.uid)
    }

    /// As whom the call runs. `managed`: groups that stand for those of the wire.
    pub(crate) fn identity(&self, options: &ExportOptions, managed: Option<&[u32]>) -> Identity {
        let (anonymous_uid, anonymous_gid) = options.anonymous;
        let Some(unix) = self.unix.as_ref().filter(|_| options.squash != Squash::All) else {
            return Identity::new(anonymous_uid, anonymous_gid, &[]);
        };
        // The last number means "leave as it is" in system calls, so no user has it.
        if unix.uid == u32::MAX || unix.gid == Some(u32::MAX) {
            return Identity::new(anonymous_uid, anonymous_gid, &[]);
        }
        let groups = managed.unwrap_or(&unix.groups);
        let gid = unix.gid.or_else(|| groups.first().copied()).unwrap_or(anonymous_gid);
        let new = unix.group_of_new.filter(|new| *new != u32::MAX);
        if options.squash == Squash::None {
            let new = new.filter(|new| unix.uid == 0 || groups.contains(new));
            return Identity::new(unix.uid, new.unwrap_or(gid), groups);
        }
        if unix.uid == 0 {
            return Identity::new(anonymous_uid, anonymous_gid, &[]);
        }
        let squashed = |gid: u32| if gid == 0 { anonymous_gid } else { gid };
        let groups: SmallVec<[u32; 16]> = groups.iter().copied().map(squashed).collect();
        let new = new.map(squashed).filter(|new| groups.contains(new));
        Identity::new(unix.uid, new.unwrap_or_else(|| squashed(gid)), &groups)
    }
}

/// As whom a call runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: SmallVec<[Gid; 16]>,
}

impl Identity {
    fn new(uid: u32, gid: u32, groups: &[u32]) -> Self {
        let known = groups.iter().filter(|gid| **gid != u32::MAX);
        Self { uid, gid, groups: known.map(|gid| Gid::from_raw(*gid)).collect() }
    }

    /// The server's own user.
    pub(crate) fn own() -> Self {
        let (uid, gid): (Uid, Gid) = (rustix::process::geteuid(), rustix::process::getegid());
        Self { uid: uid.as_raw(), gid: gid.as_raw(), groups: SmallVec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(squash: Squash) -> ExportOptions {
        ExportOptions { squash, anonymous: (700, 701), ..ExportOptions::default() }
    }

    #[test]
    fn squashing_takes_whom_it_says() {
        let anonymous = Identity::new(700, 701, &[]);
        let user = Credential::unix(1000, 100, &[4, 0, 5]);
        let root = Credential::unix(0, 0, &[0, 4]);
        let table = [
            (Squash::None, &user, Identity::new(1000, 100, &[4, 0, 5])),
            (Squash::None, &root, Identity::new(0, 0, &[0, 4])),
            (Squash::Root, &user, Identity::new(1000, 100, &[4, 701, 5])),
            (Squash::Root, &root, anonymous.clone()),
            (Squash::All, &user, anonymous.clone()),
            (Squash::All, &root, anonymous.clone()),
        ];
        for (squash, credential, expected) in table {
            assert_eq!(credential.identity(&options(squash), None), expected, "{squash:?} of {credential:?}");
        }
        for squash in [Squash::None, Squash::Root, Squash::All] {
            assert_eq!(Credential::anonymous().identity(&options(squash), None), anonymous);
            let nameless = [Credential::unix(u32::MAX, 5, &[]), Credential::unix(5, u32::MAX, &[])];
            nameless.iter().for_each(|it| assert_eq!(it.identity(&options(squash), None), anonymous, "{it:?}"));
        }
        let group_zero = Credential::unix(1000, 0, &[u32::MAX]);
        assert_eq!(group_zero.identity(&options(Squash::Root), None), Identity::new(1000, 701, &[]));
    }

    #[test]
    fn a_user_without_groups_on_the_wire_has_those_that_the_system_knows() {
        let user = Credential::of_user(1000);
        let table = [
            (user.clone(), Some(&[20, 21][..]), Identity::new(1000, 20, &[20, 21])),
            (user.clone(), Some(&[0, 21]), Identity::new(1000, 701, &[701, 21])),
            (user.clone(), Some(&[]), Identity::new(1000, 701, &[])),
            (user.clone(), None, Identity::new(1000, 701, &[])),
            (user.with_group(21), Some(&[20, 21]), Identity::new(1000, 21, &[20, 21])),
            (user.with_group(5), Some(&[20]), Identity::new(1000, 20, &[20])),
            (user.with_group(5), Some(&[]), Identity::new(1000, 701, &[])),
            (user.with_group(0), Some(&[20]), Identity::new(1000, 20, &[20])),
            (user.with_group(0), Some(&[20, 0]), Identity::new(1000, 701, &[20, 701])),
            (user.with_group(u32::MAX), Some(&[20]), Identity::new(1000, 20, &[20])),
            (Credential::of_user(u32::MAX), Some(&[20]), Identity::new(700, 701, &[])),
            (Credential::anonymous().with_group(5), None, Identity::new(700, 701, &[])),
        ];
        for (credential, managed, expected) in table {
            assert_eq!(credential.identity(&options(Squash::Root), managed), expected, "{credential:?} {managed:?}");
        }
        let root = Credential::of_user(0);
        for (credential, gid) in [(root.clone(), 0), (root.with_group(5), 5), (root.with_group(u32::MAX), 0)] {
            let identity = credential.identity(&options(Squash::None), Some(&[0]));
            assert_eq!(identity, Identity::new(0, gid, &[0]), "{credential:?}");
        }
        let user = user.with_group(5).identity(&options(Squash::None), Some(&[20]));
        assert_eq!(user, Identity::new(1000, 20, &[20]));
    }

    #[test]
    fn managed_groups_stand_for_those_of_the_wire() {
        let user = Credential::unix(1000, 100, &[4]);
        let identity = user.identity(&options(Squash::Root), Some(&[20, 0]));
        assert_eq!(identity, Identity::new(1000, 100, &[20, 701]));
        assert_eq!(user.user(&options(Squash::Root)), Some(1000));
        assert_eq!(user.user(&options(Squash::All)), None);
        assert_eq!(Credential::unix(0, 0, &[]).user(&options(Squash::Root)), None);
        assert_eq!(Credential::unix(0, 0, &[]).user(&options(Squash::None)), Some(0));
    }
}
