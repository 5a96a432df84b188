//! Writing XDR items behind each other.

use super::padding_bytes;

/// Something that XDR items are appended to. Implement [`XdrWrite::put`]; the rest follows.
///
/// Writing cannot fail: limits belong to the protocol that chooses what to
/// write, and the one place that can run out (a buffer of fixed size) should be
/// checked once, not per item.
pub trait XdrWrite {
    /// Appends bytes as they are. Callers keep the total a multiple of four.
    fn put(&mut self, bytes: &[u8]);

    /// Unsigned integer of 32 bits (RFC 4506 section 4.2).
    #[inline]
    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_be_bytes());
    }

    /// Signed integer of 32 bits (section 4.1).
    #[inline]
    fn put_i32(&mut self, value: i32) {
        self.put(&value.to_be_bytes());
    }

    /// Unsigned hyper integer of 64 bits (section 4.5).
    #[inline]
    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_be_bytes());
    }

    /// Signed hyper integer of 64 bits (section 4.5).
    #[inline]
    fn put_i64(&mut self, value: i64) {
        self.put(&value.to_be_bytes());
    }

    /// Boolean (section 4.4).
    #[inline]
    fn put_bool(&mut self, value: bool) {
        self.put_u32(u32::from(value));
    }

    /// Opaque data of a length both sides know, and its fill bytes (section 4.9).
    #[inline]
    fn put_opaque_fixed(&mut self, bytes: &[u8]) {
        self.put(bytes);
        self.put(&[0; 3][..padding_bytes(bytes.len())]);
    }

    /// Opaque data of variable length (section 4.10), or a string (section 4.11).
    ///
    /// # Panics
    ///
    /// If `bytes` is 4 GiB long or more, which XDR cannot express.
    #[inline]
    fn put_opaque(&mut self, bytes: &[u8]) {
        self.put_len(bytes.len());
        self.put_opaque_fixed(bytes);
    }

    /// Array of variable length (section 4.13), each element written by `element`.
    ///
    /// # Panics
    ///
    /// If there are 2^32 elements or more, which XDR cannot express.
    fn put_array<T>(&mut self, items: &[T], mut element: impl FnMut(&mut Self, &T))
    where
        Self: Sized,
    {
        self.put_len(items.len());
        for item in items {
            element(self, item);
        }
    }

    /// Optional item (section 4.19), written by `item` if there is one.
    fn put_option<T>(&mut self, value: Option<T>, item: impl FnOnce(&mut Self, T))
    where
        Self: Sized,
    {
        self.put_bool(value.is_some());
        if let Some(value) = value {
            item(self, value);
        }
    }

    /// Length of opaque data or count of an array.
    ///
    /// # Panics
    ///
    /// If `len` does not fit in 32 bits.
    #[inline]
    fn put_len(&mut self, len: usize) {
        self.put_u32(u32::try_from(len).expect("XDR lengths have 32 bits"));
    }
}

impl XdrWrite for Vec<u8> {
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

impl<W: XdrWrite + ?Sized> XdrWrite for &mut W {
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        (**self).put(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_each_type_as_the_rfc_draws_it() {
        let mut out = Vec::new();
        out.put_i32(-1);
        out.put_u32(0x8000_0001);
        out.put_i64(-2);
        out.put_u64(0x0102_0304_0506_0708);
        out.put_bool(true);
        out.put_opaque(b"hello");
        out.put_opaque_fixed(&[0xaa, 0xbb]);
        out.put_array(&[7, 8], |w, &v| w.put_u32(v));
        out.put_option(Some(9), |w, v| w.put_u32(v));
        out.put_option(None::<u32>, |w, v| w.put_u32(v));
        let expected: &[u8] = &[
            0xff, 0xff, 0xff, 0xff, 0x80, 0, 0, 1, // i32, u32
            0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, // i64
            1, 2, 3, 4, 5, 6, 7, 8, // u64
            0, 0, 0, 1, // bool
            0, 0, 0, 5, b'h', b'e', b'l', b'l', b'o', 0, 0, 0, // opaque<>
            0xaa, 0xbb, 0, 0, // opaque[2]
            0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 8, // array
            0, 0, 0, 1, 0, 0, 0, 9, // some
            0, 0, 0, 0, // none
        ];
        assert_eq!(out, expected);
    }

    #[test]
    fn fill_bytes_round_up_to_four() {
        for (len, whole) in [(0, 0), (1, 4), (2, 4), (3, 4), (4, 4), (5, 8)] {
            let mut out = Vec::new();
            out.put_opaque_fixed(&vec![1; len]);
            assert_eq!(out.len(), whole, "opaque[{len}]");
        }
    }
}
