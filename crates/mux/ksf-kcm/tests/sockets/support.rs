//! Connections and messages.

use std::sync::Arc;

use ksf::framing::{Endian, Framing, LengthPrefix};
use ksf_bpf_framing::{Builtin, FramingProgram};
use ksf_kcm::{AnyMux, Backend};
use ksf_mux::backend::Multiplexor;
use ksf_mux::{ConnectionError, ConnectionId, Event, MuxOptions};

pub(crate) use crate::common::{PATIENCE, Tcp, connection, message, wait_until};

/// A length of four bytes that counts itself, kept in the message.
const PREFIX: LengthPrefix = LengthPrefix { offset: 0, width: 4, endian: Endian::Big, adjust: 0, strip: false };

pub(crate) fn options() -> MuxOptions {
    MuxOptions::new(Framing::LengthPrefix(PREFIX))
}

/// The same as a framing program, which finds the message also in AF_KCM.
pub(crate) fn program() -> Arc<FramingProgram> {
    let builtin = Builtin::LengthPrefix { offset: 0, width: 4, big_endian: true, adjust: 0 };
    Arc::new(FramingProgram::builtin(&builtin, &ksf_bpf_framing::Options::default()).unwrap())
}

pub(crate) fn open(backend: Backend, options: MuxOptions) -> AnyMux {
    let mux = AnyMux::open(backend, options).unwrap();
    assert_eq!(mux.backend(), backend);
    mux
}

/// The end of a connection, waited for. `look`: has ksf's multiplexor read what nobody receives.
pub(crate) fn end_of(mux: &impl Multiplexor, look: impl Fn(), connection: ConnectionId) -> ConnectionError {
    let mut error = None;
    wait_until("the connection ends", || {
        look();
        while let Some(event) = mux.event() {
            match event {
                Event::Ended { connection: ended, error: why } if ended == connection => error = Some(why),
                _ => {}
            }
        }
        error.is_some()
    });
    error.unwrap()
}

/// Waits until so many bytes have come on a connection that nobody has received.
pub(crate) fn wait_for_bytes(mux: &impl Multiplexor, look: impl Fn(), connection: ConnectionId, bytes: usize) {
    wait_until("bytes arrive", || {
        look();
        let all = mux.connection_stats();
        all.iter().any(|of| of.connection == connection && of.waiting_bytes >= bytes)
    });
}
