//! A reply as a list of pieces, each of which leaves from where it lies.

use super::COPY_BYTES_MAX;
use crate::buffers::Buffer;
use crate::files::{FileRange, NoFileReplies};
use crate::output::{Output, Piece, ReplyStart, Spares};
use crate::pool::Chunk;

/// The pieces of one reply, in the order in which they leave.
#[derive(Debug)]
pub struct Pieces<'a>(Place<'a>);

#[derive(Debug)]
enum Place<'a> {
    Stream {
        output: &'a mut Output,
        spares: &'a mut Spares,
        start: ReplyStart,
        /// There is a shard to read files.
        takes_files: bool,
    },
    /// A datagram is one piece of memory.
    Datagram(&'a mut Vec<u8>),
}

impl<'a> Pieces<'a> {
    /// Appends a reply to what is in `output`.
    pub(crate) fn stream(output: &'a mut Output, spares: &'a mut Spares, takes_files: bool) -> Self {
        let start = output.reply_start();
        Self(Place::Stream { output, spares, start, takes_files })
    }

    pub(crate) fn copied(bytes: &'a mut Vec<u8>) -> Self {
        Self(Place::Datagram(bytes))
    }
}

impl Pieces<'_> {
    /// Adds the bytes that `write` appends to the buffer (and it must not touch what is there already).
    pub fn write<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        match &mut self.0 {
            Place::Stream { output, spares, .. } => write(output.tail(spares)),
            Place::Datagram(bytes) => write(bytes),
        }
    }

    /// Adds a copy of these bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        // Without bytes no buffer is taken for them.
        if bytes.is_empty() {
            return;
        }
        match &mut self.0 {
            Place::Stream { output, spares, .. } => output.tail_for(bytes.len(), spares).extend_from_slice(bytes),
            Place::Datagram(copy) => copy.extend_from_slice(bytes),
        }
    }

    /// Adds these bytes, without copying them if they are many.
    pub fn owned(&mut self, bytes: Vec<u8>) {
        match &mut self.0 {
            Place::Stream { output, spares, start, .. } if bytes.len() > COPY_BYTES_MAX => {
                output.fit_tail(*start, spares);
                output.push_bytes(bytes, spares);
            }
            Place::Stream { output, spares, .. } => {
                output.tail_for(bytes.len(), spares).extend_from_slice(&bytes);
                spares.give(bytes);
            }
            Place::Datagram(copy) => copy.extend_from_slice(&bytes),
        }
    }

    /// Adds a chunk from where it lies, if it is long and its slot may be kept, else a copy.
    pub fn chunk(&mut self, chunk: Chunk) {
        match &mut self.0 {
            Place::Stream { output, spares, start, .. } if chunk.len() > COPY_BYTES_MAX && chunk.keep() => {
                output.fit_tail(*start, spares);
                output.push_chunk(chunk, spares);
            }
            _ => self.bytes(&chunk),
        }
    }

    /// Adds the bytes that are filled in a buffer, without copying them if they are many. The buffer goes back to its class
    /// when they are sent.
    pub fn buffer(&mut self, buffer: Buffer) {
        self.chunk(Chunk::from_buffer(buffer));
    }

    /// True if [`Pieces::file`] would take a range.
    pub fn takes_files(&self) -> bool {
        matches!(self.0, Place::Stream { takes_files: true, .. })
    }

    /// Adds a range of a file, which the shard reads while the connection sends: [`Reply::file`](crate::Reply::file) says
    /// how, and what happens to a file that is too short. In the budgets a range counts with its place in the list, and all
    /// ranges that a connection sends count together with 512 KiB at most, the memory that they are read into.
    ///
    /// # Errors
    ///
    /// [`NoFileReplies`]: only shards send files, and only on streams. The range was not added; others may be added
    /// instead of it.
    pub fn file(&mut self, range: FileRange) -> Result<(), NoFileReplies> {
        let Place::Stream { output, spares, start, takes_files: true } = &mut self.0 else { return Err(NoFileReplies) };
        output.fit_tail(*start, spares);
        output.push_file(range, start, spares);
        Ok(())
    }

    /// Adds the pieces that were collected elsewhere.
    pub(crate) fn append(&mut self, mut other: Output) -> Result<(), NoFileReplies> {
        while let Some(piece) = other.take_piece() {
            match piece {
                Piece::Bytes(bytes) => self.owned(bytes),
                Piece::Chunk(chunk) => self.chunk(chunk),
                Piece::File { range, .. } => self.file(range)?,
            }
        }
        if let Place::Stream { spares, .. } = &mut self.0 {
            other.recycle(spares);
        }
        Ok(())
    }

    /// Where a reply to a stream begins, after all that was done to make place for it.
    pub(crate) fn start(&self) -> Option<ReplyStart> {
        match &self.0 {
            Place::Stream { start, .. } => Some(*start),
            Place::Datagram(_) => None,
        }
    }
}
