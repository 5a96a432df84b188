//! Handles: the names of inodes that clients keep.
//!
//! ```text
//!   byte  0        1..5          5               6..n-16                n-16..n
//!         version  export's id   type of the     bytes of the kernel's  check value: SipHash-2-4 with 128 bits
//!         (1)      (big endian)  kernel's handle handle, 1 to 42        of all before it, with the export's key
//! ```
//!
//! The check value keeps clients from making handles of files that no operation gave them. An export's id and key lie in its
//! state folder, so handles outlive the server; they hold no device number, which changes between starts.

use std::fmt;
use std::hash::{Hash, Hasher};

use const_siphasher::sip128::SipHasher24;

use crate::sys::KernelHandle;

/// Bytes of a handle, at most: what NFSv3 allows (RFC 1813, section 2.4).
pub const HANDLE_BYTES_MAX: usize = 64;

const VERSION: u8 = 1;
const HEAD_BYTES: usize = 6;
const CHECK_BYTES: usize = 16;
const KERNEL_BYTES_MAX: usize = HANDLE_BYTES_MAX - HEAD_BYTES - CHECK_BYTES;

/// The name of an inode, checked.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Handle {
    length: u8,
    /// Zeros behind the end.
    bytes: [u8; HANDLE_BYTES_MAX],
}

impl Handle {
    /// What goes over the wire: 23 to 64 bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// The export that gave it.
    pub fn export_id(&self) -> u32 {
        export_id(self.as_bytes())
    }

    /// `None` if the kernel's handle does not fit.
    pub(crate) fn new(export_id: u32, key: &Key, kernel: &KernelHandle) -> Option<Self> {
        let handle_type = u8::try_from(kernel.handle_type).ok()?;
        let inside = kernel.bytes();
        if inside.is_empty() || inside.len() > KERNEL_BYTES_MAX {
            return None;
        }
        let mut bytes = [0; HANDLE_BYTES_MAX];
        bytes[0] = VERSION;
        bytes[1..5].copy_from_slice(&export_id.to_be_bytes());
        bytes[5] = handle_type;
        let end = HEAD_BYTES + inside.len();
        bytes[HEAD_BYTES..end].copy_from_slice(inside);
        let check = key.check(&bytes[..end]);
        bytes[end..end + CHECK_BYTES].copy_from_slice(&check);
        Some(Self { length: (end + CHECK_BYTES) as u8, bytes })
    }

    /// Which export's key would check these bytes; `None` for bytes that cannot be a handle.
    pub(crate) fn claimed_export(bytes: &[u8]) -> Option<u32> {
        let lengths = HEAD_BYTES + 1 + CHECK_BYTES..=HANDLE_BYTES_MAX;
        (lengths.contains(&bytes.len()) && bytes[0] == VERSION).then(|| export_id(bytes))
    }

    /// `None` if the check value is wrong. The bytes passed [`Handle::claimed_export`].
    pub(crate) fn checked(bytes: &[u8], key: &Key) -> Option<Self> {
        let end = bytes.len().checked_sub(CHECK_BYTES)?;
        let expected = key.check(&bytes[..end]);
        // All bytes are compared, so that the time does not tell how many were right.
        let wrong = expected.iter().zip(&bytes[end..]).fold(0, |wrong, (ours, theirs)| wrong | (ours ^ theirs));
        if wrong != 0 {
            return None;
        }
        let mut all = [0; HANDLE_BYTES_MAX];
        all.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(Self { length: bytes.len() as u8, bytes: all })
    }

    pub(crate) fn kernel(&self) -> Option<KernelHandle> {
        let bytes = self.as_bytes();
        KernelHandle::new(i32::from(bytes[5]), &bytes[HEAD_BYTES..bytes.len() - CHECK_BYTES])
    }

