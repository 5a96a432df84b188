//! The structs of `bpf/flow/ksf_flow_abi.h`, and its counters.

use super::{CpuMask, Layout};

include!(concat!(env!("OUT_DIR"), "/flow/counters.rs"));

/// `KSF_FLOW_ABI`
pub(crate) const ABI: u32 = 1;
/// `KSF_FLOW_POLICIES_MAX`
pub(crate) const POLICIES_MAX: usize = 8;
/// `KSF_BROKEN` of `enum ksf_flow_proof`
pub(crate) const BROKEN: u32 = 2;
/// `KSF_PROVEN`
pub(crate) const PROVEN: u32 = 1;

/// `struct ksf_flow_layout`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct LayoutWords {
    pub(crate) chunk_bits: u32,
    pub(crate) first_chunk: u32,
    pub(crate) chunks: u32,
}

/// `struct ksf_flow_settings`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct FlowSettings {
    pub(crate) layout: LayoutWords,
    pub(crate) cpus: u32,
    pub(crate) guard: u32,
    pub(crate) proof: u32,
}

/// `struct ksf_connect_settings`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct ConnectSettings {
    pub(crate) layout: LayoutWords,
    pub(crate) loopback: u32,
    pub(crate) netns_cookie: u64,
    pub(crate) range_refused: u32,
    pub(crate) tries: u32,
}

const _: () = assert!(size_of::<FlowSettings>() == 24 && size_of::<ConnectSettings>() == 32);
const _: () = assert!(super::CPUS_MAX == 1024, "KSF_FLOW_CPUS_MAX");

impl From<&Layout> for LayoutWords {
    fn from(layout: &Layout) -> Self {
        Self { chunk_bits: layout.chunk_bits(), first_chunk: layout.first_chunk(), chunks: layout.cpus().len() as u32 }
    }
}

impl FlowSettings {
    pub(crate) fn as_bytes(&self) -> Vec<u8> {
        let Self { layout: LayoutWords { chunk_bits, first_chunk, chunks }, cpus, guard, proof } = *self;
        words(&[chunk_bits, first_chunk, chunks, cpus, guard, proof])
    }
}

impl ConnectSettings {
    pub(crate) fn as_bytes(&self) -> Vec<u8> {
        let Self { layout: LayoutWords { chunk_bits, first_chunk, chunks }, .. } = *self;
        let mut bytes = words(&[chunk_bits, first_chunk, chunks, self.loopback]);
        bytes.extend(self.netns_cookie.to_ne_bytes());
        bytes.extend(words(&[self.range_refused, self.tries]));
        bytes
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// CPU numbers with their place in the list, as map keys and values.
pub(crate) fn numbered(cpus: &CpuMask) -> impl Iterator<Item = (u32, u32)> + '_ {
    cpus.iter().enumerate().map(|(index, cpu)| (index as u32, cpu as u32))
}
