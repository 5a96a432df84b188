//! The memory a program sees: its stack, the read-only data of its object, the length of the input; and the input
//! itself, behind helpers.
//!
//! ```text
//!   STACK  + frame * FRAME_STRIDE   512 bytes per frame, what lies between is no memory
//!   RODATA                          the object's constants
//!   CONTEXT                         struct __sk_buff, of which only `len` exists
//! ```
//!
//! Addresses are numbers: a program may calculate with them, spill and compare them. Each access is looked up, so a
//! wrong number is an error and nothing else.

use crate::error::{Access, Fault};

/// Bytes of stack of one function (include/linux/filter.h, MAX_BPF_STACK).
pub(crate) const STACK_BYTES: usize = 512;
/// Functions that may be active at once (include/linux/bpf_verifier.h, MAX_CALL_FRAMES).
pub(crate) const FRAMES_MAX: usize = 8;
/// Address of the context.
pub(crate) const CONTEXT: u64 = 0x4b53_4643_0000_0000;
/// Address of the read-only data.
pub(crate) const RODATA: u64 = 0x4b53_4644_0000_0000;
const STACK: u64 = 0x4b53_4653_0000_0000;
const FRAME_STRIDE: u64 = 0x1_0000;

/// The frame pointer (r10) of frame `depth`: one past its stack.
pub(crate) const fn frame_pointer(depth: usize) -> u64 {
    STACK + depth as u64 * FRAME_STRIDE + STACK_BYTES as u64
}

/// True for a number that is an address of any memory here.
pub(crate) const fn is_address(value: u64) -> bool {
    matches!(value >> 32, upper if upper == CONTEXT >> 32 || upper == RODATA >> 32 || upper == STACK >> 32)
}

/// The stacks of the active functions, and which of their bytes have been written.
pub(crate) struct Stack<const FRAMES: usize> {
    bytes: [[u8; STACK_BYTES]; FRAMES],
    written: [[u64; STACK_BYTES / 64]; FRAMES],
    /// Index of the newest active frame.
    pub(crate) depth: usize,
}

impl<const FRAMES: usize> Stack<FRAMES> {
    pub(crate) const fn new() -> Self {
        Self { bytes: [[0; STACK_BYTES]; FRAMES], written: [[0; STACK_BYTES / 64]; FRAMES], depth: 0 }
    }

    /// Enters a function; its stack has no contents.
    pub(crate) fn push(&mut self) -> Result<(), Fault> {
        if self.depth + 1 >= FRAMES {
            return Err(Fault::CallDepth { limit: FRAMES });
        }
        self.depth += 1;
        self.written[self.depth] = [0; STACK_BYTES / 64];
        Ok(())
    }

    /// Frame and place of `bytes` bytes at `address`, if that is stack of an active function.
    fn find(&self, address: u64, bytes: usize) -> Option<(usize, usize)> {
        let from_start = address.checked_sub(STACK)?;
        let frame = usize::try_from(from_start / FRAME_STRIDE).ok().filter(|frame| *frame <= self.depth)?;
        let at = (from_start % FRAME_STRIDE) as usize;
        (at + bytes <= STACK_BYTES).then_some((frame, at))
    }

    fn load(&self, frame: usize, at: usize, bytes: usize) -> Result<u64, Fault> {
        aligned(at, bytes)?;
        let mask = mask(at, bytes);
        if self.written[frame][at / 64] & mask != mask {
            return Err(Fault::UninitialisedStack { offset: at as i32 - STACK_BYTES as i32, bytes: bytes as u8 });
        }
        let from = &self.bytes[frame][at..at + bytes];
        Ok(number(from))
    }

    pub(crate) fn store(&mut self, address: u64, bytes: usize, value: u64) -> Result<(), Fault> {
        let Some((frame, at)) = self.find(address, bytes) else {
            return Err(Fault::BadAddress { address, bytes: bytes as u32, access: Access::Write });
        };
        aligned(at, bytes)?;
        self.written[frame][at / 64] |= mask(at, bytes);
        let to = &mut self.bytes[frame][at..at + bytes];
        match bytes {
            1 => to.copy_from_slice(&(value as u8).to_ne_bytes()),
            2 => to.copy_from_slice(&(value as u16).to_ne_bytes()),
            4 => to.copy_from_slice(&(value as u32).to_ne_bytes()),
            _ => to.copy_from_slice(&value.to_ne_bytes()),
        }
        Ok(())
    }

