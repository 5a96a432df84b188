//! What the programs and user space share. The shapes mirror `bpf/ksf_abi.h`; the assertions below and the ones there
//! fail to compile when the two drift apart, and the loader compares sizes with the object it loads.

use std::sync::atomic::{AtomicU32, AtomicU64};

include!(concat!(env!("OUT_DIR"), "/counters.rs"));

/// `KSF_ABI`
pub(crate) const ABI: u32 = 3;
/// `KSF_BYTES_MAX`
pub(crate) const BYTES_MAX: usize = 16_000;
const BUFFER_BYTES: usize = 16_384;
/// `KSF_SLOTS_PER_CPU`
pub(crate) const SLOTS_PER_CPU: u32 = 4;

/// `struct ksf_framing`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawFraming {
    pub(crate) kind: u32,
    pub(crate) offset: u32,
    pub(crate) width: u32,
    pub(crate) little_endian: u32,
    pub(crate) adjust: i32,
    pub(crate) strip: u32,
    pub(crate) delimiter_bytes: u32,
    pub(crate) delimiter: [u8; 8],
    pub(crate) reserved: u32,
}

/// `struct ksf_config`: the object's `.rodata.ksf`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    pub(crate) abi: u32,
    pub(crate) bytes: u32,
    pub(crate) service: [u8; 32],
    pub(crate) framing: RawFraming,
    pub(crate) window_bytes: u32,
    pub(crate) lag_bytes_max: u32,
    pub(crate) cpus: u32,
    pub(crate) hops: u32,
}

/// `struct ksf_conn`: the first line is the program's, the second ours.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct ConnState {
    pub(crate) passed: AtomicU64,
    pub(crate) taken: AtomicU64,
    pub(crate) replied: AtomicU64,
    pub(crate) messages: AtomicU32,
    pub(crate) trial_at: AtomicU32,
    pub(crate) lag: AtomicU32,
    pub(crate) base_seq: AtomicU32,
    pub(crate) epoch_seen: AtomicU32,
    pub(crate) woken: AtomicU32,
    pub(crate) broken: AtomicU32,
    pub(crate) next_seq: AtomicU32,
    pub(crate) hopping: AtomicU32,
    pub(crate) hop_end: AtomicU32,

    pub(crate) settled: AtomicU64,
    pub(crate) cookie: AtomicU64,
    pub(crate) sent: AtomicU64,
    pub(crate) epoch: AtomicU32,
    pub(crate) parked: AtomicU32,
    pub(crate) park_seq: AtomicU32,
    pub(crate) lag_floor: AtomicU32,
    pub(crate) shard: AtomicU32,
    pub(crate) reserved_user: [AtomicU32; 5],
}

/// `struct ksf_message`: an area of `ksf_calls`.
#[repr(C)]
pub(crate) struct CallArea {
    pub(crate) start: u32,
    pub(crate) len: u32,
    pub(crate) out_start: u32,
    pub(crate) out_len: u32,
    pub(crate) bad: u32,
    pub(crate) transport: u32,
    pub(crate) reserved: [u32; 10],
    pub(crate) out: [u8; BUFFER_BYTES],
    pub(crate) input: [u8; BUFFER_BYTES],
    pub(crate) tail: [u8; BUFFER_BYTES],
}

/// `struct ksf_port`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Port {
    /// Network byte order.
    pub(crate) port: [u8; 2],
    pub(crate) family: u16,
    pub(crate) address: [u8; 16],
}

const _: () = {
    assert!(size_of::<RawFraming>() == 40);
    assert!(size_of::<Config>() == 96);
    assert!(size_of::<ConnState>() == 128);
    assert!(std::mem::offset_of!(ConnState, settled) == 64);
    assert!(size_of::<CallArea>() == 64 + 3 * BUFFER_BYTES);
    assert!(size_of::<Port>() == 20);
};

impl Config {
    /// Reads the configuration an object was compiled with.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..size_of::<Self>())?;
        // SAFETY: the slice has the size of Config, which has no padding and no invalid bit patterns (integers and
        // arrays of integers only); read_unaligned asks for no alignment.
        Some(unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }

    /// The configuration as the object's memory image.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: Config is repr(C), has no padding (its size is the sum of its fields, asserted above) and lives as
        // long as the borrow.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// The name the author gave the service.
    pub(crate) fn service_name(&self) -> String {
        let end = self.service.iter().position(|&byte| byte == 0).unwrap_or(self.service.len());
        String::from_utf8_lossy(&self.service[..end]).into_owned()
    }
}

impl Port {
    pub(crate) fn as_bytes(&self) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..2].copy_from_slice(&self.port);
        bytes[2..4].copy_from_slice(&self.family.to_ne_bytes());
        bytes[4..].copy_from_slice(&self.address);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header is the source of these numbers.
    #[test]
    fn constants_match_the_header() {
        let header = include_str!("../bpf/ksf_abi.h");
        let value = |name: &str| -> u64 {
            let line = header.lines().find_map(|line| line.strip_prefix(&format!("#define {name} ")));
            line.unwrap_or_else(|| panic!("{name} is not in the header")).trim().parse().expect("a number")
        };
        assert_eq!(value("KSF_ABI"), u64::from(ABI));
        assert_eq!(value("KSF_BYTES_MAX"), BYTES_MAX as u64);
        assert_eq!(value("KSF_BUFFER_BYTES"), BUFFER_BYTES as u64);
        assert_eq!(value("KSF_SLOTS_PER_CPU"), u64::from(SLOTS_PER_CPU));
        assert!(COUNTERS.len() > 20 && COUNTERS[0].0 == "segments_answered");
    }
}
