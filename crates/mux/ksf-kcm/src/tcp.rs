//! The TCP socket of an attached connection: its bounds, which AF_KCM takes from it, and what is sent on it.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg, sockopt};

use crate::error::KcmError;
use crate::intake::is_dead;

/// Sets what keeps AF_KCM within bounds: it takes the longest message, as on the wire, and the time for one from the TCP
/// socket.
pub(crate) fn bound(tcp: impl AsFd, message_bytes: usize, assembly_timeout_ms: Option<u64>) -> Result<(), KcmError> {
    // A message near the size of the buffer may stop arriving, without an error (seen on 6.1). The kernel doubles what
    // it is given once more, for its own overhead.
    let wanted_bytes = message_bytes.saturating_mul(2).min(i32::MAX as usize / 2);
    if sockopt::set_socket_recv_buffer_size_force(&tcp, wanted_bytes).is_err() {
        sockopt::set_socket_recv_buffer_size(&tcp, wanted_bytes).map_err(KcmError::os("SO_RCVBUF"))?;
    }
    let granted_bytes = sockopt::socket_recv_buffer_size(&tcp).map_err(KcmError::os("SO_RCVBUF"))?;
    if granted_bytes < message_bytes.saturating_mul(2) {
        return Err(KcmError::ReceiveBuffer { message_bytes, wanted_bytes, granted_bytes });
    }
    // While the length of a message is unknown, nothing else bounds what a peer can make the kernel keep.
    let time = assembly_timeout_ms.map(Duration::from_millis);
    sockopt::set_socket_timeout(&tcp, sockopt::Timeout::Recv, time).map_err(KcmError::os("SO_RCVTIMEO"))
}

/// Sends what TCP takes without waiting.
///
/// What AF_KCM reports on the socket, the next caller is told, and no other: `report` is told of it, as it says
/// nothing of sending.
pub(crate) fn send(tcp: impl AsFd, slices: &[IoSlice<'_>], mut report: impl FnMut(Errno)) -> Result<usize, Errno> {
    // There are not more of these reports than that.
    const REPORTS_MAX: usize = 4;
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let mut error = Errno::PIPE;
    for _ in 0..REPORTS_MAX {
        error = match sendmsg(&tcp, slices, &mut SendAncillaryBuffer::default(), flags) {
            Err(Errno::INTR) => continue,
            Err(error) if error != Errno::AGAIN => error,
            result => return result,
        };
        if is_dead(&tcp) {
            break;
        }
        report(error);
    }
    Err(error)
}
