//! The contract of AF_KCM, without a kernel that has it: message sockets as programs know them from
//! Documentation/networking/kcm.rst, on the multiplexor of this crate.
//!
//! [`KcmSocket`] is one socket; [`KcmSocket::try_clone`] makes others of the same multiplexor. Messages are seen and written as they are on the wire,
//! and cut by a [`FramingProgram`](ksf_bpf_framing::FramingProgram). `docs/kcm.md` has every rule with what AF_KCM does,
//! what this does, and the test that shows it.
//!
//! What differs on purpose: a message belongs to a socket only when it is received (AF_KCM deals them out before), each
//! brings the identity of its connection, the rest of a message that did not fit is not lost, a batch leaves in time,
//! and what a peer can make grow is bounded.

mod error;
mod flags;
mod receive;
mod send;
mod socket;
mod stats;

pub use error::{KcmSocketError, NotAttached, OpenError};
pub use flags::Flags;
pub use receive::{RecvBuffer, RecvInfo};
pub use socket::{AttachOptions, KcmOptions, KcmSocket, Kind, Routing};
pub(crate) use stats::EndCounts;
pub use stats::{ConnectionStats, KcmStats, MuxStats, SocketStats, proc_net_kcm, proc_net_kcm_stats};
