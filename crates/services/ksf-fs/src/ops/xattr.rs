//! Extended attributes.

use std::ffi::{CStr, CString};
use std::os::fd::AsRawFd;

use rustix::fs::XattrFlags;
use rustix::io::Result as SysResult;

use crate::credential::Credential;
use crate::error::{ErrorKind, FsError};
use crate::handle::Handle;
use crate::lane::Lane;
use crate::layer::Fs;
use crate::ops::open::OpenFile;

/// Bytes of a value, and of the list of names, at most (XATTR_SIZE_MAX, XATTR_LIST_MAX).
pub const XATTR_BYTES_MAX: usize = 65_536;

/// What must be there when an attribute is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrHow {
    /// Nothing or another value.
    Any,
    /// Nothing.
    New,
    /// Another value.
    Replace,
    /// Nothing and another value: it is never set, and the error is the one of `New` or of `Replace`.
    NewAndReplace,
}

/// The object that an attribute is of. What is open may have lost its last name.
#[derive(Clone, Copy, Debug)]
pub enum XattrOf<'a> {
    /// What has this handle.
    Handle(&'a Handle),
    /// An open object. The kernel checks the rights of the caller, not of the opener.
    Open(&'a OpenFile),
}

impl XattrOf<'_> {
    pub(super) fn handle(&self) -> &Handle {
        match self {
            Self::Handle(handle) => handle,
            Self::Open(file) => file.handle(),
        }
    }
}

impl Fs {
    /// The value of an attribute.
    pub fn xattr(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        object: XattrOf<'_>,
        name: &[u8],
    ) -> Result<Vec<u8>, FsError> {
        let name = checked(name)?;
        self.at_path(lane, credential, object, false, |path| {
            filled(|value| rustix::fs::getxattr(path, name.as_c_str(), value))
        })
    }

    /// The names of the attributes that the caller may see, each with a NUL behind it.
    pub fn xattr_names(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        object: XattrOf<'_>,
    ) -> Result<Vec<u8>, FsError> {
        self.at_path(lane, credential, object, false, |path| filled(|names| rustix::fs::listxattr(path, names)))
    }

    /// Sets an attribute.
    pub fn set_xattr(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        object: XattrOf<'_>,
        (name, value): (&[u8], &[u8]),
        how: XattrHow,
    ) -> Result<(), FsError> {
        let name = checked(name)?;
        let flags = match how {
            XattrHow::Any => XattrFlags::empty(),
            XattrHow::New => XattrFlags::CREATE,
            XattrHow::Replace => XattrFlags::REPLACE,
            XattrHow::NewAndReplace => XattrFlags::CREATE | XattrFlags::REPLACE,
        };
        self.at_path(lane, credential, object, true, |path| rustix::fs::setxattr(path, name.as_c_str(), value, flags))?;
        self.owe_names(lane, object.handle())
    }

    /// Removes an attribute.
    pub fn remove_xattr(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        object: XattrOf<'_>,
        name: &[u8],
    ) -> Result<(), FsError> {
        let name = checked(name)?;
        self.at_path(lane, credential, object, true, |path| rustix::fs::removexattr(path, name.as_c_str()))?;
        self.owe_names(lane, object.handle())
    }

    /// By its name in /proc: the kernel takes no descriptor that is open without its content.
    pub(super) fn at_path<T>(
        &self,
        lane: &mut Lane,
        credential: &Credential,
        object: XattrOf<'_>,
        changes: bool,
        work: impl FnOnce(&CStr) -> SysResult<T>,
    ) -> Result<T, FsError> {
        let node;
        let descriptor = match object {
            XattrOf::Handle(handle) => {
                node = self.node(lane, handle)?;
                node.descriptor.as_raw_fd()
            }
            XattrOf::Open(file) => file.descriptor()?.as_raw_fd(),
        };
        let handle = object.handle();
        let call = self.begin(lane, credential, handle, changes)?;
        let _changing = changes.then(|| self.attrs.changing(handle));
        let path = CString::new(format!("/proc/self/fd/{descriptor}")).map_err(|_| ErrorKind::Invalid)?;
        Ok(lane.as_caller(&call.caller, || work(&path))??)
    }
}

fn checked(name: &[u8]) -> Result<CString, FsError> {
    CString::new(name).map_err(|_| ErrorKind::Invalid.into())
}

fn filled(fill: impl FnOnce(&mut [u8]) -> SysResult<usize>) -> SysResult<Vec<u8>> {
    let mut bytes = vec![0; XATTR_BYTES_MAX];
    let count = fill(&mut bytes)?;
    bytes.truncate(count);
    bytes.shrink_to_fit();
    Ok(bytes)
}
