//! From encoded instructions to checked ones: whatever the interpreter does not run is refused here, by name.
//!
//! The encoding is that of Documentation/bpf/standardization/instruction-set.rst (RFC 9669); the checks on unused
//! fields, shifts and divisions are those of the kernel's verifier, so that both sides take the same programs.

use std::fmt::Write as _;

use crate::alu::{Alu, Test};

/// One 8-byte slot of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raw {
    pub(crate) code: u8,
    pub(crate) dst: u8,
    pub(crate) src: u8,
    pub(crate) off: i16,
    pub(crate) imm: i32,
}

/// What the linker found out about a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fixup {
    /// A call of the function with this number.
    Call(usize),
    /// The address of read-only data.
    Data(u64),
}

/// A checked instruction. Register numbers are below 11, targets inside the code and at the start of an instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Alu {
        wide: bool,
        kind: Alu,
        dst: u8,
        operand: Operand,
    },
    Negate {
        wide: bool,
        dst: u8,
    },
    Swap {
        big: bool,
        bits: u8,
        dst: u8,
    },
    LoadImm {
        dst: u8,
        value: u64,
    },
    Load {
        bytes: u8,
        dst: u8,
        base: u8,
        offset: i16,
    },
    Store {
        bytes: u8,
        base: u8,
        offset: i16,
        value: Operand,
    },
    /// LD_ABS and LD_IND.
    Packet {
        bytes: u8,
        index: Option<u8>,
        offset: i32,
    },
    Jump {
        to: u32,
    },
    Branch {
        wide: bool,
        test: Test,
        left: u8,
        right: Operand,
        to: u32,
    },
    /// The target is a function's number until [`Op::relocate`].
    Call {
        to: u32,
    },
    Helper(Helper),
    Exit,
    /// The second slot of a 64-bit immediate; nothing leads here.
    Hole,
}

/// The second operand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand {
    Register(u8),
    Immediate(i32),
}

/// The helpers of the kernel that exist in user space.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Helper {
    /// 26, bpf_skb_load_bytes.
    LoadBytes,
    /// 113, bpf_probe_read_kernel: there is no kernel memory here, it fails as it does on a bad address.
    ProbeReadKernel,
}

/// Which slot is wrong, and why.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) index: usize,
    pub(crate) instruction: String,
    pub(crate) problem: String,
}

impl Raw {
    pub(crate) const BYTES: usize = 8;

    /// Decodes the slot as a machine of this byte order stores it.
    pub(crate) fn from_bytes(slot: [u8; Self::BYTES]) -> Self {
        let [code, registers, off @ .., i0, i1, i2, i3] = slot;
        let (low, high) = (registers & 15, registers >> 4);
        let (dst, src) = if cfg!(target_endian = "little") { (low, high) } else { (high, low) };
        Self { code, dst, src, off: i16::from_ne_bytes(off), imm: i32::from_ne_bytes([i0, i1, i2, i3]) }
    }

    pub(crate) const fn is_load_imm64(&self) -> bool {
        self.code == 0x18
    }

    /// True for a call of another function of the program.
    pub(crate) const fn is_local_call(&self) -> bool {
        self.code == 0x85 && self.src == PSEUDO_CALL
    }

    fn class(&self) -> u8 {
        self.code & 7
    }

    fn bytes(&self) -> u8 {
        [4, 2, 1, 8][usize::from(self.code >> 3 & 3)]
    }

    fn mode(&self) -> u8 {
        self.code & 0xe0
    }

    /// The second operand of arithmetic and branches, and whether the field it leaves unused is zero.
    fn operand(&self) -> (Operand, bool) {
        if self.code & 8 != 0 {
            (Operand::Register(self.src), self.imm == 0)
        } else {
            (Operand::Immediate(self.imm), self.src == 0)
        }
    }
}

impl Op {
    /// Moves an instruction to its place: its function starts at `start`, function `i` at `starts[i]`.
    pub(crate) fn relocate(&mut self, start: u32, starts: &[u32]) {
        match self {
            Self::Jump { to } | Self::Branch { to, .. } => *to += start,
            Self::Call { to } => *to = starts[*to as usize],
            _ => {}
        }
    }
}

/// Checks the instructions of one function. `fixup` says what the linker knows about a slot.
pub(crate) fn decode(raws: &[Raw], fixup: impl Fn(usize) -> Option<Fixup>) -> Result<Vec<Op>, Refused> {
    let mut ops = Vec::with_capacity(raws.len());
    while let Some(raw) = raws.get(ops.len()) {
        let at = ops.len();
        let refuse = |problem: String| Refused { index: at, instruction: name(raw), problem };
        if raw.dst > 10 || (raw.src > 10 && !raw.is_load_imm64()) {
            return Err(refuse(format!("there is no register r{}", raw.dst.max(raw.src))));
        }
        if raw.is_load_imm64() {
            let value = wide_immediate(raw, raws.get(at + 1), fixup(at)).map_err(refuse)?;
            if raw.dst == FRAME_POINTER {
                return Err(refuse("r10 is read-only".into()));
            }
            ops.extend([Op::LoadImm { dst: raw.dst, value }, Op::Hole]);
            continue;
        }
        let op = one(raw, at, fixup(at)).map_err(refuse)?;
        if let Some(10) = written(&op) {
            return Err(refuse("r10 is read-only".into()));
        }
        ops.push(op);
    }
    for (at, op) in ops.iter().enumerate() {
        let refuse = |problem: &str| Refused { index: at, instruction: name(&raws[at]), problem: problem.into() };
        if let Op::Jump { to } | Op::Branch { to, .. } = op {
            match ops.get(*to as usize) {
                None => return Err(refuse("jumps out of its function")),
                Some(Op::Hole) => return Err(refuse("jumps into the middle of a 64-bit immediate")),
                Some(_) => {}
            }
        }
        if at + 1 == ops.len() && !matches!(op, Op::Exit | Op::Jump { .. }) {
            return Err(refuse("the function ends without exit"));
        }
    }
    Ok(ops)
}

