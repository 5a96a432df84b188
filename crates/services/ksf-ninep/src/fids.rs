//! The fids of one connection.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ksf_fs::{Credential, Handle, OpenFile, XATTR_BYTES_MAX, XattrHow};

use crate::names::{NameId, Names, Place};
use rustix::io::Errno;

/// Most memory that a fid takes, without its open file or value: the handles of an object and its directory, a name of 255 bytes, and
/// entries of the indexes by name and by open file.
pub(crate) const FID_BYTES: usize = 1024;
/// Longest name of an extended attribute (XATTR_NAME_MAX, linux/limits.h).
const XATTR_NAME_BYTES_MAX: usize = 255;

/// Flags of Txattrcreate, as setxattr(2) has them.
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;
const XATTR_CREATE_AND_REPLACE: u32 = XATTR_CREATE | XATTR_REPLACE;

/// What a fid was walked to.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) handle: Handle,
    /// The user of the attach.
    pub(crate) caller: Arc<Credential>,
}

/// A fid as one request has met it: a later one of the same number is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FidId {
    fid: u32,
    number: u64,
}

#[derive(Debug)]
enum State {
    /// A request that is under way will make it.
    Reserved,
    Walked(Arc<Node>),
    /// With the memory that its locked ranges take.
    Open(Arc<Node>, OpenFile, usize),
    /// The value of an extended attribute, or their names.
    Value(Arc<[u8]>),
    Setting(Box<Setting>),
}

/// An extended attribute that is being written, and is set when its fid is given back.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) node: Arc<Node>,
    pub(crate) name: Box<[u8]>,
    /// Bytes that it will have.
    pub(crate) size: usize,
    pub(crate) value: Vec<u8>,
    pub(crate) how: XattrHow,
}

/// What a fid was that was given back.
#[derive(Debug)]
pub(crate) enum Removed {
    /// With the name under which it was found.
    File(Arc<Node>, Option<Arc<Place>>, Option<OpenFile>),
    Value,
    Setting(Box<Setting>),
}

#[derive(Debug)]
struct Fid {
    number: u64,
    state: State,
    /// The name under which it was found; `None`: it is the root of its attach, or was found by `..`.
    name: Option<NameId>,
}

/// The table, bounded. No call costs more than the logarithm of its fids, but for [`Fids::clear`] and what [`Names::rename`] moves.
#[derive(Debug)]
pub(crate) struct Fids {
    fids: BTreeMap<u32, Fid>,
    names: Names,
    /// Fids that are open, by the object of their file.
    open: BTreeSet<(Handle, u32)>,
    fids_max: usize,
    last_number: u64,
    /// Of values and locked ranges.
    more_bytes: usize,
}

impl Fids {
    pub(crate) fn new(fids_max: usize) -> Self {
        let (fids, names, open) = Default::default();
        Self { fids, names, open, fids_max, last_number: 0, more_bytes: 0 }
    }

    /// Memory that they take, about.
    pub(crate) fn bytes(&self) -> usize {
        self.fids.len() * FID_BYTES + self.more_bytes
    }

    /// Takes a number for what a request will find.
    pub(crate) fn reserve(&mut self, fid: u32) -> Result<FidId, Errno> {
        self.insert(fid, State::Reserved)
    }

    /// Makes `newfid` name what `fid` does.
    pub(crate) fn copy(&mut self, fid: u32, newfid: u32) -> Result<(), Errno> {
        let (node, name) = (Arc::clone(self.node(fid)?), self.fids.get(&fid).and_then(|fid| fid.name));
        self.insert(newfid, State::Walked(node))?;
        if let (Some(id), Some(made)) = (name, self.fids.get_mut(&newfid)) {
            self.names.join(id, newfid);
            made.name = name;
        }
        Ok(())
    }

    fn insert(&mut self, fid: u32, state: State) -> Result<FidId, Errno> {
        if self.fids.contains_key(&fid) || fid == ksf_proto::p9::NO_FID {
            return Err(Errno::INVAL);
        }
        if self.fids.len() >= self.fids_max {
            return Err(Errno::MFILE);
        }
        self.last_number += 1;
        self.fids.insert(fid, Fid { number: self.last_number, state, name: None });
        Ok(FidId { fid, number: self.last_number })
    }

    /// What a fid names.
    pub(crate) fn node(&self, fid: u32) -> Result<&Arc<Node>, Errno> {
        match &self.fids.get(&fid).ok_or(Errno::BADF)?.state {
            State::Reserved | State::Value(_) | State::Setting(_) => Err(Errno::BADF),
            State::Walked(node) | State::Open(node, ..) => Ok(node),
        }
    }

