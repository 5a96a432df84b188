//! Which source ports belong to which CPU: the Rust twin of `crates/accel/ksf-accel/bpf/flow/ksf_flow_abi.h`, whose head draws it.

use std::fmt;
use std::io;
use std::str::FromStr;

use crate::cpus::CpuMask;

/// A chunk has at least this many ports: `2^4`. With fewer, a busy destination runs out at once.
const CHUNK_BITS_MIN: u32 = 4;
/// Chunks are cut from here on: ports below belong to services.
const PORT_MIN: u16 = 1024;

/// The ports that the kernel gives to active connections of a network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    /// The lowest port.
    pub low: u16,
    /// The highest port.
    pub high: u16,
}

impl PortRange {
    /// `net.ipv4.ip_local_port_range` of this thread's network namespace; it holds for IPv6, too.
    pub fn of_this_network() -> io::Result<Self> {
        let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
        let mut numbers = text.split_whitespace().map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(low)), Some(Ok(high))) => Ok(Self { low, high }),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, format!("ip_local_port_range is {text:?}"))),
        }
    }
}

/// The port layout: a chunk of ports for each CPU.
///
/// Plain data without pointers, so it can be kept in a preload library's static. The text form
/// (`CHUNK_BITS:FIRST_CHUNK:CPUS`, as in `13:4:0-1`) travels in an environment variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    chunk_bits: u32,
    first_chunk: u32,
    cpus: CpuMask,
}

impl Layout {
    /// The largest chunks with which every CPU has one, whole and aligned, inside of `range`. The lowest chunks are
    /// used.
    ///
    /// # Errors
    ///
    /// No CPU, or more CPUs than the range has chunks of 16 ports.
    pub fn new(range: PortRange, cpus: &CpuMask) -> Result<Self, LayoutError> {
        if cpus.is_empty() {
            return Err(LayoutError::NoCpu);
        }
        let (low, end) = (u32::from(range.low.max(PORT_MIN)), u32::from(range.high) + 1);
        for chunk_bits in (CHUNK_BITS_MIN..16).rev() {
            let first_chunk = low.div_ceil(1 << chunk_bits);
            let chunks = (end >> chunk_bits).saturating_sub(first_chunk);
            if chunks as usize >= cpus.len() {
                return Ok(Self { chunk_bits, first_chunk, cpus: *cpus });
            }
        }
        Err(LayoutError::TooManyCpus { cpus: cpus.len(), low: range.low, high: range.high })
    }

    /// The layout of this thread's network namespace and CPUs.
    pub fn of_this_machine() -> Result<Self, LayoutError> {
        let cpus = CpuMask::of_this_thread().map_err(LayoutError::Unreadable)?;
        Self::new(PortRange::of_this_network().map_err(LayoutError::Unreadable)?, &cpus)
    }

    /// log2 of the ports of a chunk.
    pub fn chunk_bits(&self) -> u32 {
        self.chunk_bits
    }

    /// Number of the first chunk; it begins at port `first_chunk << chunk_bits`.
    pub fn first_chunk(&self) -> u32 {
        self.first_chunk
    }

    /// Ports of a chunk.
    pub fn ports_per_cpu(&self) -> u32 {
        1 << self.chunk_bits
    }

    /// The CPUs, one chunk each, in ascending order.
    pub fn cpus(&self) -> &CpuMask {
        &self.cpus
    }

    /// The lowest and the highest port of a CPU. `None` for a CPU without a chunk.
    pub fn ports_of(&self, cpu: usize) -> Option<PortRange> {
        let index = self.cpus.index_of(cpu)?;
        Some(self.ports(index))
    }

    /// What `setsockopt(IP_LOCAL_PORT_RANGE)` takes for a CPU's chunk: the lowest port, and in the upper half the
    /// highest. `None` for a CPU without a chunk.
    pub fn option_of(&self, cpu: usize) -> Option<u32> {
        let ports = self.ports_of(cpu)?;
        Some(u32::from(ports.low) | u32::from(ports.high) << 16)
    }

    /// Place of the chunk that a port lies in: 0 for the first CPU's. `None` for a port outside of all chunks.
    pub fn index_of_port(&self, port: u16) -> Option<usize> {
        let index = (u32::from(port) >> self.chunk_bits).checked_sub(self.first_chunk)? as usize;
        (index < self.cpus.len()).then_some(index)
    }

    /// The CPU that opens connections from this port. `None` for a port outside of all chunks.
    pub fn cpu_of_port(&self, port: u16) -> Option<usize> {
        self.cpus.iter().nth(self.index_of_port(port)?)
    }

    fn ports(&self, index: usize) -> PortRange {
        let low = (self.first_chunk + index as u32) << self.chunk_bits;
        // `new` and `from_str` keep every chunk below 65536.
        PortRange { low: low as u16, high: (low | (self.ports_per_cpu() - 1)) as u16 }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.chunk_bits, self.first_chunk, self.cpus)
    }
}

impl FromStr for Layout {
    type Err = LayoutError;

