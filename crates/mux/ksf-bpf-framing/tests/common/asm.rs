//! Encoded instructions (RFC 9669). Opcodes are written as numbers, so that a wrong decoder finds no accomplice here.

/// One slot.
pub(crate) fn op(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Vec<u8> {
    let registers = if cfg!(target_endian = "little") { src << 4 | dst } else { dst << 4 | src };
    let mut slot = vec![code, registers];
    slot.extend(off.to_ne_bytes());
    slot.extend(imm.to_ne_bytes());
    slot
}

/// dst = imm
pub(crate) fn mov(dst: u8, imm: i32) -> Vec<u8> {
    op(0xb7, dst, 0, 0, imm)
}

/// dst = src
pub(crate) fn mov_reg(dst: u8, src: u8) -> Vec<u8> {
    op(0xbf, dst, src, 0, 0)
}

/// dst += imm
pub(crate) fn add(dst: u8, imm: i32) -> Vec<u8> {
    op(0x07, dst, 0, 0, imm)
}

/// dst = imm, 64 bits
pub(crate) fn mov64(dst: u8, imm: u64) -> Vec<u8> {
    [op(0x18, dst, 0, 0, imm as i32), op(0, 0, 0, 0, (imm >> 32) as i32)].concat()
}

/// A helper of the kernel.
pub(crate) fn call(helper: i32) -> Vec<u8> {
    op(0x85, 0, 0, 0, helper)
}

pub(crate) fn exit() -> Vec<u8> {
    op(0x95, 0, 0, 0, 0)
}

/// bpf_skb_load_bytes(r6, offset, r10 + to, len)
pub(crate) fn load_bytes(offset: i32, to: i32, len: i32) -> Vec<u8> {
    [mov_reg(1, 6), mov(2, offset), mov_reg(3, 10), add(3, to), mov(4, len), call(26)].concat()
}
