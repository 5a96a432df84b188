//! Removing and renaming entries of folders.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::fs::AtFlags;
use rustix::io::{Errno, Result as SysResult};

use super::make::Place;
use crate::attr::{Attr, Changed, Renamed, Wcc};
use crate::attr_cache::Changing;
use crate::credential::Credential;
use crate::error::{ErrorKind, FsError};
use crate::export::Export;
use crate::handle::Handle;
use crate::lane::Lane;
use crate::layer::{Fs, entry_name};
use crate::sys;

/// The object that has a name, and its change.
type Named<'a> = (Handle, Changing<'a>);

impl Fs {
    /// Removes a name of anything but a folder. Where it was the last, the object's handle is stale.
    pub fn remove(&self, lane: &mut Lane, credential: &Credential, dir: &Handle, name: &[u8]) -> Changed<()> {
        self.unlink(lane, credential, dir, name, AtFlags::empty(), None)
    }

    /// Removes an empty folder.
    pub fn rmdir(&self, lane: &mut Lane, credential: &Credential, dir: &Handle, name: &[u8]) -> Changed<()> {
        self.unlink(lane, credential, dir, name, AtFlags::REMOVEDIR, None)
    }

    /// Removes a name of this object, which may be an empty folder. If another object has the name, fails with
    /// [`ErrorKind::Stale`]. Only a local program can give the name away between the comparison and the removal.
    pub fn remove_object(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: &[u8],
        object: &Handle,
    ) -> Changed<()> {
        self.unlink(lane, credential, dir, name, AtFlags::empty(), Some(object))
    }

    fn unlink(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        dir: &Handle,
        name: &[u8],
        flags: AtFlags,
        object: Option<&Handle>,
    ) -> Changed<()> {
        let dots = match name {
            _ if !flags.contains(AtFlags::REMOVEDIR) => Errno::ISDIR,
            b".." => Errno::NOTEMPTY,
            _ => Errno::INVAL,
        };
        self.change_folder(
            lane,
            credential,
            dir,
            entry_name(name, FsError::of_call(ErrorKind::Invalid, dots)),
            |place| {
                let victim = self.changing_name(place.export, &place.folder, &place.name);
                if let Some(object) = object {
                    check_is(&victim, object)?;
                }
                let unlink = |flags| rustix::fs::unlinkat(&*place.folder, place.name.as_c_str(), flags);
                match unlink(flags) {
                    Err(Errno::ISDIR) if object.is_some() => unlink(AtFlags::REMOVEDIR)?,
                    result => result?,
                }
                Ok(self.changed_name(victim))
            },
            |_, victim| {
                victim.iter().for_each(|handle| self.lost_name(handle));
                Ok(())
            },
        )
    }

    /// Gives an entry another name, in the same export, and takes that name from what has it.
    pub fn rename(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        from_dir: &Handle,
        from_name: &[u8],
        to_dir: &Handle,
        to_name: &[u8],
    ) -> Renamed {
        self.rename_entry(lane, credential, (from_dir, from_name), (to_dir, to_name), None)
    }

    /// [`Fs::rename`] of this object. If another one has the old name, fails with [`ErrorKind::Stale`]. Only a local program can
    /// give the name away between the comparison and the rename.
    pub fn rename_object(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        from: (&Handle, &[u8]),
        to: (&Handle, &[u8]),
        object: &Handle,
    ) -> Renamed {
        self.rename_entry(lane, credential, from, to, Some(object))
    }

    fn rename_entry(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        (from_dir, from_name): (&Handle, &[u8]),
        (to_dir, to_name): (&Handle, &[u8]),
        object: Option<&Handle>,
    ) -> Renamed {
        if from_dir.export_id() != to_dir.export_id() {
            // The disk of the other export may hang.
            let result = Err(ErrorKind::CrossesDevice.into());
            return Renamed { from: Wcc::default(), to: Wcc::default(), result };
        }
        let order = self.lock_two(from_dir, to_dir);
        let (from, to) = (self.node(lane, from_dir), self.node(lane, to_dir));
        let attr = |node: &Result<crate::layer::Node, FsError>| node.as_ref().ok().map(|node| node.attr);
        let (from_attr, to_attr) = (attr(&from), attr(&to));
        let result = from.and_then(|from| {
            let to = to?;
            let dots = FsError::of_call(ErrorKind::Invalid, Errno::BUSY);
            let old = self.place(lane, credential, from_dir, &from, entry_name(from_name, dots))?;
            let new = self.place(lane, credential, to_dir, &to, entry_name(to_name, dots))?;
            self.move_name(lane, &old, &new, object)
        });
        let after = |dir: &Handle| self.node(lane, dir).ok().map(|node| node.attr);
        let (from_after, to_after) = (after(from_dir), after(to_dir));
        let before = |dir, attr: Option<Attr>| attr.and_then(|attr| self.before(&order, dir, &attr));
        let (from_before, to_before) = (before(from_dir, from_attr), before(to_dir, to_attr));
        drop(order);
        let result = result.and_then(|()| {
            self.owe_names(lane, to_dir)?;
            if from_dir == to_dir { Ok(()) } else { self.owe_names(lane, from_dir) }
        });
        Renamed {
            from: Wcc { before: from_before, after: from_after },
            to: Wcc { before: to_before, after: to_after },
            result,
        }
    }

