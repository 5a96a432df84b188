//! A framing program: loaded once, asked at the front of every message.

use std::fs;
use std::path::Path;

use crate::elf::{self, Function};
use crate::error::{FramingLoadError, RunError};
use crate::instruction::{Op, Raw, Refused, decode};
use crate::machine::{Code, Stop};

/// Limits of a program, and which one of an object it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FramingOptions {
    /// Name of the function, or of its section (`socket/...`). `None`: the object has one framing program.
    pub program: Option<String>,
    /// Instructions a call may run, helpers counted as one. A header takes 20 to 100.
    pub instructions_max: u32,
    /// Shortest message, in bytes: set it to the length of the header. A shorter one is an error.
    pub message_bytes_min: u32,
    /// Longest message, in bytes, at most `i32::MAX`. A longer one is an error.
    pub message_bytes_max: u32,
}

impl Default for FramingOptions {
    /// 10,000 instructions; messages of any length that is positive.
    fn default() -> Self {
        Self { program: None, instructions_max: 10_000, message_bytes_min: 1, message_bytes_max: i32::MAX as u32 }
    }
}

/// What a program says about the front of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FramingVerdict {
    /// The message has this many bytes, header included. They need not have arrived.
    Length(u32),
    /// Too few bytes to tell. Ask again when there are more.
    NeedMore,
    /// The stream cannot be cut: a positive error number of Linux, for the connection.
    ///
    /// [`ESTRPIPE`](Self::ESTRPIPE) is no error of the peer: the program hands the stream back to its owner, from the
    /// front of this message (Documentation/networking/strparser.rst).
    Error(i32),
}

impl FramingVerdict {
    /// Error number by which a program hands the stream back.
    pub const ESTRPIPE: i32 = 86;
}

/// A user's eBPF program that finds the length of messages, run by a checked interpreter.
///
/// ```
/// use ksf_bpf_framing::{BuiltinFraming, FramingProgram, FramingOptions, FramingVerdict};
///
/// let program = FramingProgram::builtin(&BuiltinFraming::RecordMark, &FramingOptions::default())?;
/// assert_eq!(program.message_len(&[&[0x80, 0], &[0, 100]]), Ok(FramingVerdict::Length(104)));
/// assert_eq!(program.message_len(&[&[0x80, 0]]), Ok(FramingVerdict::NeedMore));
/// # Ok::<(), ksf_bpf_framing::FramingLoadError>(())
/// ```
#[derive(Debug)]
pub struct FramingProgram {
    name: String,
    code: Code,
    has_calls: bool,
    /// Name and first instruction of each function, in ascending order.
    functions: Box<[(String, u32)]>,
    options: FramingOptions,
    /// The object it came from, for the kernel.
    object: Option<Box<[u8]>>,
}

impl FramingProgram {
    /// Reads an object file, as `clang -O2 -g -target bpf -c` writes it.
    pub fn load(path: impl AsRef<Path>, options: &FramingOptions) -> Result<Self, FramingLoadError> {
        let path = path.as_ref();
        let object = fs::read(path).map_err(|error| FramingLoadError::Unreadable { path: path.to_owned(), error })?;
        Self::from_object(&object, options)
    }

    /// Takes the bytes of an object file.
    pub fn from_object(object: &[u8], options: &FramingOptions) -> Result<Self, FramingLoadError> {
        let image = elf::link(object, options.program.as_deref())?;
        let mut program = Self::assemble(&image.functions, image.rodata, options)?;
        program.object = Some(object.into());
        Ok(program)
    }

    /// Takes encoded instructions of one function, 8 bytes each in this machine's byte order. It has no object that
    /// a kernel could load: for tests and generators.
    pub fn from_instructions(instructions: &[u8], options: &FramingOptions) -> Result<Self, FramingLoadError> {
        let function = elf::single_function(instructions)?;
        Self::assemble(&[function], Box::default(), options)
    }

    /// Asks for the length of the message at the front of `stream`, which may lie in pieces. Nothing is copied but
    /// what the program reads, and nothing is allocated.
    pub fn message_len(&self, stream: &[&[u8]]) -> Result<FramingVerdict, RunError> {
        self.message_len_after(stream, 0)
    }