    /// Room for a helper to write; counts as written.
    pub(crate) fn room(&mut self, address: u64, bytes: u32) -> Result<&mut [u8], Fault> {
        let bad = Fault::BadAddress { address, bytes, access: Access::Write };
        let len = bytes as usize;
        if len > STACK_BYTES {
            return Err(bad);
        }
        let (frame, at) = self.find(address, len).ok_or(bad)?;
        let mut byte = at;
        while byte < at + len {
            let step = (64 - byte % 64).min(at + len - byte);
            self.written[frame][byte / 64] |= mask(byte, step);
            byte += step;
        }
        Ok(&mut self.bytes[frame][at..at + len])
    }
}

/// Reads `bytes` (1, 2, 4 or 8) from any memory.
pub(crate) fn load<const FRAMES: usize>(
    stack: &Stack<FRAMES>,
    rodata: &[u8],
    input: &Input<'_>,
    address: u64,
    bytes: usize,
) -> Result<u64, Fault> {
    if let Some((frame, at)) = stack.find(address, bytes) {
        return stack.load(frame, at, bytes);
    }
    let bad = Fault::BadAddress { address, bytes: bytes as u32, access: Access::Read };
    if address >> 32 == CONTEXT >> 32 {
        let offset = (address - CONTEXT) as usize;
        let length = input.visible_bytes().to_ne_bytes();
        // Part of the field may be read, as in the kernel (bpf_ctx_narrow_access_ok), at its natural alignment.
        let field = length.get(offset..offset.saturating_add(bytes)).filter(|_| offset.is_multiple_of(bytes));
        return field.map(number).ok_or(Fault::ContextField { offset: offset as u32, bytes: bytes as u8 });
    }
    if address >> 32 == RODATA >> 32 {
        let at = (address - RODATA) as usize;
        return rodata.get(at..at.saturating_add(bytes)).map(number).ok_or(bad);
    }
    Err(bad)
}

const fn mask(at: usize, bytes: usize) -> u64 {
    (u64::MAX >> (64 - bytes)) << (at % 64)
}

/// The verifier wants this on the stack whatever the machine; it also keeps each access in one word of the mask.
const fn aligned(at: usize, bytes: usize) -> Result<(), Fault> {
    if at.is_multiple_of(bytes) {
        Ok(())
    } else {
        Err(Fault::Misaligned { offset: at as i32 - STACK_BYTES as i32, bytes: bytes as u8 })
    }
}

fn number(from: &[u8]) -> u64 {
    match *from {
        [a] => u64::from(a),
        [a, b] => u64::from(u16::from_ne_bytes([a, b])),
        [a, b, c, d] => u64::from(u32::from_ne_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        _ => 0,
    }
}

/// The front of a stream, in pieces.
pub(crate) struct Input<'a> {
    pieces: &'a [&'a [u8]],
    bytes: usize,
    /// The piece that was read last and what lies before it: reading on costs nothing, however many pieces there are.
    piece: usize,
    before: usize,
}