    /// What is the same in all handles of an inode, whichever export gave them: the kernel's handle with its type.
    pub(crate) fn inode_bytes(&self) -> &[u8] {
        let bytes = self.as_bytes();
        &bytes[HEAD_BYTES - 1..bytes.len() - CHECK_BYTES]
    }

    /// A number that is as good as random, for hash maps and locks.
    pub(crate) fn number(&self) -> u64 {
        let bytes = self.as_bytes();
        bytes[bytes.len() - 8..].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

/// The id in bytes that are long enough.
fn export_id(bytes: &[u8]) -> u32 {
    bytes[1..5].iter().fold(0, |id, byte| id << 8 | u32::from(*byte))
}

impl Hash for Handle {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The check value depends on all bytes, and only the server can choose it.
        state.write_u64(self.number());
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the check value: a log must not be a way to make handles.
        let shown = &self.as_bytes()[..self.as_bytes().len() - CHECK_BYTES];
        f.write_str("Handle(")?;
        shown.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

/// What an export's handles are checked with. Not shown by `Debug`.
#[derive(Clone)]
pub(crate) struct Key(pub(crate) [u8; 16]);

impl Key {
    pub(crate) fn check(&self, bytes: &[u8]) -> [u8; CHECK_BYTES] {
        SipHasher24::new_with_key(&self.0).hash(bytes).as_bytes()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key(std::array::from_fn(|at| at as u8))
    }

    /// The first two of the 128-bit vectors of SipHash's authors: key 00 to 0f, messages of no byte and of 00.
    #[test]
    fn the_check_value_is_siphash_2_4_with_128_bits() {
        let none = [0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93];
        let zero = [0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc, 0x45];
        assert_eq!(key().check(&[]), none);
        assert_eq!(key().check(&[0]), zero);
    }

    #[test]
    fn handles_of_every_length_come_back() {
        for length in 1..=KERNEL_BYTES_MAX {
            let inside: Vec<u8> = (0..length as u8).collect();
            let kernel = KernelHandle::new(0x81, &inside).unwrap();
            let handle = Handle::new(0xfeed_0001, &key(), &kernel).unwrap();
            let bytes = handle.as_bytes();
            assert!(bytes.len() <= HANDLE_BYTES_MAX);
            assert_eq!(Handle::claimed_export(bytes), Some(0xfeed_0001));
            let again = Handle::checked(bytes, &key()).unwrap();
            assert_eq!((&again, again.export_id(), again.kernel()), (&handle, 0xfeed_0001, Some(kernel)));
        }
        let too_long = KernelHandle::new(1, &[7; KERNEL_BYTES_MAX + 1]).unwrap();
        assert!(Handle::new(1, &key(), &too_long).is_none());
        assert!(Handle::new(1, &key(), &KernelHandle::new(0x1_0001, &[7; 8]).unwrap()).is_none());
        assert!(KernelHandle::new(1, &[0; 129]).is_none());
    }

    #[test]
    fn no_bit_may_be_changed_and_no_byte_added_or_cut() {
        let handle = Handle::new(7, &key(), &KernelHandle::new(1, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap()).unwrap();
        let bytes = handle.as_bytes();
        for bit in 0..bytes.len() * 8 {
            let mut forged = bytes.to_vec();
            forged[bit / 8] ^= 1 << (bit % 8);
            let passed = Handle::claimed_export(&forged).and_then(|_| Handle::checked(&forged, &key()));
            assert_eq!(passed, None, "bit {bit}");
        }
        for length in (0..bytes.len()).chain(bytes.len() + 1..80) {
            let mut other = bytes.to_vec();
            other.resize(length, 0);
            assert_eq!(Handle::claimed_export(&other).and_then(|_| Handle::checked(&other, &key())), None);
        }
        assert_eq!(Handle::checked(bytes, &Key([9; 16])), None, "the key of another export");
        assert!(!format!("{handle:?}").contains(&format!(
            "{:02x}{:02x}",
            bytes[bytes.len() - 2],
            bytes[bytes.len() - 1]
        )));
    }
}
