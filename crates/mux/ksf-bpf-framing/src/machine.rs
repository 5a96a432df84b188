//! The interpreter: runs checked instructions on checked memory for a limited time.
//!
//! No allocation, no recursion, no unsafe code. What the kernel's verifier proves before a run is looked at during
//! it: that registers and stack have values, where addresses lead, how deep calls go, and that the program ends.

use crate::alu::swap;
use crate::error::Fault;
use crate::instruction::{Helper, Op, Operand};
use crate::memory::{CONTEXT, FRAMES_MAX, Input, Stack, frame_pointer, is_address, load};

/// A linked program. The first instruction is its entry.
#[derive(Debug)]
pub(crate) struct Code {
    pub(crate) ops: Box<[Op]>,
    pub(crate) rodata: Box<[u8]>,
}

/// Why a run stopped early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Fault { at: u32, fault: Fault },
    Budget,
}

impl Code {
    /// True if one function calls another.
    pub(crate) fn has_calls(&self) -> bool {
        self.ops.iter().any(|op| matches!(op, Op::Call { .. }))
    }

    /// Runs for at most `budget` instructions. The result is the lower half of r0, as the kernel takes it.
    pub(crate) fn run(&self, pieces: &[&[u8]], budget: u32, has_calls: bool) -> Result<i32, Stop> {
        // A stack must be cleared in safe code, and most programs need one frame.
        if has_calls {
            Machine::<FRAMES_MAX>::new(self, pieces).run(&self.ops, budget)
        } else {
            Machine::<1>::new(self, pieces).run(&self.ops, budget)
        }
    }
}

struct Machine<'a, const FRAMES: usize> {
    registers: [u64; 11],
    /// Bit i: register i has a value.
    known: u16,
    stack: Stack<FRAMES>,
    callers: [Caller; FRAMES],
    rodata: &'a [u8],
    input: Input<'a>,
}

/// What a function gets back when the one it called returns.
#[derive(Clone, Copy)]
struct Caller {
    saved: [u64; 4],
    known: u16,
    next: usize,
}

const R0: u16 = 1;
/// r1 to r5: arguments, without a value after a call.
const ARGUMENTS: u16 = 0b11_1110;
/// r6 to r9: kept for the caller.
const SAVED: u16 = 0b11_1100_0000;
const FRAME_POINTER: u16 = 1 << 10;

/// What comes after an instruction.
enum Next {
    Op(usize),
    Return,
}

