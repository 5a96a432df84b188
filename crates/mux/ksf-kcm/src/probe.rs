//! Does AF_KCM work here? Tried, not looked up.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use ksf::framing::{Framing, LengthPrefix};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::KcmError;
use crate::program::load;
use crate::socket::{RawKcmSocket, Received};

/// Proof that AF_KCM works here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Works(());

/// Longer than loopback takes; shorter than the caller wants to wait.
const WAIT: Duration = Duration::from_secs(1);

/// Sends messages of different lengths in one segment through a connection on loopback, and receives them from AF_KCM.
/// Leaves nothing behind.
///
/// The socket comes first: where there is no AF_KCM that is said, whatever else is missing.
pub fn probe() -> Result<Works, KcmError> {
    let kcm = RawKcmSocket::new()?;
    let program = load(&Framing::LengthPrefix(LengthPrefix::big_endian(4)))?;
    let os = |call| move |error| KcmError::Os { call, error };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(os("listen on loopback"))?;
    let address = listener.local_addr().map_err(os("listen on loopback"))?;
    let mut far = TcpStream::connect(address).map_err(os("connect on loopback"))?;
    let (near, _) = listener.accept().map_err(os("accept on loopback"))?;
    kcm.attach(&near, &program)?;
    let messages: [&[u8]; 3] = [b"\0\0\0\x01a", b"\0\0\0\x04bcde", b"\0\0\0\x02fg"];
    far.write_all(&messages.concat()).map_err(os("send on loopback"))?;
    let mut buffer = [0; 64];
    for expected in messages {
        let received = wait_for_message(&kcm, &mut buffer)?;
        if &buffer[..received.bytes] != expected {
            let what = format!("a message of {} bytes arrived as {}", expected.len(), received.bytes);
            return Err(KcmError::Broken { what });
        }
    }
    kcm.unattach(&near)?;
    Ok(Works(()))
}

fn wait_for_message(kcm: &RawKcmSocket, buffer: &mut [u8]) -> Result<Received, KcmError> {
    let wait = Timespec { tv_sec: WAIT.as_secs() as i64, tv_nsec: 0 };
    poll(&mut [PollFd::new(kcm, PollFlags::IN)], Some(&wait)).map_err(KcmError::os("poll on AF_KCM"))?;
    kcm.recv(buffer)?.ok_or_else(|| KcmError::Broken { what: format!("no message after {WAIT:?}") })
}
