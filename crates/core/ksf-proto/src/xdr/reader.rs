//! Reading XDR items from a borrowed buffer.

use super::{UNIT_BYTES, XdrError, padding_bytes};

/// A cursor over XDR items in a borrowed buffer.
///
/// After an error the position is unspecified; give the reader up.
#[derive(Clone, Debug)]
pub struct XdrReader<'a> {
    data: &'a [u8],
    offset: usize,
}

impl<'a> XdrReader<'a> {
    /// Starts at the first byte of `data`.
    #[inline]
    pub const fn new(data: &'a [u8]) -> Self {
        Self { data, offset: 0 }
    }

    /// Bytes read so far.
    #[inline]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// The bytes not yet read.
    #[inline]
    pub fn rest(&self) -> &'a [u8] {
        &self.data[self.offset..]
    }

    /// Unsigned integer of 32 bits (RFC 4506 section 4.2).
    #[inline]
    pub fn u32(&mut self) -> Result<u32, XdrError> {
        self.chunk().map(u32::from_be_bytes)
    }

    /// Signed integer of 32 bits (section 4.1).
    #[inline]
    pub fn i32(&mut self) -> Result<i32, XdrError> {
        self.chunk().map(i32::from_be_bytes)
    }

    /// Unsigned hyper integer of 64 bits (section 4.5).
    #[inline]
    pub fn u64(&mut self) -> Result<u64, XdrError> {
        self.chunk().map(u64::from_be_bytes)
    }

    /// Signed hyper integer of 64 bits (section 4.5).
    #[inline]
    pub fn i64(&mut self) -> Result<i64, XdrError> {
        self.chunk().map(i64::from_be_bytes)
    }

    /// Boolean (section 4.4): 0 or 1, anything else is [`XdrError::Value`].
    #[inline]
    pub fn bool(&mut self) -> Result<bool, XdrError> {
        let offset = self.offset;
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(XdrError::Value { offset, value, kind: "bool" }),
        }
    }

    /// Opaque data of a fixed length in bytes, and its fill bytes (section 4.9).
    #[inline]
    pub fn opaque_fixed(&mut self, len: usize) -> Result<&'a [u8], XdrError> {
        let offset = self.offset;
        let rest = self.rest();
        let fill = padding_bytes(len);
        // checked: `len` may be near usize::MAX where usize has 32 bits.
        let whole = len.checked_add(fill).and_then(|n| rest.get(..n));
        let Some(whole) = whole else {
            return Err(XdrError::Truncated { offset, needed: len.saturating_add(fill), left: rest.len() });
        };
        let (body, zeros) = whole.split_at(len);
        if zeros.iter().any(|&b| b != 0) {
            return Err(XdrError::Padding { offset: offset + len });
        }
        self.offset += whole.len();
        Ok(body)
    }

    /// Opaque data of variable length (section 4.10), at most `limit_bytes` long.
    #[inline]
    pub fn opaque(&mut self, limit_bytes: u32) -> Result<&'a [u8], XdrError> {
        let len = self.len(limit_bytes)?;
        self.opaque_fixed(len)
    }

    /// String (section 4.11), at most `limit_bytes` long, as the bytes that were sent.
    ///
    /// The RFC says ASCII, but file and host names in the field are any bytes;
    /// [`XdrReader::utf8`] is there for those that have to be text.
    #[inline]
    pub fn string(&mut self, limit_bytes: u32) -> Result<&'a [u8], XdrError> {
        self.opaque(limit_bytes)
    }

    /// String that has to be UTF-8, at most `limit_bytes` long.
    pub fn utf8(&mut self, limit_bytes: u32) -> Result<&'a str, XdrError> {
        let offset = self.offset + UNIT_BYTES;
        let bytes = self.opaque(limit_bytes)?;
        std::str::from_utf8(bytes).map_err(|_| XdrError::Utf8 { offset })
    }

    /// Count of a variable-length array (section 4.13), at most `limit`.
    ///
    /// The elements follow; allocate for them only as they are read, since the
    /// count is what the peer claims.
    #[inline]
    pub fn array_len(&mut self, limit: u32) -> Result<u32, XdrError> {
        let offset = self.offset;
        let len = self.u32()?;
        if len > limit {
            return Err(XdrError::TooLong { offset, len, limit });
        }
        Ok(len)
    }

    /// Array of at most `limit` elements, each read by `element`.
    pub fn array<T>(
        &mut self,
        limit: u32,
        mut element: impl FnMut(&mut Self) -> Result<T, XdrError>,
    ) -> Result<Vec<T>, XdrError> {
        let count = self.array_len(limit)? as usize;
        // A count is only believed as far as bytes are there to back it: an
        // element has at least one unit, unless it is void.
        let mut elements = Vec::with_capacity(count.min(self.rest().len() / UNIT_BYTES));
        for _ in 0..count {
            elements.push(element(self)?);
        }
        Ok(elements)
    }

    /// Optional item (section 4.19): a bool, then the item if it is true.
    pub fn option<T>(&mut self, item: impl FnOnce(&mut Self) -> Result<T, XdrError>) -> Result<Option<T>, XdrError> {
        if self.bool()? { item(self).map(Some) } else { Ok(None) }
    }

    /// Ends reading: an error if bytes are left.
    #[inline]
    pub fn finish(self) -> Result<(), XdrError> {
        let left = self.rest().len();
        if left == 0 { Ok(()) } else { Err(XdrError::Trailing { offset: self.offset, left }) }
    }

    /// A length in bytes, held against its limit.
    #[inline]
    fn len(&mut self, limit_bytes: u32) -> Result<usize, XdrError> {
        self.array_len(limit_bytes).map(|len| len as usize)
    }

    #[inline]
    fn chunk<const N: usize>(&mut self) -> Result<[u8; N], XdrError> {
        let rest = self.rest();
        match rest.first_chunk::<N>() {
            Some(chunk) => {
                self.offset += N;
                Ok(*chunk)
            }
            None => Err(XdrError::Truncated { offset: self.offset, needed: N, left: rest.len() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_each_type_at_its_place() {
        let data = [
            0xff, 0xff, 0xff, 0xff, // i32 -1
            0x80, 0x00, 0x00, 0x01, // u32
            0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, // i64 -2
            0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, // u64
            0, 0, 0, 1, // bool
            0, 0, 0, 0, // bool
            0, 0, 0, 5, b'h', b'e', b'l', b'l', b'o', 0, 0, 0, // string
            0xaa, 0xbb, 0, 0, // opaque[2]
        ];
        let mut r = XdrReader::new(&data);
        assert_eq!(r.i32(), Ok(-1));
        assert_eq!(r.u32(), Ok(0x8000_0001));
        assert_eq!(r.i64(), Ok(-2));
        assert_eq!(r.u64(), Ok(0x0102_0304_0506_0708));
        assert_eq!(r.bool(), Ok(true));
        assert_eq!(r.bool(), Ok(false));
        assert_eq!(r.utf8(5), Ok("hello"));
        assert_eq!(r.opaque_fixed(2), Ok(&[0xaa, 0xbb][..]));
        assert_eq!(r.offset(), data.len());
        assert_eq!(r.finish(), Ok(()));
    }

    #[test]
    fn refuses_what_the_rfc_does_not_allow() {
        assert_eq!(XdrReader::new(&[0, 0, 0, 2]).bool(), Err(XdrError::Value { offset: 0, value: 2, kind: "bool" }));
        assert_eq!(XdrReader::new(&[0, 0, 0]).u32(), Err(XdrError::Truncated { offset: 0, needed: 4, left: 3 }));
        // Fill bytes: not zero, and missing.
        assert_eq!(XdrReader::new(&[0, 0, 0, 1, b'a', 0, 1, 0]).opaque(9), Err(XdrError::Padding { offset: 5 }));
        assert_eq!(
            XdrReader::new(&[0, 0, 0, 1, b'a', 0, 0]).opaque(9),
            Err(XdrError::Truncated { offset: 4, needed: 4, left: 3 })
        );
        assert_eq!(
            XdrReader::new(&[0, 0, 0, 3, b'a', b'b', b'c', 0]).opaque(2),
            Err(XdrError::TooLong { offset: 0, len: 3, limit: 2 })
        );
        assert_eq!(XdrReader::new(&[0, 0, 0, 1, 0xff, 0, 0, 0]).utf8(4), Err(XdrError::Utf8 { offset: 4 }));
        assert_eq!(XdrReader::new(&[1]).finish(), Err(XdrError::Trailing { offset: 0, left: 1 }));
    }

    #[test]
    fn a_length_near_the_top_of_the_range_is_truncated_not_wrapped() {
        let data = [0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4];
        assert!(matches!(XdrReader::new(&data).opaque(u32::MAX), Err(XdrError::Truncated { offset: 4, left: 4, .. })));
        assert!(matches!(XdrReader::new(&data).opaque_fixed(usize::MAX), Err(XdrError::Truncated { .. })));
    }

    #[test]
    fn a_claimed_count_does_not_allocate() {
        let mut r = XdrReader::new(&[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 7]);
        let read = r.array(u32::MAX, XdrReader::u32);
        assert!(matches!(read, Err(XdrError::Truncated { offset: 8, .. })));
    }

    #[test]
    fn arrays_and_options() {
        let data = [0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0, 0];
        let mut r = XdrReader::new(&data);
        assert_eq!(r.array(2, XdrReader::u32), Ok(vec![7, 8]));
        assert_eq!(r.option(XdrReader::u32), Ok(Some(9)));
        assert_eq!(r.option(XdrReader::u32), Ok(None));
        assert_eq!(r.finish(), Ok(()));
    }
}
