//! The wrapper of the kernel's own sockets.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use ksf::framing::{Delimiter, Framing};
use ksf_kcm::{KcmError, RawKcmSocket, Received, load, probe};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What the wrapper does, call by call.
pub(crate) fn cases() {
    probe().unwrap();
    let program = load(&Framing::Delimiter(Delimiter::LF)).unwrap();
    let refused = load(&Framing::Raw);
    assert!(matches!(refused, Err(KcmError::NoProgram { framing: Framing::Raw })));

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut far, near) = ksf_test::stream::pair(&listener);
    let one = RawKcmSocket::new().unwrap();
    let two = one.try_clone().unwrap();
    let os = |result: Result<(), KcmError>| match result {
        Err(KcmError::Os { error, .. }) => error.raw_os_error().unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(os(one.attach(&listener, &program)), 95, "EOPNOTSUPP");
    one.attach(&near, &program).unwrap();
    assert_eq!(os(two.attach(&near, &program)), 114, "EALREADY");

    // Only one receives: it gets every message, and says which one is cut short.
    two.set_recv_disabled(true).unwrap();
    assert!(two.is_recv_disabled().unwrap() && !one.is_recv_disabled().unwrap());
    let mut buffer = [0; 8];
    assert_eq!(one.recv(&mut buffer).unwrap(), None);
    far.write_all(b"one\ntwo, which is long\nthree\n").unwrap();
    for (expected, is_whole) in [(&b"one\n"[..], true), (b"two, whi", false), (b"three\n", true)] {
        let mut ready = [PollFd::new(&one, PollFlags::IN)];
        poll(&mut ready, Some(&Timespec { tv_sec: 60, tv_nsec: 0 })).unwrap();
        assert_eq!(one.recv(&mut buffer).unwrap(), Some(Received { bytes: expected.len(), is_whole }));
        assert_eq!(&buffer[..expected.len()], expected);
    }
    assert_eq!(two.recv(&mut buffer).unwrap(), None);

    // A message leaves when its end was given.
    let slices = |bytes: &'static [u8]| [std::io::IoSlice::new(bytes)];
    assert_eq!(two.send(&slices(b"half "), false).unwrap(), 5);
    assert_eq!(two.send(&slices(b"and half"), true).unwrap(), 8);
    let mut answer = [0; 13];
    far.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"half and half");

    one.unattach(&near).unwrap();
    assert_eq!(os(one.unattach(&near)), 2, "ENOENT");
}