    /// Allocates nothing unless it fails.
    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let parse = || -> Option<Self> {
            let mut parts = text.splitn(3, ':');
            let chunk_bits: u32 = parts.next()?.parse().ok()?;
            let first_chunk: u32 = parts.next()?.parse().ok()?;
            let cpus: CpuMask = parts.next()?.parse().ok()?;
            let end = u64::from(first_chunk) + cpus.len() as u64;
            let fits = (CHUNK_BITS_MIN..16).contains(&chunk_bits) && end << chunk_bits <= 1 << 16;
            // Port 0 stands for "any".
            (fits && first_chunk > 0).then_some(Self { chunk_bits, first_chunk, cpus })
        };
        parse().ok_or_else(|| LayoutError::BadText { text: text.to_owned() })
    }
}

/// Why there is no port layout.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The set of CPUs is empty.
    #[error("no CPU to give ports to")]
    NoCpu,
    /// The range has too few ports for so many CPUs.
    #[error(
        "ports {low} to {high} (net.ipv4.ip_local_port_range) have no aligned chunk of 16 ports for each of {cpus} CPUs: widen the range, or name fewer CPUs"
    )]
    TooManyCpus {
        /// CPUs that need a chunk.
        cpus: usize,
        /// The range's lowest port.
        low: u16,
        /// The range's highest port.
        high: u16,
    },
    /// A text that is not a layout.
    #[error("{text:?} is not a port layout; one looks like 13:4:0-1")]
    BadText {
        /// The text.
        text: String,
    },
    /// The range or the set of CPUs cannot be read.
    #[error("cannot read the port range or the CPUs of this process: {0}")]
    Unreadable(#[source] io::Error),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn first_cpus(count: usize) -> CpuMask {
        (0..count).collect()
    }

    const DEFAULT: PortRange = PortRange { low: 32768, high: 60999 };

    #[test]
    fn the_default_range_is_cut_as_documented() {
        for (cpus, bits, first) in
            [(1, 14, 2), (2, 13, 4), (3, 13, 4), (4, 12, 8), (6, 12, 8), (7, 11, 16), (64, 8, 128), (1024, 4, 2048)]
        {
            let layout = Layout::new(DEFAULT, &first_cpus(cpus)).unwrap();
            assert_eq!((layout.chunk_bits(), layout.first_chunk()), (bits, first), "{cpus} CPUs");
        }
        let layout = Layout::new(DEFAULT, &"0-1".parse().unwrap()).unwrap();
        assert_eq!(layout.ports_of(0), Some(PortRange { low: 32768, high: 40959 }));
        assert_eq!(layout.ports_of(1), Some(PortRange { low: 40960, high: 49151 }));
        assert_eq!(layout.option_of(1), Some(40960 | 49151 << 16));
        assert_eq!(layout.ports_of(2), None);
        assert_eq!((layout.cpu_of_port(32767), layout.cpu_of_port(49152)), (None, None));
    }

    #[test]
    fn what_cannot_be_cut_is_refused() {
        assert!(matches!(Layout::new(DEFAULT, &CpuMask::EMPTY), Err(LayoutError::NoCpu)));
        let narrow = PortRange { low: 40000, high: 40031 };
        assert!(Layout::new(narrow, &first_cpus(2)).is_ok());
        let error = Layout::new(narrow, &first_cpus(3)).unwrap_err().to_string();
        assert!(error.contains("3 CPUs") && error.contains("40031"), "{error}");
        // Upside down, as nobody can set it.
        assert!(Layout::new(PortRange { low: 5000, high: 4000 }, &first_cpus(1)).is_err());
        for text in ["", "13", "13:4", "13:4:", "13:0:0", "3:600:0", "16:1:0", "13:7:0-1", "13:4294967295:0", "x:4:0"] {
            assert!(text.parse::<Layout>().is_err(), "{text}");
        }
        assert!("13:7:0".parse::<Layout>().is_ok(), "the last chunk");
    }

    proptest! {
        #[test]
        fn chunks_are_inside_the_range_and_found_again(
            low in 1u16..,
            span in 0u16..,
            cpus in proptest::collection::btree_set(0usize..crate::CPUS_MAX, 1..200),
        ) {
            let range = PortRange { low, high: low.saturating_add(span) };
            let cpus: CpuMask = cpus.into_iter().collect();
            let Ok(layout) = Layout::new(range, &cpus) else {
                // Refused only if even the smallest chunks are too few.
                let whole = (u32::from(range.high) + 1) / 16;
                let chunks = whole.saturating_sub(u32::from(low.max(PORT_MIN)).div_ceil(16));
                prop_assert!((chunks as usize) < cpus.len());
                return Ok(());
            };
            prop_assert_eq!(layout.to_string().parse::<Layout>().unwrap(), layout);
            for (index, cpu) in cpus.iter().enumerate() {
                let ports = layout.ports_of(cpu).unwrap();
                prop_assert!(ports.low >= range.low.max(PORT_MIN) && ports.high <= range.high);
                prop_assert_eq!(u32::from(ports.low) % layout.ports_per_cpu(), 0);
                prop_assert_eq!(u32::from(ports.high - ports.low) + 1, layout.ports_per_cpu());
                for port in [ports.low, ports.high] {
                    prop_assert_eq!(layout.index_of_port(port), Some(index));
                    prop_assert_eq!(layout.cpu_of_port(port), Some(cpu));
                }
            }
        }
    }
}