    /// The same for a stream of whose first `seen_bytes` bytes the program has said [`FramingVerdict::NeedMore`]: a message
    /// that ends within these bytes is an error, as in the kernel (net/strparser/strparser.c, "Length must be into
    /// new skb").
    pub fn message_len_after(&self, stream: &[&[u8]], seen_bytes: usize) -> Result<FramingVerdict, RunError> {
        let limit = self.options.instructions_max;
        let value = self.code.run(stream, limit, self.has_calls).map_err(|stop| match stop {
            Stop::Budget => RunError::Budget { limit },
            Stop::Fault { at, fault } => RunError::Fault { at, fault },
        })?;
        let Ok(bytes) = u32::try_from(value) else {
            return if value >= -ERRNO_MAX {
                Ok(FramingVerdict::Error(-value))
            } else {
                Err(RunError::NotAnErrno { value })
            };
        };
        let FramingOptions { message_bytes_min: min_bytes, message_bytes_max: max_bytes, .. } = self.options;
        match bytes {
            0 => Ok(FramingVerdict::NeedMore),
            _ if bytes > max_bytes => Err(RunError::TooLong { bytes, max_bytes }),
            _ if bytes < min_bytes => Err(RunError::TooShort { bytes, min_bytes }),
            _ if bytes as usize <= seen_bytes => Err(RunError::InOldData { bytes, seen_bytes }),
            _ => Ok(FramingVerdict::Length(bytes)),
        }
    }

    /// Name of the program's function.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limits it was loaded with.
    pub const fn options(&self) -> &FramingOptions {
        &self.options
    }

    /// Function of an instruction that [`RunError::Fault`] names, and its place in that function.
    pub fn place(&self, at: u32) -> (&str, u32) {
        let after = self.functions.partition_point(|(_, start)| *start <= at);
        let (name, start) = &self.functions[after.saturating_sub(1)];
        (name, at.saturating_sub(*start))
    }

    #[cfg(feature = "kernel")]
    pub(crate) fn object(&self) -> Option<&[u8]> {
        self.object.as_deref()
    }

    fn assemble(functions: &[Function], rodata: Box<[u8]>, options: &FramingOptions) -> Result<Self, FramingLoadError> {
        check(options)?;
        let mut starts = Vec::with_capacity(functions.len());
        let mut end = 0;
        for function in functions {
            starts.push(end);
            end += function.instructions.len() as u32;
        }
        let mut ops: Vec<Op> = Vec::with_capacity(end as usize);
        for (function, start) in functions.iter().zip(&starts) {
            let refused = |Refused { index, instruction, problem }| FramingLoadError::Instruction {
                function: function.name.clone(),
                index,
                instruction,
                problem,
            };
            let checked = decode(&function.instructions, |at| function.fixups.get(&at).copied()).map_err(refused)?;
            ops.extend(checked.into_iter().map(|mut op| {
                op.relocate(*start, &starts);
                op
            }));
        }
        let code = Code { ops: ops.into(), rodata };
        Ok(Self {
            name: functions.first().map(|entry| entry.name.clone()).unwrap_or_default(),
            has_calls: code.has_calls(),
            code,
            functions: functions.iter().map(|function| function.name.clone()).zip(starts).collect(),
            options: options.clone(),
            object: None,
        })
    }
}

/// include/linux/err.h, MAX_ERRNO.
const ERRNO_MAX: i32 = 4095;

/// Instructions of a program with all its functions: what the kernel allows without privileges, sixteenfold.
pub(crate) const INSTRUCTIONS_MAX: usize = 16 * 4096;
const _: () = assert!(INSTRUCTIONS_MAX * Raw::BYTES < u32::MAX as usize);

fn check(options: &FramingOptions) -> Result<(), FramingLoadError> {
    let bad = |what: String| Err(FramingLoadError::BadParameter { what });
    let FramingOptions { message_bytes_min: min, message_bytes_max: max, instructions_max, .. } = *options;
    if max > i32::MAX as u32 {
        return bad(format!("message_bytes_max {max}: a framing program cannot announce more than {}", i32::MAX));
    }
    if min == 0 || min > max {
        return bad(format!("message_bytes_min {min}: must be 1 to message_bytes_max ({max})"));
    }
    if instructions_max == 0 {
        return bad("instructions_max 0: no program ends within no instruction".into());
    }
    Ok(())
}