const PSEUDO_CALL: u8 = 1;
const FRAME_POINTER: u8 = 10;

fn wide_immediate(raw: &Raw, second: Option<&Raw>, fixup: Option<Fixup>) -> Result<u64, String> {
    let second = second.ok_or("its second half is missing")?;
    if second.code != 0 || second.dst != 0 || second.src != 0 || second.off != 0 || raw.off != 0 {
        return Err("its unused fields are not zero".into());
    }
    match (fixup, raw.src) {
        (Some(Fixup::Data(address)), 0) => Ok(address),
        (None, 0) => Ok(u64::from(raw.imm as u32) | u64::from(second.imm as u32) << 32),
        (_, src) => Err(format!("pseudo source {src}: maps, kernel symbols and callbacks do not exist in user space")),
    }
}

fn one(raw: &Raw, at: usize, fixup: Option<Fixup>) -> Result<Op, String> {
    match raw.class() {
        0 => packet(raw),
        1 => match raw.mode() {
            MEM if raw.imm == 0 => Ok(Op::Load { bytes: raw.bytes(), dst: raw.dst, base: raw.src, offset: raw.off }),
            MEM => Err(UNUSED.into()),
            0x80 => Err(V4.into()),
            _ => Err(UNKNOWN.into()),
        },
        2 if raw.mode() == MEM && raw.src != 0 => Err(UNUSED.into()),
        2 if raw.mode() == MEM => Ok(store(raw, Operand::Immediate(raw.imm))),
        3 if raw.mode() == MEM && raw.imm != 0 => Err(UNUSED.into()),
        3 if raw.mode() == MEM => Ok(store(raw, Operand::Register(raw.src))),
        3 if raw.mode() == 0xc0 => Err("atomic operations have no use in a framing program".into()),
        2 | 3 => Err(UNKNOWN.into()),
        4 => arithmetic(raw, false),
        7 => arithmetic(raw, true),
        class => branch(raw, at, class == 5, fixup),
    }
}

const MEM: u8 = 0x60;
const UNUSED: &str = "its unused fields are not zero";
const UNKNOWN: &str = "no such instruction";
const V4: &str = "an instruction of cpu v4: compile with -mcpu=v3";

fn store(raw: &Raw, value: Operand) -> Op {
    Op::Store { bytes: raw.bytes(), base: raw.dst, offset: raw.off, value }
}

fn packet(raw: &Raw) -> Result<Op, String> {
    let bytes = raw.bytes();
    let indirect = match raw.mode() {
        0x20 if raw.src == 0 => false,
        0x40 => true,
        0x20 => return Err(UNUSED.into()),
        _ => return Err(UNKNOWN.into()),
    };
    if bytes == 8 || raw.dst != 0 || raw.off != 0 {
        return Err(if bytes == 8 { UNKNOWN } else { UNUSED }.into());
    }
    if !indirect && raw.imm < 0 {
        return Err("a stream of messages has no link or network header to read relative to".into());
    }
    Ok(Op::Packet { bytes, index: indirect.then_some(raw.src), offset: raw.imm })
}

fn arithmetic(raw: &Raw, wide: bool) -> Result<Op, String> {
    let (operand, clean) = raw.operand();
    let dst = raw.dst;
    match raw.code & 0xf0 {
        0x80 if raw.code & 8 == 0 && raw.src == 0 && raw.off == 0 && raw.imm == 0 => {
            return Ok(Op::Negate { wide, dst });
        }
        0x80 => return Err(UNUSED.into()),
        0xd0 if wide => return Err(V4.into()),
        0xd0 => {
            let bits = u8::try_from(raw.imm).ok().filter(|bits| matches!(bits, 16 | 32 | 64));
            let bits = bits.ok_or_else(|| format!("there is no byte swap of {} bits", raw.imm))?;
            if raw.src != 0 || raw.off != 0 {
                return Err(UNUSED.into());
            }
            return Ok(Op::Swap { big: raw.code & 8 != 0, bits, dst });
        }
        _ => {}
    }
    let kind = Alu::from_code(raw.code).ok_or(UNKNOWN)?;
    if raw.off != 0 {
        return Err(if matches!(kind, Alu::Mov | Alu::Div | Alu::Mod) { V4 } else { UNUSED }.into());
    }
    if !clean {
        return Err(UNUSED.into());
    }
    match (kind, operand) {
        (Alu::Div | Alu::Mod, Operand::Immediate(0)) => return Err("divides by zero".into()),
        (Alu::Lsh | Alu::Rsh | Alu::Arsh, Operand::Immediate(shift))
            if !(0..if wide { 64 } else { 32 }).contains(&shift) =>
        {
            return Err(format!("shifts by {shift} bits"));
        }
        _ => {}
    }
    Ok(Op::Alu { wide, kind, dst, operand })
}