    /// What a fid names, and what is open of it.
    pub(crate) fn both(&self, fid: u32) -> Result<(&Arc<Node>, Option<&OpenFile>), Errno> {
        let node = self.node(fid)?;
        let open = match &self.fids.get(&fid).ok_or(Errno::BADF)?.state {
            State::Open(_, file, _) => Some(file),
            _ => None,
        };
        Ok((node, open))
    }

    /// The name under which a fid was found, as renames have changed it since.
    pub(crate) fn place(&self, fid: u32) -> Option<&Arc<Place>> {
        self.names.place(self.fids.get(&fid)?.name?)
    }

    /// The open file of a fid.
    pub(crate) fn open(&self, fid: u32) -> Result<&OpenFile, Errno> {
        self.both(fid)?.1.ok_or(Errno::BADF)
    }

    /// The open file of a fid, with the id by which a request will change it.
    pub(crate) fn locked(&self, fid: u32) -> Result<(FidId, &OpenFile), Errno> {
        let found = self.fids.get(&fid).ok_or(Errno::BADF)?;
        match &found.state {
            State::Open(_, file, _) => Ok((FidId { fid, number: found.number }, file)),
            _ => Err(Errno::BADF),
        }
    }

    /// What a fid names that is not open, with the id by which a request will change it.
    pub(crate) fn closed(&self, fid: u32) -> Result<(FidId, &Arc<Node>), Errno> {
        let found = self.fids.get(&fid).ok_or(Errno::BADF)?;
        match &found.state {
            State::Reserved | State::Value(_) | State::Setting(_) => Err(Errno::BADF),
            State::Walked(node) => Ok((FidId { fid, number: found.number }, node)),
            State::Open(..) => Err(Errno::INVAL),
        }
    }

    /// An open file of this object, under whichever fid.
    pub(crate) fn open_of(&self, handle: &Handle) -> Option<&OpenFile> {
        let (_, fid) = self.open.range((handle.clone(), 0)..).next().filter(|(found, _)| found == handle)?;
        self.open(*fid).ok()
    }

    /// Makes a fid one that an extended attribute is written to.
    pub(crate) fn begin_value(&mut self, fid: u32, name: &[u8], (size, flags): (u64, u32)) -> Result<(), Errno> {
        let (id, node) = self.closed(fid)?;
        // In the order of setxattr(2).
        let how = match flags {
            0 => XattrHow::Any,
            XATTR_CREATE => XattrHow::New,
            XATTR_REPLACE => XattrHow::Replace,
            XATTR_CREATE_AND_REPLACE => XattrHow::NewAndReplace,
            _ => return Err(Errno::INVAL),
        };
        if name.is_empty() || name.len() > XATTR_NAME_BYTES_MAX {
            return Err(Errno::RANGE);
        }
        let size = usize::try_from(size).ok().filter(|size| *size <= XATTR_BYTES_MAX).ok_or(Errno::TOOBIG)?;
        let setting = Setting { node: Arc::clone(node), name: name.into(), size, value: Vec::new(), how };
        if let Some(fid) = self.found(id) {
            fid.state = State::Setting(Box::new(setting));
            self.rename(id, None);
        }
        Ok(())
    }

    /// Writes the next bytes of an extended attribute. `room`: bytes that may be taken for them. `None`: the fid is none for that.
    pub(crate) fn write_value(&mut self, fid: u32, offset: u64, data: &[u8], room: usize) -> Option<Result<(), Errno>> {
        let State::Setting(setting) = &mut self.fids.get_mut(&fid)?.state else { return None };
        let Setting { size, value, .. } = &mut **setting;
        if offset != value.len() as u64 || *size - value.len() < data.len() {
            return Some(Err(Errno::INVAL));
        }
        let before = value.capacity();
        let needed = value.len() + data.len();
        if needed > before {
            let wanted = needed.next_power_of_two().min(*size);
            if wanted - before > room {
                return Some(Err(Errno::NOMEM));
            }
            value.reserve_exact(wanted - value.len());
            self.more_bytes += value.capacity() - before;
        }
        value.extend_from_slice(data);
        Some(Ok(()))
    }

    /// The bytes of an extended attribute behind this offset. `None`: the fid is none for that.
    pub(crate) fn read_value(&self, fid: u32, offset: u64) -> Option<&[u8]> {
        let State::Value(value) = &self.fids.get(&fid)?.state else { return None };
        Some(usize::try_from(offset).ok().and_then(|offset| value.get(offset..)).unwrap_or_default())
    }

