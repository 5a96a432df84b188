//! Structs that calls fill in, for callers of any version of the header.

use std::ffi::c_char;
use std::mem::size_of;

use crate::boundary::{Failure, place};

/// `struct ksf_event`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KsfEvent {
    pub(crate) size: usize,
    pub(crate) kind: u32,
    pub(crate) error: i32,
    pub(crate) connection: u64,
    pub(crate) count: u64,
    pub(crate) text: [c_char; 128],
}

impl From<ksf_mux::Event> for KsfEvent {
    fn from(event: ksf_mux::Event) -> Self {
        let (kind, error, connection, count, text) = match &event {
            ksf_mux::Event::Ended { connection, error } => (1, error.errno(), *connection, 0, error.to_string()),
            ksf_mux::Event::Uncertain { connection, messages } => {
                (2, 0, *connection, *messages as u64, format!("{messages} messages may have arrived or not"))
            }
            ksf_mux::Event::Detached { connection } => (3, 0, *connection, 0, "detached".to_owned()),
            ksf_mux::Event::Lost { events } => {
                let nobody = ksf_mux::ConnectionId::from_u64(u64::MAX);
                (4, 0, nobody, *events, format!("{events} older events were not read in time"))
            }
            // Newer than this library knows.
            _ => (0, 0, ksf_mux::ConnectionId::from_u64(u64::MAX), 0, String::new()),
        };
        let mut own = Self { size: 0, kind, error, connection: connection.to_u64(), count, text: [0; 128] };
        // The last byte stays 0.
        for (to, from) in own.text.iter_mut().take(127).zip(text.bytes()) {
            *to = from as c_char;
        }
        own
    }
}

/// `struct ksf_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KsfStats {
    pub(crate) size: usize,
    pub(crate) counts: [u64; 16],
}

impl From<ksf_mux::kcm::MuxStats> for KsfStats {
    fn from(stats: ksf_mux::kcm::MuxStats) -> Self {
        let counts = [
            stats.rx_messages,
            stats.rx_bytes,
            stats.tx_messages,
            stats.tx_bytes,
            stats.tx_retries,
            stats.attach,
            stats.unattach,
            stats.rx_aborts,
            stats.rx_interrupted,
            stats.rx_unrecoverable,
            stats.rx_memory,
            stats.rx_need_more,
            stats.rx_bad_length,
            stats.rx_too_big,
            stats.rx_timeout,
            stats.tx_aborts,
        ];
        Self { size: 0, counts }
    }
}

/// Copies `ours`, which begins with a size, as far as the caller's version goes; its size stays.
///
/// # Safety
///
/// `theirs` is null, or begins with its size in bytes and is valid for writes of so many. `T` is `repr(C)` and begins
/// with a `usize`.
pub(crate) unsafe fn fill<T: Copy>(theirs: *mut T, ours: &T) -> Result<(), Failure> {
    let theirs = place(theirs, "the struct")?;
    // SAFETY: it begins with its size, by the contract of this function.
    let size = unsafe { theirs.cast::<usize>().read() };
    if size < size_of::<T>() {
        return Err(Failure::new(libc::EINVAL, "the struct's size is not set, or that of no version"));
    }
    let skip = size_of::<usize>();
    // SAFETY: `size` is at least that of `T`, so both are valid for its size; what lies behind the first field is copied.
    unsafe {
        let from = std::ptr::from_ref(ours).cast::<u8>().add(skip);
        std::ptr::copy_nonoverlapping(from, theirs.cast::<u8>().add(skip), size_of::<T>() - skip);
    }
    Ok(())
}