fn branch(raw: &Raw, at: usize, wide: bool, fixup: Option<Fixup>) -> Result<Op, String> {
    let (right, clean) = raw.operand();
    // A target before the function wraps to one behind its end, which the caller finds.
    let to = (at as i64 + 1 + i64::from(raw.off)) as u32;
    match (raw.code & 0xf0, wide) {
        (0x00, true) if raw.code == 0x05 && raw.dst == 0 && raw.src == 0 && raw.imm == 0 => Ok(Op::Jump { to }),
        (0x00, true) => Err(UNUSED.into()),
        (0x00, false) => Err(V4.into()),
        (0x80, true) => call(raw, fixup),
        (0x90, true) if raw.code == 0x95 && raw.dst == 0 && raw.src == 0 && raw.off == 0 && raw.imm == 0 => {
            Ok(Op::Exit)
        }
        (0x90, true) => Err(UNUSED.into()),
        _ => {
            let test = Test::from_code(raw.code).ok_or(UNKNOWN)?;
            if !clean {
                return Err(UNUSED.into());
            }
            Ok(Op::Branch { wide, test, left: raw.dst, right, to })
        }
    }
}

fn call(raw: &Raw, fixup: Option<Fixup>) -> Result<Op, String> {
    if raw.code != 0x85 {
        return Err(UNKNOWN.into());
    }
    if raw.dst != 0 || raw.off != 0 {
        return Err(UNUSED.into());
    }
    match (raw.src, fixup, raw.imm) {
        (PSEUDO_CALL, Some(Fixup::Call(function)), _) => Ok(Op::Call { to: function as u32 }),
        (PSEUDO_CALL, ..) => Err("calls something that is not a function of the program".into()),
        (0, None, 26) => Ok(Op::Helper(Helper::LoadBytes)),
        (0, None, 113) => Ok(Op::Helper(Helper::ProbeReadKernel)),
        (0, None, number) => Err(format!(
            "helper {number}{} does not exist in user space: read the message with bpf_skb_load_bytes (26)",
            helper_name(number)
        )),
        _ => Err("calls a kernel function".into()),
    }
}

/// The register an instruction writes, for the check that none writes the frame pointer.
fn written(op: &Op) -> Option<u8> {
    match op {
        Op::Alu { dst, .. } | Op::Negate { dst, .. } | Op::Swap { dst, .. } | Op::Load { dst, .. } => Some(*dst),
        _ => None,
    }
}

/// Names the instruction for a person who knows the C source.
fn name(raw: &Raw) -> String {
    let mut name = match (raw.class(), raw.mode()) {
        _ if raw.is_load_imm64() => "64-bit immediate",
        (0, 0x20) => "LD_ABS",
        (0, 0x40) => "LD_IND",
        (1, 0x80) => "sign-extending load",
        (1, _) => "load",
        (3, 0xc0) => "atomic operation",
        (2 | 3, _) => "store",
        (4 | 7, _) => match raw.code & 0xf0 {
            0x30 | 0x90 if raw.off != 0 => "signed division",
            0x30 | 0x90 => "division",
            0x60 | 0x70 | 0xc0 => "shift",
            0xb0 if raw.off != 0 => "sign-extending move",
            0xd0 => "byte swap",
            _ => "arithmetic",
        },
        (5, _) if raw.code & 0xf0 == 0x80 => "call",
        (5, _) if raw.code & 0xf0 == 0x90 => "exit",
        (5 | 6, _) => "jump",
        _ => "instruction",
    }
    .to_owned();
    write!(name, " 0x{:02x}", raw.code).expect("writing to a string");
    name
}

/// Names of helpers that people reach for, to be recognised in an error message.
fn helper_name(number: i32) -> &'static str {
    match number {
        1 => " (bpf_map_lookup_elem)",
        2 => " (bpf_map_update_elem)",
        3 => " (bpf_map_delete_elem)",
        4 => " (bpf_probe_read)",
        5 => " (bpf_ktime_get_ns)",
        6 => " (bpf_trace_printk)",
        7 => " (bpf_get_prandom_u32)",
        8 => " (bpf_get_smp_processor_id)",
        9 => " (bpf_skb_store_bytes)",
        12 => " (bpf_tail_call)",
        39 => " (bpf_skb_pull_data)",
        46 => " (bpf_get_socket_cookie)",
        68 => " (bpf_skb_load_bytes_relative)",
        112 => " (bpf_probe_read_user)",
        181 => " (bpf_loop)",
        _ => "",
    }
}