    /// Gives a fid back.
    pub(crate) fn remove(&mut self, fid: u32) -> Result<Removed, Errno> {
        let found = self.fids.get(&fid).ok_or(Errno::BADF)?;
        if matches!(found.state, State::Reserved) {
            return Err(Errno::BADF);
        }
        let (id, place) = (FidId { fid, number: found.number }, self.place(fid).cloned());
        self.rename(id, None);
        match self.fids.remove(&fid).ok_or(Errno::BADF)?.state {
            State::Reserved => Err(Errno::BADF),
            State::Walked(node) => Ok(Removed::File(node, place, None)),
            State::Open(node, file, lock_bytes) => {
                self.more_bytes -= lock_bytes;
                self.open.remove(&(file.handle().clone(), fid));
                Ok(Removed::File(node, place, Some(file)))
            }
            State::Value(value) => {
                self.more_bytes -= value.len();
                Ok(Removed::Value)
            }
            State::Setting(setting) => {
                self.more_bytes -= setting.value.capacity();
                Ok(Removed::Setting(setting))
            }
        }
    }

    /// Gives all back.
    pub(crate) fn clear(&mut self) {
        *self = Self { last_number: self.last_number, ..Self::new(self.fids_max) };
    }

    /// Applies the result of a request, unless its fid was given back meanwhile. Returns the number of fids that it has changed.
    pub(crate) fn apply(&mut self, change: Change) -> usize {
        match change {
            Change::Found(id, node, place) => {
                if let Some(Fid { state: state @ (State::Reserved | State::Walked(_)), .. }) = self.found(id) {
                    *state = State::Walked(node);
                    self.rename(id, place);
                }
            }
            Change::Free(id) => {
                if let Some(Fid { state: State::Reserved, .. }) = self.found(id) {
                    self.fids.remove(&id.fid);
                }
            }
            Change::Opened(id, created, file) => {
                if let Some(Fid { state, .. }) = self.found(id)
                    && let State::Walked(node) = state
                {
                    let handle = file.handle().clone();
                    let (node, place) = created.map_or_else(|| (Arc::clone(node), None), |(node, at)| (node, Some(at)));
                    *state = State::Open(node, file, 0);
                    self.open.insert((handle, id.fid));
                    if place.is_some() {
                        self.rename(id, place);
                    }
                }
            }
            Change::Value(id, value) => {
                if let Some(Fid { state: state @ State::Reserved, .. }) = self.found(id) {
                    let bytes = value.len();
                    *state = State::Value(value);
                    self.more_bytes += bytes;
                }
            }
            Change::Locked(id) => {
                if let Some(Fid { state: State::Open(_, file, lock_bytes), .. }) = self.found(id) {
                    // With those of later requests, whose changes will find the same.
                    let now = file.lock_bytes();
                    let before = std::mem::replace(lock_bytes, now);
                    self.more_bytes = self.more_bytes - before + now;
                }
            }
            Change::Moved(from, to) => {
                let Some((moved, name)) = self.names.rename(&from, to) else { return 0 };
                for fid in &moved {
                    if let Some(fid) = self.fids.get_mut(fid) {
                        fid.name = Some(name);
                    }
                }
                return moved.len();
            }
        }
        1
    }

    fn found(&mut self, id: FidId) -> Option<&mut Fid> {
        self.fids.get_mut(&id.fid).filter(|fid| fid.number == id.number)
    }

    /// Replaces the name of one fid.
    fn rename(&mut self, id: FidId, place: Option<Place>) {
        let Some(fid) = self.fids.get_mut(&id.fid).filter(|fid| fid.number == id.number) else { return };
        if let Some(name) = fid.name.take() {
            self.names.remove(name, id.fid);
        }
        fid.name = place.map(|place| self.names.add(place, id.fid));
    }
}

/// What a request changes of the fids when it ends.
#[derive(Debug)]
pub(crate) enum Change {
    /// The fid names this, found at this place.
    Found(FidId, Arc<Node>, Option<Place>),
    /// There was nothing to be found for it.
    Free(FidId),
    /// The fid is open, and names this if it was created.
    Opened(FidId, Option<(Arc<Node>, Place)>, OpenFile),
    /// The fid is that of a value.
    Value(FidId, Arc<[u8]>),
    /// The locks of the fid's file are others.
    Locked(FidId),
    /// What had the first name has the second.
    Moved(Place, Place),
}

#[cfg(test)]
mod tests;
