//! Fields of messages: reading with all lengths checked, and writing.

/// Names that one Twalk has at most (P9_MAXWELEM).
pub const WALK_NAMES_MAX: usize = 16;

/// Why bytes are no message. Offsets count from the start of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum P9Error {
    /// The message ends inside of a field.
    #[error("a field at offset {offset} needs {needed} bytes and {left} are left")]
    Truncated {
        /// Where the field begins.
        offset: usize,
        /// Bytes that it needs.
        needed: usize,
        /// Bytes that the message still has.
        left: usize,
    },
    /// The size in the message is not its length.
    #[error("the message says that it has {said} bytes and has {found}")]
    Size {
        /// As it is in the message.
        said: u32,
        /// Bytes that there are.
        found: usize,
    },
    /// Bytes follow the last field.
    #[error("{left} bytes follow the last field, from offset {offset}")]
    Trailing {
        /// Where they begin.
        offset: usize,
        /// How many there are.
        left: usize,
    },
    /// No message of this direction has this type.
    #[error("{kind} is no type of a message that may come here")]
    Kind {
        /// The type.
        kind: u8,
    },
    /// A list has more elements than it may have.
    #[error("a list at offset {offset} has {count} elements, of at most 16")]
    TooMany {
        /// Where the list begins.
        offset: usize,
        /// The count in the message.
        count: u16,
    },
    /// A value is too long for the field that it is written to.
    #[error("{bytes} bytes do not fit into a field of {limit}")]
    TooLong {
        /// Bytes of the value.
        bytes: usize,
        /// Bytes that fit.
        limit: usize,
    },
}

/// A position in a message.
#[derive(Clone, Debug)]
pub(crate) struct Reader<'a> {
    message: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(message: &'a [u8]) -> Self {
        Self { message, offset: 0 }
    }

    pub(crate) fn bytes(&mut self, needed: usize) -> Result<&'a [u8], P9Error> {
        let rest = &self.message[self.offset..];
        let taken = rest.get(..needed).ok_or(P9Error::Truncated { offset: self.offset, needed, left: rest.len() })?;
        self.offset += needed;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], P9Error> {
        let offset = self.offset;
        let taken = self.bytes(N)?;
        taken.try_into().map_err(|_| P9Error::Truncated { offset, needed: N, left: taken.len() })
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.offset == self.message.len()
    }

    pub(crate) fn finish(self) -> Result<(), P9Error> {
        match self.message.len() - self.offset {
            0 => Ok(()),
            left => Err(P9Error::Trailing { offset: self.offset, left }),
        }
    }
}

/// What a message is made of.
pub(crate) trait Field<'a>: Sized {
    fn take(reader: &mut Reader<'a>) -> Result<Self, P9Error>;
    fn put(&self, out: &mut Vec<u8>) -> Result<(), P9Error>;
}

macro_rules! numbers {
    ($($type:ty),+) => {
        $(impl<'a> Field<'a> for $type {
            fn take(reader: &mut Reader<'a>) -> Result<Self, P9Error> {
                reader.array().map(Self::from_le_bytes)
            }

            fn put(&self, out: &mut Vec<u8>) -> Result<(), P9Error> {
                out.extend_from_slice(&self.to_le_bytes());
                Ok(())
            }
        })+
    };
}

numbers!(u8, u16, u32, u64);

/// A string.
impl<'a> Field<'a> for &'a [u8] {
    fn take(reader: &mut Reader<'a>) -> Result<Self, P9Error> {
        let length = u16::take(reader)?;
        reader.bytes(length.into())
    }

    fn put(&self, out: &mut Vec<u8>) -> Result<(), P9Error> {
        let limit = usize::from(u16::MAX);
        let length = u16::try_from(self.len()).map_err(|_| P9Error::TooLong { bytes: self.len(), limit })?;
        length.put(out)?;
        out.extend_from_slice(self);
        Ok(())
    }
}

/// Bytes with a length of four bytes in front of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Data<'a>(pub &'a [u8]);

impl<'a> Field<'a> for Data<'a> {
    fn take(reader: &mut Reader<'a>) -> Result<Self, P9Error> {
        let length = u32::take(reader)?;
        reader.bytes(length as usize).map(Self)
    }

    fn put(&self, out: &mut Vec<u8>) -> Result<(), P9Error> {
        let (bytes, limit) = (self.0.len(), u32::MAX as usize);
        u32::try_from(bytes).map_err(|_| P9Error::TooLong { bytes, limit })?.put(out)?;
        out.extend_from_slice(self.0);
        Ok(())
    }
}

macro_rules! list {
    ($(#[$doc:meta])* $name:ident of $element:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name<'a> {
            /// The elements as they are in the message, checked.
            bytes: &'a [u8],
            count: u16,
        }

        impl<'a> $name<'a> {
            /// Writes a list to `buffer`, which is emptied first.
            ///
            /// # Errors
            ///
            /// [`P9Error::TooMany`], [`P9Error::TooLong`]: it cannot be in a message.
            pub fn of(elements: &[$element], buffer: &'a mut Vec<u8>) -> Result<Self, P9Error> {
                let count = u16::try_from(elements.len()).unwrap_or(u16::MAX);
                if elements.len() > WALK_NAMES_MAX {
                    return Err(P9Error::TooMany { offset: 0, count });
                }
                buffer.clear();
                elements.iter().try_for_each(|element| element.put(buffer))?;
                Ok(Self { bytes: buffer, count })
            }

            /// How many elements it has: at most 16.
            pub fn len(&self) -> usize {
                self.count.into()
            }

            /// True if it has none.
            pub fn is_empty(&self) -> bool {
                self.count == 0
            }

            /// The elements.
            pub fn iter(&self) -> impl Iterator<Item = $element> + use<'a> {
                let mut reader = Reader::new(self.bytes);
                // They were read once.
                (0..self.count).map_while(move |_| Field::take(&mut reader).ok())
            }
        }

        impl<'a> Field<'a> for $name<'a> {
            fn take(reader: &mut Reader<'a>) -> Result<Self, P9Error> {
                let offset = reader.offset;
                let count = u16::take(reader)?;
                if usize::from(count) > WALK_NAMES_MAX {
                    return Err(P9Error::TooMany { offset, count });
                }
                let start = reader.offset;
                (0..count).try_for_each(|_| <$element>::take(reader).map(drop))?;
                Ok(Self { bytes: &reader.message[start..reader.offset], count })
            }

            fn put(&self, out: &mut Vec<u8>) -> Result<(), P9Error> {
                self.count.put(out)?;
                out.extend_from_slice(self.bytes);
                Ok(())
            }
        }
    };
}

list! {
    /// The names of a Twalk.
    Names of &'a [u8]
}

list! {
    /// The objects of an Rwalk.
    Qids of super::Qid
}
