//! The struct of `bpf/ksf_hop_abi.h`, and its counters.

include!(concat!(env!("OUT_DIR"), "/counters.rs"));

/// `struct ksf_hop_settings`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Settings {
    pub(crate) netns_cookie: u64,
    pub(crate) any_port: u32,
    pub(crate) limit_bytes: u32,
    pub(crate) warm_up: u32,
    pub(crate) stopped: u32,
    pub(crate) spliced: u32,
    pub(crate) zero: u32,
}

const _: () = assert!(size_of::<Settings>() == 32);

impl Settings {
    pub(crate) fn as_bytes(&self) -> Vec<u8> {
        let Self { netns_cookie, any_port, limit_bytes, warm_up, stopped, spliced, zero } = *self;
        let words = [any_port, limit_bytes, warm_up, stopped, spliced, zero];
        netns_cookie.to_ne_bytes().into_iter().chain(words.into_iter().flat_map(u32::to_ne_bytes)).collect()
    }

    /// Where a field that only the program or only the end of the hop writes lies.
    pub(crate) const SPLICED_AT: usize = std::mem::offset_of!(Settings, spliced);
}

/// Words of the map of ports: a bit for each.
pub(crate) const PORT_WORDS: usize = 65_536 / 32;
