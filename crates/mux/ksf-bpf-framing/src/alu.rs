//! Arithmetic and comparison, on 64 bits or on the lower 32 (RFC 9669, sections 4.1 and 4.3).

/// The operations with two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Alu {
    Add,
    Sub,
    Mul,
    Div,
    Or,
    And,
    Lsh,
    Rsh,
    Mod,
    Xor,
    Mov,
    Arsh,
}

impl Alu {
    pub(crate) const fn from_code(code: u8) -> Option<Self> {
        Some(match code & 0xf0 {
            0x00 => Self::Add,
            0x10 => Self::Sub,
            0x20 => Self::Mul,
            0x30 => Self::Div,
            0x40 => Self::Or,
            0x50 => Self::And,
            0x60 => Self::Lsh,
            0x70 => Self::Rsh,
            0x90 => Self::Mod,
            0xa0 => Self::Xor,
            0xb0 => Self::Mov,
            0xc0 => Self::Arsh,
            _ => return None,
        })
    }

    /// 64 bits. A division by zero gives 0, a remainder by zero the dividend; shifts count modulo the width.
    pub(crate) const fn wide(self, left: u64, right: u64) -> u64 {
        match self {
            Self::Add => left.wrapping_add(right),
            Self::Sub => left.wrapping_sub(right),
            Self::Mul => left.wrapping_mul(right),
            Self::Div => match left.checked_div(right) {
                Some(quotient) => quotient,
                None => 0,
            },
            Self::Mod => match left.checked_rem(right) {
                Some(rest) => rest,
                None => left,
            },
            Self::Or => left | right,
            Self::And => left & right,
            Self::Xor => left ^ right,
            Self::Mov => right,
            Self::Lsh => left.wrapping_shl(right as u32),
            Self::Rsh => left.wrapping_shr(right as u32),
            Self::Arsh => (left as i64).wrapping_shr(right as u32) as u64,
        }
    }

    /// The lower 32 bits, extended with zeros.
    pub(crate) const fn narrow(self, left: u64, right: u64) -> u64 {
        let (left, right) = (left as u32, right as u32);
        let result = match self {
            Self::Lsh => left.wrapping_shl(right),
            Self::Rsh => left.wrapping_shr(right),
            Self::Arsh => (left as i32).wrapping_shr(right) as u32,
            // The others give the same lower half when both operands are extended with zeros.
            _ => self.wide(left as u64, right as u64) as u32,
        };
        result as u64
    }
}

/// The comparisons of conditional jumps.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Test {
    Eq,
    Ne,
    Gt,
    Ge,
    Lt,
    Le,
    Set,
    SignedGt,
    SignedGe,
    SignedLt,
    SignedLe,
}

impl Test {
    pub(crate) const fn from_code(code: u8) -> Option<Self> {
        Some(match code & 0xf0 {
            0x10 => Self::Eq,
            0x20 => Self::Gt,
            0x30 => Self::Ge,
            0x40 => Self::Set,
            0x50 => Self::Ne,
            0x60 => Self::SignedGt,
            0x70 => Self::SignedGe,
            0xa0 => Self::Lt,
            0xb0 => Self::Le,
            0xc0 => Self::SignedLt,
            0xd0 => Self::SignedLe,
            _ => return None,
        })
    }

    pub(crate) const fn wide(self, left: u64, right: u64) -> bool {
        let (signed_left, signed_right) = (left as i64, right as i64);
        match self {
            Self::Eq => left == right,
            Self::Ne => left != right,
            Self::Gt => left > right,
            Self::Ge => left >= right,
            Self::Lt => left < right,
            Self::Le => left <= right,
            Self::Set => left & right != 0,
            Self::SignedGt => signed_left > signed_right,
            Self::SignedGe => signed_left >= signed_right,
            Self::SignedLt => signed_left < signed_right,
            Self::SignedLe => signed_left <= signed_right,
        }
    }

    pub(crate) const fn narrow(self, left: u64, right: u64) -> bool {
        // Sign extension of both keeps either order.
        self.wide(left as i32 as u64, right as i32 as u64)
    }
}

/// The lower `bits` of `value` in big or little byte order, extended with zeros.
pub(crate) const fn swap(value: u64, big: bool, bits: u8) -> u64 {
    match (bits, big) {
        (16, true) => (value as u16).to_be() as u64,
        (16, false) => (value as u16).to_le() as u64,
        (32, true) => (value as u32).to_be() as u64,
        (32, false) => (value as u32).to_le() as u64,
        (_, true) => value.to_be(),
        (_, false) => value.to_le(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_by_zero_is_defined() {
        assert_eq!(Alu::Div.wide(7, 0), 0);
        assert_eq!(Alu::Mod.wide(7, 0), 7);
        assert_eq!(Alu::Div.narrow(u64::MAX, 1 << 32), 0);
        assert_eq!(Alu::Mod.narrow(u64::MAX, 1 << 32), 0xffff_ffff);
    }

    #[test]
    fn the_narrow_form_clears_the_upper_half() {
        assert_eq!(Alu::Add.narrow(0xffff_ffff, 1), 0);
        assert_eq!(Alu::Arsh.narrow(0x8000_0000, 31), 0xffff_ffff);
        assert_eq!(Alu::Rsh.narrow(1 << 32 | 8, 35), 1);
        assert_eq!(Alu::Sub.narrow(0, 1), 0xffff_ffff);
    }

    #[test]
    fn comparisons_know_their_width_and_sign() {
        assert!(Test::Eq.narrow(1 << 32, 0));
        assert!(!Test::Eq.wide(1 << 32, 0));
        assert!(Test::SignedLt.narrow(0xffff_ffff, 0));
        assert!(!Test::SignedLt.wide(0xffff_ffff, 0));
        assert!(Test::Gt.narrow(0xffff_ffff, 1));
        assert!(Test::Set.wide(6, 4) && !Test::Set.wide(6, 1));
    }

    #[test]
    fn swaps_cut_to_their_width() {
        assert_eq!(swap(0x1122_3344_5566_7788, true, 16), u64::from(0x7788_u16.to_be()));
        assert_eq!(swap(0x1122_3344_5566_7788, false, 32), u64::from(0x5566_7788_u32.to_le()));
        assert_eq!(swap(0x1122_3344_5566_7788, true, 64), 0x1122_3344_5566_7788_u64.to_be());
    }
}
