//! What can go wrong, by whose fault it is: the object's (load), the program's (run).

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why a program could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FramingLoadError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", .path.display())]
    Unreadable {
        /// Its path.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It is another kind of file.
    #[error("not an eBPF object of this machine's byte order ({found}): compile with `clang -O2 -g -target bpf -c`")]
    NotBpf {
        /// What it is instead.
        found: String,
    },
    /// The object is cut short or contradicts itself.
    #[error("the object is damaged: {what}")]
    Malformed {
        /// What does not fit.
        what: String,
    },
    /// There is no program in a section `socket`, or none of that name.
    #[error("no framing program{}: put it into section \"socket\"{}", name_of(.wanted), list_of(.found))]
    NoProgram {
        /// The name that was asked for.
        wanted: Option<String>,
        /// The programs there are.
        found: Vec<String>,
    },
    /// Several programs, and none was named.
    #[error("several framing programs, name one of: {}", .found.join(", "))]
    SeveralPrograms {
        /// Their names.
        found: Vec<String>,
    },
    /// An instruction that does not exist in user space, or that the kernel would refuse too.
    #[error("function {function}, instruction {index} ({instruction}): {problem}")]
    Instruction {
        /// The function it is in.
        function: String,
        /// Which one, counted in 8-byte slots from the start of the function, as `llvm-objdump -d` counts.
        index: usize,
        /// Its kind and opcode.
        instruction: String,
        /// What is wrong and what to do.
        problem: String,
    },
    /// An instruction refers to something that does not exist in user space.
    #[error(
        "function {function}, instruction {index} refers to {symbol}, {problem}: a framing program has code and constants only"
    )]
    Reference {
        /// The function it is in.
        function: String,
        /// Which instruction, in slots from the start of the function.
        index: usize,
        /// The symbol or section.
        symbol: String,
        /// Why that is impossible.
        problem: &'static str,
    },
    /// More than any framing program needs.
    #[error("{what} exceed the limit of {limit}")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much is allowed.
        limit: usize,
    },
    /// A parameter of a built-in program, or an option, makes no sense.
    #[error("{what}")]
    BadParameter {
        /// Which one, and what is allowed.
        what: String,
    },
}

impl FramingLoadError {
    pub(crate) fn malformed(what: impl fmt::Display) -> Self {
        Self::Malformed { what: what.to_string() }
    }
}

fn name_of(name: &Option<String>) -> String {
    name.as_ref().map(|name| format!(" \"{name}\"")).unwrap_or_default()
}

fn list_of(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!(" (there is: {})", names.join(", ")) }
}

/// Why a run gave no verdict. All of them are faults of the program: a correct one gives a verdict on any bytes.
///
/// What AF_KCM reports in the same case is [`RunError::errno`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// An instruction did what it may not do.
    #[error("the framing program failed at instruction {at}: {fault}")]
    Fault {
        /// Which instruction: see [`FramingProgram::place`](crate::FramingProgram::place).
        at: u32,
        /// What it did.
        fault: Fault,
    },
    /// It ran for too long.
    #[error("the framing program ran for more than {limit} instructions: a loop, or too much work for a header")]
    Budget {
        /// The limit, [`FramingOptions::instructions_max`](crate::FramingOptions::instructions_max).
        limit: u32,
    },
    /// The length is negative, but not a negated error number (1 to 4095).
    #[error("the framing program returned {value}: neither a length nor a negated error number")]
    NotAnErrno {
        /// What was returned.
        value: i32,
    },
    /// The message is shorter than any message can be.
    #[error("the framing program announced a message of {bytes} bytes, at least {min_bytes} are needed")]
    TooShort {
        /// The length.
        bytes: u32,
        /// The limit, [`FramingOptions::message_bytes_min`](crate::FramingOptions::message_bytes_min).
        min_bytes: u32,
    },
    /// The message is longer than allowed.
    #[error("the framing program announced a message of {bytes} bytes, at most {max_bytes} are allowed")]
    TooLong {
        /// The length.
        bytes: u32,
        /// The limit, [`FramingOptions::message_bytes_max`](crate::FramingOptions::message_bytes_max).
        max_bytes: u32,
    },
    /// The message ends in bytes of which the program had said that they are not enough.
    #[error("the framing program announced {bytes} bytes after it had asked for more than {seen_bytes}")]
    InOldData {
        /// The length.
        bytes: u32,
        /// What it had seen when it asked for more.
        seen_bytes: usize,
    },
}

impl RunError {
    /// An error number for the connection, positive. EMSGSIZE for a message that is too long and EPROTO for one that
    /// ends in old data are what AF_KCM leaves on the TCP socket (net/strparser/strparser.c); EPROTO also stands for
    /// the other results that make no sense. A program that faults or loops would not have passed the verifier: EFAULT
    /// and ELOOP.
    pub const fn errno(&self) -> i32 {
        match self {
            Self::Fault { .. } => 14,
            Self::Budget { .. } => 40,
            Self::NotAnErrno { .. } | Self::TooShort { .. } | Self::InOldData { .. } => 71,
            Self::TooLong { .. } => 90,
        }
    }
}

/// What an instruction did that it may not do. The kernel's verifier refuses programs that could.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// It used a register that has no value. A call leaves r1 to r5 without one.
    #[error("register r{register} has no value")]
    UninitialisedRegister {
        /// Its number.
        register: u8,
    },
    /// It read stack that was never written.
    #[error("reads {bytes} bytes of stack at r10{offset:+} that were never written")]
    UninitialisedStack {
        /// Where, relative to the frame pointer of the function that owns the stack.
        offset: i32,
        /// How many bytes.
        bytes: u8,
    },
    /// An access to the stack is not aligned to its size.
    #[error("accesses {bytes} bytes of stack at r10{offset:+}, which is not aligned")]
    Misaligned {
        /// Where, relative to the frame pointer of the function that owns the stack.
        offset: i32,
        /// How many bytes.
        bytes: u8,
    },
    /// There is no such memory, or it must not be written.
    #[error("{access} of {bytes} bytes at address {address:#x}, where it has no such memory")]
    BadAddress {
        /// The address.
        address: u64,
        /// How many bytes.
        bytes: u32,
        /// Reading or writing.
        access: Access,
    },
    /// It read another field of `struct __sk_buff` than `len`.
    #[error("reads {bytes} bytes at offset {offset} of struct __sk_buff: only len exists in user space")]
    ContextField {
        /// Where in the structure.
        offset: u32,
        /// How many bytes.
        bytes: u8,
    },
    /// A helper or LD_ABS did not get the context where it belongs (r1, r6).
    #[error("register r{register} must hold the context")]
    NotTheContext {
        /// The register.
        register: u8,
    },
    /// A helper was to read no bytes or a negative number of them.
    #[error("asks a helper for {bytes} bytes")]
    BadSize {
        /// The size.
        bytes: i64,
    },
    /// Too many functions are active.
    #[error("calls functions more than {limit} deep")]
    CallDepth {
        /// How many are allowed.
        limit: usize,
    },
    /// It returned an address.
    #[error("returns an address")]
    ReturnsAddress,
}

/// Kind of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// Reading.
    Read,
    /// Writing.
    Write,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}
