//! `struct ksf_options`: what a caller of any version of the header says, in the words of the multiplexor.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::{offset_of, size_of};
use std::sync::Arc;

use ksf::Order;
use ksf::framing::{Endian, Framing, LengthPrefix};
use ksf_bpf_framing::FramingProgram;
use ksf_mux::MessageFraming;

use crate::boundary::{Failure, bytes, call, place};

/// `struct ksf_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KsfOptions {
    size: usize,
    framing: u32,
    length_offset: u32,
    length_width: u32,
    length_adjust: i32,
    length_little_endian: u32,
    in_order: u32,
    program_path: *const c_char,
    instructions: *const c_void,
    instructions_bytes: usize,
    message_bytes_max: u64,
    header_bytes_max: u64,
    assembly_timeout_ms: u64,
    send_timeout_ms: u64,
    connection_bytes_max: u64,
    out_queue_bytes_max: u64,
    mux_bytes_max: u64,
    connections_max: u64,
    classify: Option<Classify>,
    classify_context: *mut c_void,
    class_caps: *const u32,
    class_count: usize,
}

/// `classify` of the struct.
type Classify = unsafe extern "C" fn(bytes: *const c_void, count: usize, context: *mut c_void) -> c_int;

/// A function of the caller's, and what it is handed.
struct Classifier {
    function: Classify,
    context: *mut c_void,
}

// SAFETY: the context is handed on and not looked at; the header demands that the function may be called from any thread,
// from several at once.
unsafe impl Send for Classifier {}
// SAFETY: as above.
unsafe impl Sync for Classifier {}

impl Classifier {
    fn class(&self, message: &[u8]) -> Option<usize> {
        // SAFETY: so many bytes are there during the call; the header says what else the function may rely on.
        let class = unsafe { (self.function)(message.as_ptr().cast(), message.len(), self.context) };
        usize::try_from(class).ok()
    }
}

/// The size of the first version.
const SIZE_MIN: usize = offset_of!(KsfOptions, connections_max) + size_of::<u64>();

const LENGTH: u32 = 1;
const RECORD_MARK: u32 = 2;
const PROGRAM: u32 = 3;

impl KsfOptions {
    const fn defaults() -> Self {
        Self {
            size: size_of::<Self>(),
            framing: LENGTH,
            length_offset: 0,
            length_width: 4,
            length_adjust: 4,
            length_little_endian: 0,
            in_order: 0,
            program_path: std::ptr::null(),
            instructions: std::ptr::null(),
            instructions_bytes: 0,
            message_bytes_max: 0,
            header_bytes_max: 0,
            assembly_timeout_ms: 0,
            send_timeout_ms: 0,
            connection_bytes_max: 0,
            out_queue_bytes_max: 0,
            mux_bytes_max: 0,
            connections_max: 0,
            classify: None,
            classify_context: std::ptr::null_mut(),
            class_caps: std::ptr::null(),
            class_count: 0,
        }
    }

    /// Reads the caller's, of whichever version.
    ///
    /// # Safety
    ///
    /// `theirs` is null or leads to as many bytes as its field `size` says, as ksf_options_init has set it.
    pub(crate) unsafe fn read(theirs: *const Self) -> Result<Self, Failure> {
        if theirs.is_null() {
            return Ok(Self::defaults());
        }
        // SAFETY: every version begins with its size.
        let size = unsafe { theirs.cast::<usize>().read() };
        if size < SIZE_MIN {
            return Err(Failure::new(libc::EINVAL, "options.size is too small: call ksf_options_init first"));
        }
        let mut options = Self::defaults();
        // SAFETY: both are valid for the smaller of their sizes; the caller keeps it for its own. Any bytes are a value
        // of these fields.
        unsafe {
            let ours = std::ptr::from_mut(&mut options).cast::<u8>();
            std::ptr::copy_nonoverlapping(theirs.cast::<u8>(), ours, size.min(size_of::<Self>()));
        }
        Ok(options)
    }