impl<'a> Input<'a> {
    pub(crate) fn new(pieces: &'a [&'a [u8]]) -> Self {
        let bytes = pieces.iter().fold(0_usize, |sum, piece| sum.saturating_add(piece.len()));
        // Like in the kernel, no program sees more than an int can count.
        Self { pieces, bytes: bytes.min(i32::MAX as usize), piece: 0, before: 0 }
    }

    /// The value of `skb->len`.
    pub(crate) const fn visible_bytes(&self) -> u32 {
        self.bytes as u32
    }

    /// Copies the bytes at `offset`; false, and nothing copied, if they are not all there.
    pub(crate) fn read(&mut self, offset: u32, mut to: &mut [u8]) -> bool {
        let mut offset = offset as usize;
        if offset > self.bytes || to.len() > self.bytes - offset {
            return false;
        }
        if offset < self.before {
            (self.piece, self.before) = (0, 0);
        }
        while !to.is_empty() {
            let piece = self.pieces[self.piece];
            let Some(from) = piece.get(offset - self.before..).filter(|from| !from.is_empty()) else {
                self.before += piece.len();
                self.piece += 1;
                continue;
            };
            let len = from.len().min(to.len());
            let (now, rest) = to.split_at_mut(len);
            now.copy_from_slice(&from[..len]);
            to = rest;
            offset += len;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_read_like_one() {
        let whole: Vec<u8> = (0..40).collect();
        let pieces = [&whole[..0], &whole[..3], &whole[3..3], &whole[3..20], &whole[20..40], &whole[40..]];
        let mut input = Input::new(&pieces);
        for (offset, len) in [(0, 40), (39, 1), (2, 2), (19, 2), (20, 20), (0, 1), (3, 17), (40, 0)] {
            let mut to = vec![0; len];
            assert!(input.read(offset, &mut to), "{offset} {len}");
            assert_eq!(to, whole[offset as usize..][..len]);
        }
        let mut to = [7; 2];
        assert!(!input.read(39, &mut to) && !input.read(41, &mut to) && !input.read(u32::MAX, &mut to));
        assert_eq!(to, [7, 7]);
    }

    #[test]
    fn a_stack_remembers_what_was_written() {
        let mut stack = Stack::<2>::new();
        let top = frame_pointer(0);
        stack.store(top - 8, 4, 0x1122_3344).unwrap();
        let read = |stack: &Stack<2>, address, bytes| load(stack, &[], &Input::new(&[]), address, bytes);
        assert_eq!(read(&stack, top - 8, 4), Ok(0x1122_3344));
        assert_eq!(read(&stack, top - 8, 8), Err(Fault::UninitialisedStack { offset: -8, bytes: 8 }));
        assert_eq!(read(&stack, top - 4, 1), Err(Fault::UninitialisedStack { offset: -4, bytes: 1 }));
        stack.room(top - 200, 130).unwrap();
        assert_eq!(read(&stack, top - 200, 8), Ok(0));
        assert_eq!(read(&stack, top - 72, 2), Ok(0));
        assert!(read(&stack, top - 70, 2).is_err() && read(&stack, top - 208, 8).is_err());
        assert_eq!(stack.store(top - 6, 4, 0), Err(Fault::Misaligned { offset: -6, bytes: 4 }));
        for (address, bytes) in [(top, 1), (top - 4, 8), (top - 520, 8), (frame_pointer(1) - 8, 8), (0, 8)] {
            assert!(matches!(stack.store(address, bytes, 0), Err(Fault::BadAddress { .. })), "{address:x}");
        }
        assert!(stack.room(top - 8, 9).is_err() && stack.room(top - 512, 513).is_err());
    }

    #[test]
    fn a_frame_starts_empty_each_time() {
        let mut stack = Stack::<2>::new();
        stack.push().unwrap();
        stack.store(frame_pointer(1) - 8, 8, 1).unwrap();
        stack.depth = 0;
        stack.push().unwrap();
        let again = load(&stack, &[], &Input::new(&[]), frame_pointer(1) - 8, 8);
        assert_eq!(again, Err(Fault::UninitialisedStack { offset: -8, bytes: 8 }));
        assert_eq!(stack.push(), Err(Fault::CallDepth { limit: 2 }));
    }

    #[test]
    fn constants_and_the_context_have_ends() {
        let stack = Stack::<1>::new();
        let pieces = [&[0_u8; 300][..]];
        let input = Input::new(&pieces);
        let read = |address, bytes| load(&stack, &[1, 2, 3], &input, address, bytes);
        assert_eq!(read(RODATA + 2, 1), Ok(3));
        assert!(read(RODATA + 2, 2).is_err() && read(RODATA + 0xffff_ffff, 8).is_err());
        assert_eq!(read(CONTEXT, 4), Ok(300));
        let low_half = if cfg!(target_endian = "little") { 0 } else { 2 };
        assert_eq!(read(CONTEXT + low_half, 2), Ok(300));
        for (offset, bytes) in [(4, 4), (0, 8), (1, 2), (0xffff_ffff, 4)] {
            assert!(matches!(read(CONTEXT + offset, bytes), Err(Fault::ContextField { .. })), "{offset}");
        }
    }
}
