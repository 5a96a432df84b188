//! Errors of libbpf-rs.

use std::borrow::Borrow;
use std::io;

/// The error as one of the system, with its errno if it has one. A missing permission is always `EPERM`: libbpf guesses
/// its cause. An error of libbpf's own keeps its text.
pub fn to_io(error: impl Borrow<libbpf_rs::Error>) -> io::Error {
    let error = error.borrow();
    let kind = match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => return io::Error::from_raw_os_error(libc::EPERM),
        libbpf_rs::ErrorKind::NotFound => io::ErrorKind::NotFound,
        libbpf_rs::ErrorKind::OutOfMemory => io::ErrorKind::OutOfMemory,
        libbpf_rs::ErrorKind::InvalidInput | libbpf_rs::ErrorKind::InvalidData => io::ErrorKind::InvalidInput,
        _ => io::ErrorKind::Other,
    };
    match errno_in(&format!("{error:#}")) {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::new(kind, error.to_string()),
    }
}

/// libbpf-rs 0.27 gives away the errno in its text alone: std ends that of each error of the system with `(os error 24)`.
fn errno_in(text: &str) -> Option<i32> {
    text.strip_suffix(')')?.rsplit_once("(os error ")?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use libbpf_rs::{Error, ErrorExt};

    use super::*;

    #[test]
    fn the_errno_is_kept_below_any_context() {
        let of = |errno| Error::from_raw_os_error(errno);
        assert_eq!(to_io(of(libc::EMFILE)).raw_os_error(), Some(libc::EMFILE));
        let below = Err::<(), _>(of(libc::EINVAL)).context("a").context("b").unwrap_err();
        assert_eq!(to_io(below).raw_os_error(), Some(libc::EINVAL));
        for denied in [libc::EPERM, libc::EACCES] {
            assert_eq!(to_io(of(denied)).raw_os_error(), Some(libc::EPERM));
        }
        let own = to_io(Error::from(io::Error::new(io::ErrorKind::InvalidData, "no map (1)")));
        assert_eq!((own.raw_os_error(), own.kind()), (None, io::ErrorKind::InvalidInput));
        assert_eq!(own.to_string(), "no map (1)");
    }
}