    /// In the words of the multiplexor.
    ///
    /// # Safety
    ///
    /// The pointers in it are null or lead to what the header says.
    pub(crate) unsafe fn translate(&self) -> Result<ksf_mux::MuxOptions, Failure> {
        let invalid = |text: &str| Failure::new(libc::EINVAL, text);
        let framing: MessageFraming = match self.framing {
            LENGTH => {
                let small = |value: u32| u8::try_from(value).map_err(|_| invalid("a length field is too far or wide"));
                let prefix = LengthPrefix {
                    offset: small(self.length_offset)?,
                    width: small(self.length_width)?,
                    endian: if self.length_little_endian == 0 { Endian::Big } else { Endian::Little },
                    adjust: self.length_adjust,
                    strip: false,
                };
                Framing::LengthPrefix(prefix).validate().map_err(|error| invalid(&error.to_string()))?.into()
            }
            RECORD_MARK => Framing::RecordMark.into(),
            PROGRAM => {
                // SAFETY: handed on from the caller of this function.
                MessageFraming::Program(Arc::new(unsafe { self.program() }?))
            }
            _ => return Err(invalid("options.framing is none of enum ksf_framing")),
        };
        let mut options = ksf_mux::MuxOptions::new(framing);
        options.ordering = if self.in_order == 0 { Order::Free } else { Order::Requests };
        if let Some(function) = self.classify {
            let classifier = Classifier { function, context: self.classify_context };
            options.classify = Some(Arc::new(move |message| classifier.class(message)));
            // SAFETY: the header says that there are so many; the caller keeps it.
            options.class_caps = unsafe { self.class_caps() }?;
        } else if self.class_count > 0 {
            return Err(invalid("options.class_caps without options.classify, which tells the class of a message"));
        }
        let limits = &mut options.limits;
        let bytes = |value: u64, default: usize| match usize::try_from(value) {
            Ok(0) => default,
            value => value.unwrap_or(usize::MAX),
        };
        limits.message_bytes_max = bytes(self.message_bytes_max, limits.message_bytes_max);
        limits.header_bytes_max = bytes(self.header_bytes_max, limits.header_bytes_max);
        limits.connection_bytes_max = bytes(self.connection_bytes_max, limits.connection_bytes_max);
        limits.out_queue_bytes_max = bytes(self.out_queue_bytes_max, limits.out_queue_bytes_max);
        limits.shard_bytes_max = bytes(self.mux_bytes_max, limits.shard_bytes_max);
        if self.mux_bytes_max != 0 {
            limits.assembly_bytes_max = limits.shard_bytes_max / 4;
        }
        limits.connections_max = bytes(self.connections_max, limits.connections_max);
        let time = |value, default| if value == 0 { default } else { value };
        limits.assembly_timeout_ms = time(self.assembly_timeout_ms, limits.assembly_timeout_ms);
        limits.send_timeout_ms = time(self.send_timeout_ms, limits.send_timeout_ms);
        Ok(options)
    }

    unsafe fn class_caps(&self) -> Result<Vec<usize>, Failure> {
        let count = self.class_count.saturating_mul(size_of::<u32>());
        // SAFETY: the header says that there are so many; the caller keeps it.
        let caps = unsafe { bytes(self.class_caps.cast(), count) }?;
        let caps = caps.chunks_exact(size_of::<u32>()).map(|cap| cap.try_into().map_or(0, u32::from_ne_bytes) as usize);
        let caps: Vec<usize> = caps.collect();
        // No call would ever receive one.
        let is_blocked = caps.contains(&0);
        if is_blocked { Err(Failure::new(libc::EINVAL, "a cap of options.class_caps is 0")) } else { Ok(caps) }
    }

    unsafe fn program(&self) -> Result<FramingProgram, Failure> {
        let options = ksf_bpf_framing::FramingOptions::default();
        let loaded = if self.program_path.is_null() {
            // SAFETY: the header says that there are so many bytes; the caller keeps it.
            let instructions = unsafe { bytes(self.instructions, self.instructions_bytes) }?;
            FramingProgram::from_instructions(instructions, &options)
        } else {
            // SAFETY: the header says that it is a string; the caller keeps it.
            let path = unsafe { CStr::from_ptr(self.program_path) };
            use std::os::unix::ffi::OsStrExt as _;
            FramingProgram::load(std::ffi::OsStr::from_bytes(path.to_bytes()), &options)
        };
        loaded.map_err(|error| {
            let errno = match &error {
                ksf_bpf_framing::FramingLoadError::Unreadable { error, .. } => {
                    error.raw_os_error().unwrap_or(libc::EIO)
                }
                _ => libc::EINVAL,
            };
            Failure::new(errno, error.to_string())
        })
    }
}

/// Fills in the defaults, as far as the caller's version of the struct goes.
///
/// # Safety
///
/// `options` is null or valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ksf_options_init(options: *mut KsfOptions, size: usize) -> c_int {
    call(|| {
        let options = place(options, "options")?;
        if size < SIZE_MIN {
            return Err(Failure::new(libc::EINVAL, "size is that of no struct ksf_options"));
        }
        let defaults = KsfOptions { size, ..KsfOptions::defaults() };
        // SAFETY: the caller's struct has `size` bytes: what is ours is copied, what is newer becomes 0.
        unsafe {
            std::ptr::write_bytes(options.cast::<u8>(), 0, size);
            let ours = std::ptr::from_ref(&defaults).cast::<u8>();
            std::ptr::copy_nonoverlapping(ours, options.cast::<u8>(), size.min(size_of::<KsfOptions>()));
        }
        Ok(0)
    })
}
