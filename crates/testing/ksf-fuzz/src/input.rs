//! Choices made from the first bytes of a fuzz input.

use ksf::framing::{Delimiter, Endian, Framing, LengthPrefix};

/// Takes choices from the front of the input. An input that ends gives zeros, so
/// that every input means something.
pub(crate) struct Choices<'a> {
    rest: &'a [u8],
}

impl<'a> Choices<'a> {
    pub(crate) const fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    pub(crate) fn byte(&mut self) -> u8 {
        match self.rest.split_first() {
            Some((first, rest)) => {
                self.rest = rest;
                *first
            }
            None => 0,
        }
    }

    /// Up to 255 bytes, as many as the next byte says.
    pub(crate) fn bytes(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()).min(self.rest.len());
        let (bytes, rest) = self.rest.split_at(length);
        self.rest = rest;
        bytes
    }

    /// One of the framings that [`Framing::validate`] accepts.
    pub(crate) fn framing(&mut self) -> Framing {
        loop {
            let framing = match self.byte() % 8 {
                0 => Framing::Raw,
                1 | 2 => Framing::RecordMark,
                3..=5 => self.length_prefix(),
                _ => self.delimiter(),
            };
            if let Ok(framing) = framing.validate() {
                return framing;
            }
        }
    }

    /// Everything not taken yet.
    pub(crate) const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    fn length_prefix(&mut self) -> Framing {
        let [shape, offset, adjust] = [self.byte(), self.byte(), self.byte()];
        Framing::LengthPrefix(LengthPrefix {
            offset: offset % 9,
            width: 1 << (shape & 3),
            endian: if shape & 4 == 0 { Endian::Big } else { Endian::Little },
            adjust: i32::from(adjust as i8),
            strip: shape & 8 != 0,
        })
    }

    fn delimiter(&mut self) -> Framing {
        let len = usize::from(self.byte() % 8) + 1;
        // Few different bytes, so that delimiters that overlap themselves are common.
        let bytes: Vec<u8> = (0..len).map(|_| b'a' + self.byte() % 2).collect();
        let delimiter = Delimiter::new(&bytes);
        Framing::Delimiter(delimiter.expect("1 to 8 bytes are a delimiter"))
    }
}

/// Lengths to cut a stream at, from a seed: xorshift (Marsaglia 2003), enough to
/// reach every cut and the same on every machine.
pub(crate) struct Cuts {
    state: u32,
    limit: u32,
}

impl Cuts {
    /// Lengths of 1 to 64 bytes; seed 0 cuts after every byte.
    pub(crate) fn new(seed: u8) -> Self {
        let limit = if seed == 0 { 1 } else { 64 };
        Self { state: u32::from(seed).wrapping_mul(0x9e37_79b1) | 1, limit }
    }

    /// Cuts `stream` into chunks.
    pub(crate) fn cut(mut self, mut stream: &[u8]) -> impl Iterator<Item = &[u8]> {
        std::iter::from_fn(move || {
            if stream.is_empty() {
                return None;
            }
            self.state ^= self.state << 13;
            self.state ^= self.state >> 17;
            self.state ^= self.state << 5;
            let len = (self.state % self.limit + 1) as usize;
            let (chunk, rest) = stream.split_at(len.min(stream.len()));
            stream = rest;
            Some(chunk)
        })
    }
}

/// A name of the file system, mostly one that leads somewhere in [`Exported`](crate::exported::Exported).
pub(crate) fn name(choices: &mut Choices<'_>) -> Vec<u8> {
    const NAMES: [&[u8]; 17] = [
        b"file",
        b"dir",
        b"out",
        b"inner",
        b"new",
        b"newer",
        b".",
        b"..",
        b"",
        b"../outside",
        b"dir/inner",
        b"/",
        b"a\0b",
        b"/etc/passwd",
        b"../outside/file",
        b"\xff\xfe\n",
        b"-",
    ];
    match usize::from(choices.byte()) {
        chosen if chosen < 200 => NAMES[chosen % NAMES.len()].to_vec(),
        200..=210 => vec![b'n'; 255],
        211..=215 => vec![b'n'; 256],
        216..=220 => vec![b'n'; 4096],
        _ => choices.bytes().to_vec(),
    }
}

/// A number, mostly one at a limit.
pub(crate) fn number(choices: &mut Choices<'_>) -> u64 {
    const NUMBERS: [u64; 16] = [
        0,
        1,
        2,
        5,
        9,
        10,
        200,
        512,
        4096,
        1 << 20,
        u32::MAX as u64,
        1 << 40,
        i64::MAX as u64 - 1,
        i64::MAX as u64,
        1 << 63,
        u64::MAX,
    ];
    match usize::from(choices.byte()) {
        chosen if chosen < 224 => NUMBERS[chosen % NUMBERS.len()],
        _ => u64::from_be_bytes(std::array::from_fn(|_| choices.byte())),
    }
}

/// Changes some bytes, or cuts them off, or adds some.
pub(crate) fn damage(choices: &mut Choices<'_>, bytes: &mut Vec<u8>) {
    let how = choices.byte();
    let at = (usize::from(choices.byte()) << 8 | usize::from(choices.byte())) % bytes.len().max(1);
    match how % 4 {
        0 => bytes.truncate(at),
        1 => bytes.extend_from_slice(choices.bytes()),
        _ if bytes.is_empty() => {}
        2 => bytes[at] ^= 1 << (how >> 5),
        _ => bytes[at] = choices.byte(),
    }
}
