//! The options for the files of a measurement.

use super::content::Shape;
use crate::error::LoadError;
use crate::options::numbers::parse_u64;
use crate::options::{number, usage};

const IO_BYTES_MAX: u64 = 1 << 20;
const FILE_BYTES_MAX: u64 = 1 << 30;
const FILES_MAX: u64 = 100_000;
/// All files together.
const CONTENT_BYTES_MAX: u64 = 1 << 36;

/// Options of `ksf load nfs` and `ksf load 9p` for their files.
#[derive(Debug, Clone, clap::Args)]
pub struct FileArgs {
    /// Files that requests are about [default: 100]
    #[arg(long, value_name = "N", value_parser = number::<1, FILES_MAX>)]
    pub files: Option<u64>,

    /// Length of each file in bytes [default: 64k]
    #[arg(long, value_name = "BYTES", value_parser = parse_u64)]
    pub file_bytes: Option<u64>,

    /// Bytes of a read and of a write [default: 4k]
    #[arg(long, value_name = "BYTES", value_parser = number::<1, IO_BYTES_MAX>)]
    pub io_bytes: Option<u64>,

    /// Leave the files in the export
    #[arg(long)]
    pub keep: bool,
}

/// The options with their defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FilePlan {
    pub(crate) shape: Shape,
    pub(crate) io_bytes: usize,
}

impl FileArgs {
    /// Checks the options; those that are absent are as in `default`.
    ///
    /// # Errors
    ///
    /// [`LoadError::Usage`]: files that cannot be, or that requests do not fit into.
    pub(crate) fn plan(&self, default: FilePlan) -> Result<FilePlan, LoadError> {
        let files = self.files.unwrap_or(default.shape.files as u64);
        let file_bytes = self.file_bytes.unwrap_or(default.shape.file_bytes as u64);
        let io_bytes = self.io_bytes.unwrap_or(default.io_bytes as u64);
        if !(1..=FILE_BYTES_MAX).contains(&file_bytes) {
            return usage(format!("--file-bytes {file_bytes}: a file has 1 byte to 1 GiB"));
        }
        if io_bytes > file_bytes {
            return usage("--io-bytes is more than --file-bytes: a request is about a part of a file");
        }
        if files.saturating_mul(file_bytes) > CONTENT_BYTES_MAX {
            return usage("--files times --file-bytes is more than 64 GiB");
        }
        let shape = Shape { files: files as usize, file_bytes: file_bytes as usize };
        Ok(FilePlan { shape, io_bytes: io_bytes as usize })
    }
}

impl FilePlan {
    /// Parts of a file that requests are about.
    pub(crate) fn blocks(&self) -> u64 {
        (self.shape.file_bytes / self.io_bytes) as u64
    }
}