impl<'a, const FRAMES: usize> Machine<'a, FRAMES> {
    fn new(code: &'a Code, pieces: &'a [&'a [u8]]) -> Self {
        let mut registers = [0; 11];
        registers[1] = CONTEXT;
        registers[10] = frame_pointer(0);
        Self {
            registers,
            known: 1 << 1 | FRAME_POINTER,
            stack: Stack::new(),
            callers: [Caller { saved: [0; 4], known: 0, next: 0 }; FRAMES],
            rodata: &code.rodata,
            input: Input::new(pieces),
        }
    }

    fn run(mut self, ops: &[Op], budget: u32) -> Result<i32, Stop> {
        let mut at = 0;
        for _ in 0..budget {
            match self.step(&ops[at], at) {
                Ok(Next::Op(next)) => at = next,
                Ok(Next::Return) => {
                    if self.stack.depth == 0 {
                        return Ok(self.registers[0] as u32 as i32);
                    }
                    at = self.leave();
                }
                Err(fault) => return Err(Stop::Fault { at: at as u32, fault }),
            }
        }
        Err(Stop::Budget)
    }

    #[inline]
    fn step(&mut self, op: &Op, at: usize) -> Result<Next, Fault> {
        match *op {
            Op::Alu { wide, kind, dst, operand } => {
                let right = self.operand(operand)?;
                // A move needs no old value.
                let left = if kind == crate::alu::Alu::Mov { 0 } else { self.register(dst)? };
                self.set(dst, if wide { kind.wide(left, right) } else { kind.narrow(left, right) });
            }
            Op::Negate { wide, dst } => {
                let value = self.register(dst)?.wrapping_neg();
                self.set(dst, if wide { value } else { u64::from(value as u32) });
            }
            Op::Swap { big, bits, dst } => {
                let value = self.register(dst)?;
                self.set(dst, swap(value, big, bits));
            }
            Op::LoadImm { dst, value } => {
                self.set(dst, value);
                return Ok(Next::Op(at + 2));
            }
            Op::Load { bytes, dst, base, offset } => {
                let address = self.address(base, offset)?;
                let value = load(&self.stack, self.rodata, &self.input, address, usize::from(bytes))?;
                self.set(dst, value);
            }
            Op::Store { bytes, base, offset, value } => {
                let address = self.address(base, offset)?;
                let value = self.operand(value)?;
                self.stack.store(address, usize::from(bytes), value)?;
            }
            Op::Packet { bytes, index, offset } => return self.packet(bytes, index, offset, at),
            Op::Jump { to } => return Ok(Next::Op(to as usize)),
            Op::Branch { wide, test, left, right, to } => {
                let (left, right) = (self.register(left)?, self.operand(right)?);
                if if wide { test.wide(left, right) } else { test.narrow(left, right) } {
                    return Ok(Next::Op(to as usize));
                }
            }
            Op::Call { to } => {
                self.enter(at + 1)?;
                return Ok(Next::Op(to as usize));
            }
            Op::Helper(helper) => {
                let result = self.help(helper)?;
                self.set(0, result as u64);
                self.known &= !ARGUMENTS;
            }
            Op::Exit => {
                let result = self.register(0)?;
                if self.stack.depth == 0 && is_address(result) {
                    return Err(Fault::ReturnsAddress);
                }
                return Ok(Next::Return);
            }
            // The decoder lets no jump lead here.
            Op::Hole => {}
        }
        Ok(Next::Op(at + 1))
    }

    fn register(&self, number: u8) -> Result<u64, Fault> {
        if self.known >> number & 1 == 0 {
            return Err(Fault::UninitialisedRegister { register: number });
        }
        Ok(self.registers[usize::from(number)])
    }

    fn set(&mut self, number: u8, value: u64) {
        self.registers[usize::from(number)] = value;
        self.known |= 1 << number;
    }

    /// Immediates are extended with their sign; 32-bit operations cut it off again.
    fn operand(&self, operand: Operand) -> Result<u64, Fault> {
        match operand {
            Operand::Register(number) => self.register(number),
            Operand::Immediate(value) => Ok(i64::from(value) as u64),
        }
    }

    fn address(&self, base: u8, offset: i16) -> Result<u64, Fault> {
        Ok(self.register(base)?.wrapping_add_signed(i64::from(offset)))
    }

    fn enter(&mut self, next: usize) -> Result<(), Fault> {
        let caller = self.stack.depth;
        self.stack.push()?;
        let [.., r6, r7, r8, r9, _] = self.registers;
        self.callers[caller] = Caller { saved: [r6, r7, r8, r9], known: self.known & SAVED, next };
        self.known &= ARGUMENTS;
        self.known |= FRAME_POINTER;
        self.registers[10] = frame_pointer(self.stack.depth);
        Ok(())
    }

    fn leave(&mut self) -> usize {
        self.stack.depth -= 1;
        let caller = self.callers[self.stack.depth];
        self.registers[6..10].copy_from_slice(&caller.saved);
        self.registers[10] = frame_pointer(self.stack.depth);
        self.known = R0 | caller.known | FRAME_POINTER;
        caller.next
    }

    fn context_in(&self, number: u8) -> Result<(), Fault> {
        if self.register(number)? == CONTEXT { Ok(()) } else { Err(Fault::NotTheContext { register: number }) }
    }

    /// LD_ABS and LD_IND: a big-endian number; the function returns 0 where the bytes are not there
    /// (net/core/filter.c, bpf_gen_ld_abs).
    fn packet(&mut self, bytes: u8, index: Option<u8>, offset: i32, at: usize) -> Result<Next, Fault> {
        self.context_in(6)?;
        // The kernel adds in 64 bits and takes the lower half as an int.
        let index = index.map_or(Ok(0), |index| self.register(index))? as i32;
        let offset = index.wrapping_add(offset);
        self.known &= !ARGUMENTS;
        let mut word = [0; 4];
        let field = &mut word[4 - usize::from(bytes)..];
        let there = u32::try_from(offset).is_ok_and(|offset| self.input.read(offset, field));
        self.set(0, u64::from(u32::from_be_bytes(word)));
        if there {
            return Ok(Next::Op(at + 1));
        }
        self.set(0, 0);
        Ok(Next::Return)
    }

    fn help(&mut self, helper: Helper) -> Result<i64, Fault> {
        const EFAULT: i64 = 14;
        match helper {
            // long bpf_skb_load_bytes(skb, u32 offset, void *to, u32 len)
            Helper::LoadBytes => {
                self.context_in(1)?;
                let offset = self.register(2)? as u32;
                let to = self.register(3)?;
                let len = positive(self.register(4)?)?;
                let room = self.stack.room(to, len)?;
                if self.input.read(offset, room) {
                    return Ok(0);
                }
                room.fill(0);
                Ok(-EFAULT)
            }
            // long bpf_probe_read_kernel(void *to, u32 size, const void *from)
            Helper::ProbeReadKernel => {
                let to = self.register(1)?;
                let len = positive(self.register(2)?)?;
                self.register(3)?;
                self.stack.room(to, len)?.fill(0);
                Ok(-EFAULT)
            }
        }
    }
}

/// The size argument of a helper: the verifier wants a proof that it is neither 0 nor negative.
fn positive(bytes: u64) -> Result<u32, Fault> {
    match u32::try_from(bytes) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(Fault::BadSize { bytes: bytes as i64 }),
    }
}
