//! libksf: message sockets over TCP, for C. `include/ksf.h` is the interface, libksf(3) the manual.
//!
//! Nothing but translation is done here. A panic ends at the boundary: the call fails with EIO, and the socket or
//! message it was made on stays as it is.

mod boundary;
mod message;
mod options;
mod socket;
mod structs;

pub use message::{ksf_message_connection, ksf_message_data, ksf_message_free, ksf_message_reply};
pub use options::{KsfOptions, ksf_options_init};
pub use socket::{
    Socket, ksf_attach, ksf_clone, ksf_close, ksf_connections, ksf_detach, ksf_event_fd, ksf_event_next, ksf_fd,
    ksf_free, ksf_open, ksf_receive, ksf_receive_many, ksf_send, ksf_send_to, ksf_set_receiving, ksf_stats_read,
};
pub use structs::{KsfEvent, KsfStats};

pub use boundary::{ksf_last_error, ksf_version};