    fn move_name(
        &self,
        lane: &mut Lane,
        old: &Place<'_>,
        new: &Place<'_>,
        object: Option<&Handle>,
    ) -> Result<(), FsError> {
        let (moved, victim) = lane.as_caller(&old.caller, || {
            let moved = self.changing_name(old.export, &old.folder, &old.name);
            if let Some(object) = object {
                check_is(&moved, object)?;
            }
            let victim = self.changing_name(new.export, &new.folder, &new.name);
            let (from, to) = (old.name.as_c_str(), new.name.as_c_str());
            rustix::fs::renameat(&*old.folder, from, &*new.folder, to)?;
            Ok::<_, FsError>((self.changed_name(moved), self.changed_name(victim)))
        })??;
        if let Some(victim) = victim {
            self.lost_name(&victim);
        }
        if let Some(moved) = moved {
            new.export.learn_moved(&moved, new.handle, &new.name);
        }
        Ok(())
    }

    /// Begins a change of the object that has a name, in a folder that no other call changes meanwhile. `None`: there is none. Fails if
    /// the caller may not look the name up.
    fn changing_name(&self, export: &Export, folder: &OwnedFd, name: &CStr) -> SysResult<Option<Named<'_>>> {
        match sys::name_to_handle(folder, name) {
            // An object without a handle has no attributes in the cache.
            Ok((kernel, _)) => Ok(export.handle(&kernel).map(|handle| {
                let changing = self.attrs.changing(&handle);
                (handle, changing)
            })),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Ends the change of a name's object, which has succeeded. Returns the object's handle.
    fn changed_name(&self, named: SysResult<Option<Named<'_>>>) -> Option<Handle> {
        let Ok(named) = named else {
            // Any object may have changed. Not before the call, because those that fail must not empty the cache.
            drop(self.attrs.changing_unknown());
            return None;
        };
        named.map(|(handle, _)| handle)
    }
}

/// Fails unless this object has the name.
fn check_is(named: &SysResult<Option<Named<'_>>>, object: &Handle) -> Result<(), FsError> {
    match named {
        Ok(Some((handle, _))) if handle == object => Ok(()),
        Ok(Some(_)) => Err(ErrorKind::Stale.into()),
        Ok(None) => Err(ErrorKind::NotFound.into()),
        Err(errno) => Err((*errno).into()),
    }
}

#[cfg(test)]
mod tests {
    use ksf_test::root_or_skip;

    use super::*;
    use crate::common::{Served, on_lane, root};
    use crate::credential::Squash;
    use crate::export::ExportOptions;

    #[test]
    fn failing_calls_of_a_stranger_leave_the_attribute_cache_alone() {
        let Some(()) = root_or_skip("identities") else { return };
        let options = ExportOptions { squash: Squash::None, exclusive: true, ..ExportOptions::default() };
        let (served, stranger) = (Served::new(options), Credential::unix(1001, 1001, &[]));
        std::fs::create_dir(served.path("closed")).unwrap();
        std::fs::set_permissions(served.path("closed"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        std::fs::write(served.path("closed/file"), "").unwrap();
        on_lane(|lane| {
            let fs = &served.fs;
            let closed = served.find(lane, "closed").handle;
            // Not in the slot of the cache that a call on `closed` empties.
            let made = (0..).map(|number| format!("other{number}")).map(|name| (served.make(lane, &name).handle, name));
            let (other, name) = { made }.find(|(other, _)| !fs.attrs.changing(&closed).is_of(other)).unwrap();
            fs.getattr(lane, &other).unwrap();
            let failed = [
                fs.remove(lane, &stranger, &closed, b"file").result,
                fs.rmdir(lane, &stranger, &closed, b"none").result,
                fs.rename(lane, &stranger, &closed, b"file", &closed, b"new").result,
            ];
            assert_eq!(failed.map(|result| result.unwrap_err().kind()), [ErrorKind::Access; 3]);
            assert!(fs.known_attr(&other).is_some());
            fs.remove(lane, &root(), served.root(), name.as_bytes()).result.unwrap();
            assert!(fs.known_attr(&other).is_none());
        });
    }
}
