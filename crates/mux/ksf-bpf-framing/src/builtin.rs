//! The native framings of ksf as eBPF programs: for AF_KCM, and to check the natives and the interpreter against.

use crate::elf::constant_in_file;
use crate::error::FramingLoadError;
use crate::program::{FramingOptions, FramingProgram};

/// A program that is part of this crate. All of them find the message also in AF_KCM (compiled with -DKSF_AF_KCM), and
/// return EBADMSG for a length below that of the header, EMSGSIZE for one above `i32::MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BuiltinFraming<'a> {
    /// ONC RPC record marking (RFC 5531, section 11). The length is that of the whole record with its marks, known
    /// when the last mark has arrived. EMSGSIZE for more than 256 fragments.
    RecordMark,
    /// A length field at a fixed place of a fixed header.
    LengthPrefix {
        /// Bytes before the field.
        offset: u8,
        /// Width of the field in bytes: 1, 2, 4 or 8.
        width: u8,
        /// True: most significant byte first.
        big_endian: bool,
        /// Added to the field's value to get the length of the whole message.
        adjust: i32,
    },
    /// A sequence of 1 to 8 bytes that ends a message, counted in its length. EMSGSIZE if it is not within the first
    /// 4096 bytes.
    Delimiter(&'a [u8]),
}

impl FramingProgram {
    /// Loads one of the programs of this crate. `options.program` is ignored; a [`BuiltinFraming::Delimiter`] may always run
    /// for 65,536 instructions, as it looks at every byte.
    pub fn builtin(builtin: &BuiltinFraming<'_>, options: &FramingOptions) -> Result<Self, FramingLoadError> {
        let mut options = FramingOptions { program: None, ..options.clone() };
        let mut object = builtin.object().to_vec();
        if let BuiltinFraming::Delimiter(_) = builtin {
            options.instructions_max = options.instructions_max.max(1 << 16);
        }
        if let Some(parameters) = builtin.parameters()? {
            let place = constant_in_file(&object, "ksf_parameters", parameters.len());
            let place = place.and_then(|range| object.get_mut(range));
            let place = place.ok_or_else(|| FramingLoadError::malformed("it has no ksf_parameters of this size"))?;
            place.copy_from_slice(&parameters);
        }
        Self::from_object(&object, &options)
    }
}

impl BuiltinFraming<'_> {
    const fn object(&self) -> &'static [u8] {
        match self {
            Self::RecordMark => include_bytes!(concat!(env!("OUT_DIR"), "/record_mark.bpf.o")),
            Self::LengthPrefix { .. } => include_bytes!(concat!(env!("OUT_DIR"), "/length_prefix.bpf.o")),
            Self::Delimiter(_) => include_bytes!(concat!(env!("OUT_DIR"), "/delimiter.bpf.o")),
        }
    }

    /// `struct parameters` of the program, as its C source declares it.
    fn parameters(&self) -> Result<Option<Vec<u8>>, FramingLoadError> {
        let bad = |what: String| Err(FramingLoadError::BadParameter { what });
        match *self {
            Self::RecordMark => Ok(None),
            Self::LengthPrefix { width, .. } if !matches!(width, 1 | 2 | 4 | 8) => {
                bad(format!("a length field has 1, 2, 4 or 8 bytes, not {width}"))
            }
            Self::LengthPrefix { offset, width, big_endian, adjust } => {
                let words = [u32::from(offset), u32::from(width), u32::from(big_endian), adjust as u32];
                Ok(Some(words.into_iter().flat_map(u32::to_ne_bytes).collect()))
            }
            Self::Delimiter(delimiter) if !(1..=8).contains(&delimiter.len()) => {
                bad(format!("a delimiter has 1 to 8 bytes, not {}", delimiter.len()))
            }
            Self::Delimiter(delimiter) => {
                let mut pattern = [0; 8];
                pattern[8 - delimiter.len()..].copy_from_slice(delimiter);
                let mask = u64::MAX << (64 - 8 * delimiter.len());
                let mut bytes = Vec::with_capacity(24);
                bytes.extend(u64::from_le_bytes(pattern).to_ne_bytes());
                bytes.extend(mask.to_ne_bytes());
                bytes.extend((delimiter.len() as u32).to_ne_bytes());
                bytes.extend([0; 4]);
                Ok(Some(bytes))
            }
        }
    }
}
