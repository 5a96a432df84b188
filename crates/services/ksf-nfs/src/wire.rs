//! The types of RFC 1813 section 2 on the wire: attributes, weak cache data, handles.

use ksf_fs::{Attr, Before, FileType, SetAttr, SetTime, Time, Wcc};
use ksf_proto::xdr::{XdrError, XdrReader, XdrWrite};

use crate::status::Status;

/// Greatest handle: `NFS3_FHSIZE`.
pub(crate) const HANDLE_LIMIT_BYTES: u32 = 64;
/// Greatest name that is read. What is above the limit of the file system gets NAMETOOLONG; the RFC sets no limit.
pub(crate) const NAME_LIMIT_BYTES: u32 = 4096;
/// Greatest target of a symbolic link that is read.
pub(crate) const TARGET_LIMIT_BYTES: u32 = 65_536;
/// Bits of a mode that a client sets and sees; the type is told apart.
const MODE_BITS: u32 = 0o7777;

/// `fattr3` has so many bytes.
pub(crate) const ATTR_BYTES: usize = 84;
/// `post_op_attr` with attributes.
pub(crate) const POST_OP_ATTR_BYTES: usize = 4 + ATTR_BYTES;

pub(crate) fn put_status(out: &mut Vec<u8>, status: Status) {
    out.put_u32(status.0);
}

/// `nfstime3`: unsigned seconds, so from 1970 to 2106; times outside of that are told as the nearest one.
pub(crate) fn put_time(out: &mut Vec<u8>, time: Time) {
    match u32::try_from(time.seconds) {
        Ok(seconds) => {
            out.put_u32(seconds);
            out.put_u32(time.nanos);
        }
        Err(_) => {
            out.put_u32(if time.seconds < 0 { 0 } else { u32::MAX });
            out.put_u32(0);
        }
    }
}

fn read_time(r: &mut XdrReader<'_>) -> Result<Time, XdrError> {
    Ok(Time { seconds: i64::from(r.u32()?), nanos: r.u32()? })
}

/// `ftype3`.
fn type_number(file_type: FileType) -> u32 {
    match file_type {
        FileType::Regular => 1,
        FileType::Directory => 2,
        FileType::BlockDevice => 3,
        FileType::CharDevice => 4,
        FileType::Symlink => 5,
        FileType::Socket => 6,
        FileType::Fifo => 7,
    }
}

/// `fattr3`.
pub(crate) fn put_attr(out: &mut Vec<u8>, attr: &Attr) {
    out.put_u32(type_number(attr.file_type));
    out.put_u32(attr.mode & MODE_BITS);
    out.put_u32(attr.nlink);
    out.put_u32(attr.uid);
    out.put_u32(attr.gid);
    out.put_u64(attr.size);
    out.put_u64(attr.used);
    out.put_u32(attr.device.0);
    out.put_u32(attr.device.1);
    out.put_u64(attr.fsid);
    out.put_u64(attr.fileid);
    put_time(out, attr.atime);
    put_time(out, attr.mtime);
    put_time(out, attr.ctime);
}

/// `post_op_attr`.
pub(crate) fn put_post_op_attr(out: &mut Vec<u8>, attr: Option<&Attr>) {
    out.put_bool(attr.is_some());
    if let Some(attr) = attr {
        put_attr(out, attr);
    }
}

/// `post_op_fh3`.
pub(crate) fn put_post_op_handle(out: &mut Vec<u8>, handle: Option<&ksf_fs::Handle>) {
    out.put_bool(handle.is_some());
    if let Some(handle) = handle {
        out.put_opaque(handle.as_bytes());
    }
}

/// `wcc_data`.
pub(crate) fn put_wcc(out: &mut Vec<u8>, wcc: &Wcc) {
    out.put_bool(wcc.before.is_some());
    if let Some(Before { size, mtime, ctime }) = wcc.before {
        out.put_u64(size);
        put_time(out, mtime);
        put_time(out, ctime);
    }
    put_post_op_attr(out, wcc.after.as_ref());
}

/// `sattr3`.
pub(crate) fn read_set_attr(r: &mut XdrReader<'_>) -> Result<SetAttr, XdrError> {
    Ok(SetAttr {
        mode: r.option(XdrReader::u32)?.map(|mode| mode & MODE_BITS),
        uid: r.option(XdrReader::u32)?,
        gid: r.option(XdrReader::u32)?,
        size: r.option(XdrReader::u64)?,
        atime: read_set_time(r)?,
        mtime: read_set_time(r)?,
    })
}

fn read_set_time(r: &mut XdrReader<'_>) -> Result<Option<SetTime>, XdrError> {
    let offset = r.offset();
    match r.u32()? {
        0 => Ok(None),
        1 => Ok(Some(SetTime::Now)),
        2 => read_time(r).map(SetTime::To).map(Some),
        value => Err(XdrError::Value { offset, value, kind: "time_how" }),
    }
}

/// `sattrguard3`: the ctime that the object must have.
pub(crate) fn read_guard(r: &mut XdrReader<'_>) -> Result<Option<Time>, XdrError> {
    r.option(read_time)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_outside_of_the_range_are_the_nearest_ones() {
        for (seconds, wanted) in [(-1, [0, 0]), (0, [0, 9]), (u32::MAX as i64, [u32::MAX, 9]), (1 << 32, [u32::MAX, 0])]
        {
            let mut out = Vec::new();
            put_time(&mut out, Time { seconds, nanos: 9 });
            assert_eq!(out, ksf_test::rpc::words(&wanted), "{seconds}");
        }
    }

    #[test]
    fn attributes_to_set_are_read_as_the_rfc_draws_them() {
        let nothing = ksf_test::rpc::words(&[0; 6]);
        let mut r = XdrReader::new(&nothing);
        let read = read_set_attr(&mut r).unwrap();
        assert!(read.mode.is_none() && read.size.is_none() && read.atime.is_none() && r.finish().is_ok());
        let all = ksf_test::rpc::words(&[1, 0o107_777, 1, 5, 1, 6, 1, 1, 2, 1, 2, 7, 8]);
        let mut r = XdrReader::new(&all);
        let read = read_set_attr(&mut r).unwrap();
        assert_eq!((read.mode, read.uid, read.gid, read.size), (Some(0o7777), Some(5), Some(6), Some((1 << 32) + 2)));
        assert!(matches!(read.atime, Some(SetTime::Now)));
        assert!(matches!(read.mtime, Some(SetTime::To(Time { seconds: 7, nanos: 8 }))));
        assert!(r.finish().is_ok());
        let wrong = ksf_test::rpc::words(&[0, 0, 0, 0, 3, 0]);
        let error = read_set_attr(&mut XdrReader::new(&wrong)).unwrap_err();
        assert_eq!(error, XdrError::Value { offset: 16, value: 3, kind: "time_how" });
    }

    #[test]
    fn attributes_have_the_length_that_replies_count_with() {
        let time = Time { seconds: 1, nanos: 2 };
        let attr = Attr {
            file_type: FileType::Regular,
            mode: 0o644,
            nlink: 1,
            uid: 2,
            gid: 3,
            size: 4,
            used: 5,
            device: (0, 0),
            fsid: 6,
            fileid: 7,
            atime: time,
            mtime: time,
            ctime: time,
        };
        let mut out = Vec::new();
        put_post_op_attr(&mut out, Some(&attr));
        assert_eq!(out.len(), POST_OP_ATTR_BYTES);
    }
}
