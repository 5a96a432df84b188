//! Connections and messages.

use ksf::framing::{Endian, Framing, LengthPrefix};
use ksf_kcm::{AnyMux, Backend};
use ksf_mux::MuxOptions;

pub(crate) use crate::common::contract::{end_of, wait_for_bytes};
pub(crate) use crate::common::{PATIENCE, Tcp, connection, message, wait_until};

/// A length of four bytes that counts itself, kept in the message.
const PREFIX: LengthPrefix = LengthPrefix { offset: 0, width: 4, endian: Endian::Big, adjust: 0, strip: false };

pub(crate) fn options() -> MuxOptions {
    MuxOptions::new(Framing::LengthPrefix(PREFIX))
}

pub(crate) fn open(backend: Backend, options: MuxOptions) -> AnyMux {
    let mux = AnyMux::open(backend, options).unwrap();
    assert_eq!(mux.backend(), backend);
    mux
}
