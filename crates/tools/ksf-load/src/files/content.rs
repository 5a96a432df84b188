//! The files of a measurement: names, contents, and the part that each request is about.

use crate::drive::clock::unix_seconds;
use crate::drive::random::mix;

/// Number and length of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) files: usize,
    pub(crate) file_bytes: usize,
}

/// The bytes of all files: each begins at another offset of the same random ones.
#[derive(Debug)]
pub(crate) struct Content {
    bytes: Vec<u8>,
    pub(crate) shape: Shape,
}

/// The file and the offset that a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) file: usize,
    pub(crate) offset: usize,
}

impl Content {
    pub(crate) fn new(shape: Shape) -> Self {
        let words = (shape.file_bytes + 8 * shape.files).div_ceil(8);
        let bytes = (0..words as u64).flat_map(|at| mix(at).to_le_bytes()).collect();
        Self { bytes, shape }
    }

    /// A part of a file.
    pub(crate) fn of(&self, file: usize, offset: usize, count: usize) -> &[u8] {
        &self.bytes[8 * file + offset..][..count]
    }

    /// Draws the subject of the request with this number; `salt` is that of its connection. Offsets are multiples of `io_bytes`.
    pub(crate) fn subject(&self, salt: u64, index: u64, io_bytes: usize) -> Subject {
        let drawn = mix(salt ^ index);
        let blocks = (self.shape.file_bytes / io_bytes) as u64;
        let file = (drawn >> 32) % self.shape.files as u64;
        Subject { file: file as usize, offset: ((drawn & 0xffff_ffff) % blocks) as usize * io_bytes }
    }
}

/// The name of a file.
pub(crate) fn file_name(number: usize) -> String {
    format!("file{number}")
}

/// The name of this program's folder in an export.
pub(crate) fn folder_name() -> String {
    format!("ksf-load-{}-{}", std::process::id(), unix_seconds() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_offsets_are_all_drawn() {
        let content = Content::new(Shape { files: 3, file_bytes: 64 });
        let mut seen: Vec<(usize, usize)> =
            (0..1000).map(|index| content.subject(5, index, 16)).map(|s| (s.file, s.offset)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 3 * 64 / 16);
        assert!(seen.iter().all(|&(file, offset)| file < 3 && offset + 16 <= 64));
    }
}
