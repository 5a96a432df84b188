//! Level 4: `SO_INCOMING_CPU` on each queue. A group looks at it since kernel 6.2 (commit b261eda84ec1); before, the
//! option was kept and ignored, so the version decides.

use std::io;
use std::os::fd::BorrowedFd;

use super::Choice;
use crate::sys;

pub(super) fn probe(socket: BorrowedFd<'_>) -> io::Result<()> {
    let release = rustix::system::uname();
    let release = release.release().to_string_lossy();
    if version(&release) < Some((6, 2)) {
        let words = format!("kernel {release} ignores SO_INCOMING_CPU in a reuseport group; 6.2 and later look at it");
        return Err(io::Error::new(io::ErrorKind::Unsupported, words));
    }
    set_cpu(socket, 0)
}

/// Marks each queue with the CPU of its worker, or with none.
pub(super) fn set(choices: &[Choice<'_>]) -> io::Result<()> {
    choices.iter().try_for_each(|choice| set_cpu(choice.queue, choice.cpu.map_or(-1, |cpu| cpu as i32)))
}

fn set_cpu(socket: BorrowedFd<'_>, cpu: i32) -> io::Result<()> {
    sys::set_option(socket, libc::SOL_SOCKET, libc::SO_INCOMING_CPU, &cpu.to_ne_bytes())
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_compared_by_number() {
        assert!(version("6.10.3-generic") > Some((6, 2)));
        assert!(version("6.2-rc1") >= Some((6, 2)));
        assert!(version("5.15.0-91-generic") < Some((6, 2)));
        assert!(version("nonsense") < Some((6, 2)));
    }
}
