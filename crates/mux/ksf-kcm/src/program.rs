//! The framing program of a native framing, loaded for AF_KCM.

use ksf::framing::{Endian, Framing};
use ksf_bpf_framing::{BuiltinFraming, FramingOptions, FramingProgram, KernelProgram};

use crate::error::KcmError;

/// The eBPF twin of a framing. It reads at which byte of a segment a message starts, which AF_KCM does not tell a
/// program: without that it would cut the messages behind the first one of a segment wrongly, and report nothing.
///
/// A record has at most 256 fragments, and a delimiter must be found within 4096 bytes.
pub fn program(framing: &Framing) -> Result<FramingProgram, KcmError> {
    let builtin = match framing {
        Framing::RecordMark => BuiltinFraming::RecordMark,
        Framing::LengthPrefix(prefix) => BuiltinFraming::LengthPrefix {
            offset: prefix.offset,
            width: prefix.width,
            big_endian: prefix.endian == Endian::Big,
            adjust: prefix.adjust,
        },
        Framing::Delimiter(delimiter) => BuiltinFraming::Delimiter(delimiter.as_bytes()),
        framing => return Err(KcmError::NoProgram { framing: *framing }),
    };
    Ok(FramingProgram::builtin(&builtin, &FramingOptions::default())?)
}

/// [`program`], in the kernel.
pub fn load(framing: &Framing) -> Result<KernelProgram, KcmError> {
    Ok(program(framing)?.verify_with_kernel()?)
}
