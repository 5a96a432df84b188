//! Replies on their way out.
//!
//! An [`Output`] collects replies in order: bytes in one growing buffer, and between them chunks that are sent from
//! where they lie, and ranges of files, which are read into chunks a [window](FILE_WINDOW_BYTES) at a time. The engine
//! takes all that is there as one [`SendBatch`] and owns it until the last byte is sent, so the
//! memory a send reads from lives as long as the send, whatever happens to the connection.

mod batch;
mod spares;

use std::collections::VecDeque;

use crate::buffers::Buffer;
use crate::files::FileRange;
use crate::pool::Chunk;
use crate::service::COPY_BYTES_MAX;

pub use self::batch::SendBatch;
pub use self::spares::Spares;

/// Most bytes of a file that are read at a time for a reply. A connection has two of these in memory: one that is sent,
/// and one that is read meanwhile.
pub const FILE_WINDOW_BYTES: usize = 256 << 10;

/// Pieces of a reply before which bytes may stay in the buffers that they were written to, however empty these are: warm
/// buffers, where a copy would be an allocation.
const BUFFERS_OF_REPLY_MAX: usize = 8;

/// What a range of a file takes until it is read.
pub const FILE_RANGE_BYTES: usize = size_of::<Piece>();

/// Replies that wait to be sent, in order.
#[derive(Debug, Default)]
pub struct Output {
    /// Everything before `tail`: most often nothing, so its room is there with it.
    front: Option<Box<Front>>,
    tail: Vec<u8>,
}

/// Pieces in front of the last bytes. The sums are kept, so that a list of any length is not looked through again.
#[derive(Debug, Default)]
struct Front {
    pieces: VecDeque<Piece>,
    bytes: usize,
    /// Ranges of files among the pieces.
    files: usize,
    /// Bytes of these.
    file_bytes: usize,
    /// Pieces in front of the first range, if there is one, and their bytes.
    before_file: (usize, usize),
}

#[derive(Debug)]
pub(crate) enum Piece {
    Bytes(Vec<u8>),
    Chunk(Chunk),
    /// Not empty. As many pieces in front of it are the head of its reply, and nothing else is in them.
    File {
        range: FileRange,
        head_pieces: usize,
    },
}

/// Where a reply begins that is being appended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplyStart {
    /// Number of the piece, which may still be the tail.
    piece: usize,
    /// Bytes of earlier replies in it.
    at: usize,
    /// The reply has a range of a file.
    has_file: bool,
}

impl Piece {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Chunk(chunk) => chunk,
            // Taken out of an output only once it is read.
            Self::File { .. } => &[],
        }
    }

    fn is_file(&self) -> bool {
        matches!(self, Self::File { .. })
    }

    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Chunk(chunk) => chunk.len(),
            Self::File { range, .. } => range.bytes,
        }
    }

    /// The first `keep` bytes, and the rest.
    fn cut(self, keep: usize) -> (Self, Self) {
        match self {
            Self::Bytes(mut bytes) => {
                let back = bytes.split_off(keep);
                (Self::Bytes(bytes), Self::Bytes(back))
            }
            Self::Chunk(chunk) => (Self::Chunk(chunk.slice(0..keep)), Self::Chunk(chunk.slice(keep..chunk.len()))),
            Self::File { range, head_pieces } => {
                let back = FileRange { offset: range.offset + keep as u64, bytes: range.bytes - keep, ..range.clone() };
                let front = FileRange { bytes: keep, ..range };
                (Self::File { range: front, head_pieces }, Self::File { range: back, head_pieces: 0 })
            }
        }
    }
}

impl Front {
    fn push_back(&mut self, piece: Piece) {
        if self.files == 0 {
            self.before_file = (self.pieces.len(), self.bytes);
        }
        self.pushed(&piece);
        self.pieces.push_back(piece);
    }

    fn push_front(&mut self, piece: Piece) {
        let (pieces, bytes) = self.before_file;
        self.before_file = if piece.is_file() { (0, 0) } else { (pieces + 1, bytes + piece.len()) };
        self.pushed(&piece);
        self.pieces.push_front(piece);
    }

    fn pushed(&mut self, piece: &Piece) {
        self.bytes += piece.len();
        if piece.is_file() {
            self.files += 1;
            self.file_bytes += piece.len();
        }
    }

    fn pop_back(&mut self) -> Option<Piece> {
        let piece = self.pieces.pop_back()?;
        self.popped(&piece);
        Some(piece)
    }

    fn pop_front(&mut self) -> Option<Piece> {
        let piece = self.pieces.pop_front()?;
        self.popped(&piece);
        if piece.is_file() {
            self.find_file((0, 0));
        } else if self.files > 0 {
            let (pieces, bytes) = self.before_file;
            self.before_file = (pieces - 1, bytes - piece.len());
        }
        Some(piece)
    }

    fn popped(&mut self, piece: &Piece) {
        self.bytes -= piece.len();
        if piece.is_file() {
            self.files -= 1;
            self.file_bytes -= piece.len();
        }
    }

    /// Looks for the first range, where as many pieces and bytes have none. No piece is looked at twice on its way.
    fn find_file(&mut self, (mut pieces, mut bytes): (usize, usize)) {
        if self.files > 0 {
            let between = self.pieces.range(pieces..).take_while(|piece| !piece.is_file());
            between.for_each(|piece| (pieces, bytes) = (pieces + 1, bytes + piece.len()));
            self.before_file = (pieces, bytes);
        }
    }

    /// Replaces the front of the first range by its bytes. Few of them are copied, so that a list of short ranges does not
    /// keep a buffer for each.
    fn fill_file(&mut self, read: Buffer, spares: &mut Spares) {
        let (at, before) = self.before_file;
        let Some(Piece::File { range: rest, head_pieces }) = self.pieces.get_mut(at) else { return };
        let len = read.len();
        rest.offset += len as u64;
        rest.bytes -= len;
        // The head has not left alone, and needs not any more.
        *head_pieces = 0;
        let is_read = rest.bytes == 0;
        self.file_bytes -= len;
        self.files -= usize::from(is_read);
        let bytes_before = at.checked_sub(1).and_then(|last| self.pieces.get_mut(last));
        if let Some(Piece::Bytes(bytes)) = bytes_before
            && len <= COPY_BYTES_MAX.min(bytes.capacity() - bytes.len())
        {
            bytes.extend_from_slice(&read);
            if is_read {
                self.pieces.remove(at);
            }
            self.before_file = (at, before + len);
        } else {
            let piece = if len <= COPY_BYTES_MAX {
                let mut bytes = spares.take();
                bytes.extend_from_slice(&read);
                Piece::Bytes(bytes)
            } else {
                Piece::Chunk(Chunk::from_buffer(read))
            };
            match is_read {
                true => self.pieces[at] = piece,
                false => self.pieces.insert(at, piece),
            }
            self.before_file = (at + 1, before + len);
        }
        if is_read {
            self.find_file(self.before_file);
        }
    }

    /// Appends all pieces of another one, which is empty then.
    fn append(&mut self, other: &mut Self) {
        if self.files == 0 {
            let (pieces, bytes) = other.before_file;
            self.before_file = (self.pieces.len() + pieces, self.bytes + bytes);
        }
        self.bytes += other.bytes;
        self.files += other.files;
        self.file_bytes += other.file_bytes;
        self.pieces.append(&mut other.pieces);
        other.clear();
    }

    /// Moves the first pieces, among which is no range, to the end of another one.
    fn move_to(&mut self, other: &mut Self, pieces: usize, bytes: usize) {
        other.pieces.extend(self.pieces.drain(..pieces));
        other.bytes += bytes;
        self.bytes -= bytes;
        let (pieces_before, bytes_before) = self.before_file;
        self.before_file = (pieces_before - pieces, bytes_before - bytes);
    }

    fn clear(&mut self) {
        self.pieces.clear();
        (self.bytes, self.files, self.file_bytes, self.before_file) = (0, 0, 0, (0, 0));
    }
}

impl Output {
    /// The buffer to append reply bytes to. It is append-only: what is in it already are earlier replies.
    pub fn tail(&mut self, spares: &mut Spares) -> &mut Vec<u8> {
        self.tail_for(0, spares)
    }

    /// The same, when about `bytes` more bytes come.
    #[inline]
    pub(crate) fn tail_for(&mut self, bytes: usize, spares: &mut Spares) -> &mut Vec<u8> {
        if self.tail.capacity() == 0 {
            self.tail = spares.take();
        }
        if 2 * self.tail.len().max(bytes) <= self.tail.capacity() {
            return &mut self.tail;
        }
        self.grow_tail_for(bytes, spares)
    }

    fn grow_tail_for(&mut self, bytes: usize, spares: &mut Spares) -> &mut Vec<u8> {
        // Without a length, more is expected of a tail that is half full.
        let wanted = (self.tail.len() + bytes).max(2 * self.tail.len());
        if wanted > self.tail.capacity().max(Spares::SMALL_BYTES_MAX)
            // A used buffer instead of a larger allocation, if there is one.
            && let Some(mut larger) = spares.take_larger(wanted)
        {
            larger.extend_from_slice(&self.tail);
            spares.give(std::mem::replace(&mut self.tail, larger));
        }
        // Once, and so that the buffer fits when the same length comes again.
        self.tail.reserve(bytes);
        &mut self.tail
    }

    /// Appends a chunk without copying it.
    pub fn push_chunk(&mut self, chunk: Chunk, spares: &mut Spares) {
        self.end_tail(spares).push_back(Piece::Chunk(chunk));
    }

    /// Appends bytes without copying them.
    pub fn push_bytes(&mut self, bytes: Vec<u8>, spares: &mut Spares) {
        self.end_tail(spares).push_back(Piece::Bytes(bytes));
    }

    /// Takes off everything behind the first `len` bytes.
    pub fn split_off(&mut self, len: usize, spares: &mut Spares) -> Self {
        let mut rest = Self::default();
        if len >= self.len() {
            return rest;
        }
        let piece_bytes = self.piece_bytes();
        if len >= piece_bytes {
            let keep = len - piece_bytes;
            rest.tail(spares).extend_from_slice(&self.tail[keep..]);
            self.tail.truncate(keep);
            return rest;
        }
        rest.tail = std::mem::take(&mut self.tail);
        let Some(kept) = &mut self.front else { return rest };
        let cut_off = rest.front.insert(spares.fronts.take());
        while kept.bytes > len
            && let Some(last) = kept.pop_back()
        {
            cut_off.push_front(last);
        }
        if let Some(keep) = len.checked_sub(kept.bytes).filter(|keep| *keep > 0)
            && let Some(cut) = cut_off.pop_front()
        {
            let (front, back) = cut.cut(keep);
            kept.push_back(front);
            cut_off.push_front(back);
        }
        rest
    }

    /// Appends everything `other` holds. Bytes in one piece are copied and the buffer stays with `other`.
    pub fn add(&mut self, other: &mut Self, spares: &mut Spares) {
        if other.has_no_pieces() {
            self.tail(spares).extend_from_slice(&other.tail);
            other.tail.clear();
        } else {
            self.append(std::mem::take(other), spares);
        }
    }

    /// Appends everything `other` holds.
    pub fn append(&mut self, mut other: Self, spares: &mut Spares) {
        match &mut other.front {
            Some(front) if !front.pieces.is_empty() => {
                self.end_tail(spares).append(front);
                spares.give(std::mem::replace(&mut self.tail, other.tail));
            }
            _ => {
                self.tail(spares).extend_from_slice(&other.tail);
                spares.give(other.tail);
            }
        }
        spares.give_front(other.front);
    }

    /// The same for a place that was answered before the one in front of it, and so perhaps many times: neither is more than a
    /// small buffer copied each time, nor does every reply keep one to itself.
    pub(crate) fn join(&mut self, mut other: Self, spares: &mut Spares) {
        let fits = |own: &Self, len: usize| own.tail.len() + len <= Spares::BYTES_MIN;
        if let Some(Piece::Bytes(first)) = other.piece(0)
            && fits(self, first.len())
            && !other.begins_with_a_head()
            && let Some(Piece::Bytes(first)) = other.pop_front()
        {
            self.tail(spares).extend_from_slice(&first);
            spares.give(first);
        }
        if other.has_no_pieces() && !fits(self, other.tail.len()) {
            self.end_tail(spares);
            spares.give(std::mem::replace(&mut self.tail, other.tail));
            spares.give_front(other.front);
        } else {
            self.append(other, spares);
        }
    }

    /// Moves `bytes` bytes, which end where a reply does, to the end of `to`. What is behind them stays where it is: `gone_bytes`
    /// says how much of the first piece was moved before, and does so afterwards. So many calls cost as much as one.
    pub(crate) fn move_front(&mut self, bytes: usize, gone_bytes: &mut usize, to: &mut Self, spares: &mut Spares) {
        let mut end = *gone_bytes + bytes;
        while let Some(len) = self.piece(0).map(Piece::len).filter(|len| *len <= end)
            && let Some(piece) = self.pop_front()
        {
            end -= len;
            match (piece, std::mem::take(gone_bytes)) {
                (Piece::Bytes(bytes), gone) if gone > 0 => {
                    to.tail_for(len - gone, spares).extend_from_slice(&bytes[gone..]);
                    spares.give(bytes);
                }
                (piece, _) => to.end_tail(spares).push_back(piece),
            }
        }
        if end == 0 {
            return;
        }
        // Replies share no piece but bytes.
        let shared = self.piece(0).map_or(&self.tail[..], Piece::as_slice);
        to.tail_for(end - *gone_bytes, spares).extend_from_slice(&shared[*gone_bytes..end]);
        *gone_bytes = end;
        if self.has_no_pieces() && 2 * end >= self.tail.len() {
            // The rest is no longer than what was moved since the last time.
            self.tail.drain(..end);
            *gone_bytes = 0;
        }
    }

    /// Bytes of memory that it takes beyond its own: of its last buffer what is not filled. In front of it a reply has few
    /// that are not full.
    pub(crate) fn slack_bytes(&self) -> usize {
        let front_bytes = self.front.as_ref().map_or(0, |_| size_of::<Front>());
        front_bytes + self.tail.capacity() - self.tail.len()
    }

    #[inline]
    fn has_no_pieces(&self) -> bool {
        self.front.as_ref().is_none_or(|front| front.pieces.is_empty())
    }

    fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.front.iter().flat_map(|front| &front.pieces)
    }

    fn piece(&self, at: usize) -> Option<&Piece> {
        self.front.as_ref()?.pieces.get(at)
    }

    fn piece_count(&self) -> usize {
        self.front.as_ref().map_or(0, |front| front.pieces.len())
    }

    #[inline]
    fn piece_bytes(&self) -> usize {
        self.front.as_ref().map_or(0, |front| front.bytes)
    }

    /// The place of what is appended next.
    pub(crate) fn reply_start(&self) -> ReplyStart {
        ReplyStart { piece: self.piece_count(), at: self.tail.len(), has_file: false }
    }

    /// The buffer that a reply begins in, and where in it. For replies that begin with bytes.
    pub(crate) fn reply_head(&mut self, start: ReplyStart) -> (&mut [u8], usize) {
        match self.front.as_mut().and_then(|front| front.pieces.get_mut(start.piece)) {
            Some(Piece::Bytes(bytes)) => (bytes, start.at),
            _ => (&mut self.tail, start.at),
        }
    }

    /// Appends a range of a file to the reply that began at `start`. The first one of a reply parts what is in front of it
    /// from the replies before.
    pub(crate) fn push_file(&mut self, range: FileRange, start: &mut ReplyStart, spares: &mut Spares) {
        if range.bytes == 0 {
            return;
        }
        self.part_reply(start, spares);
        let front = self.end_tail(spares);
        let head_pieces = if start.has_file { 0 } else { front.pieces.len() - start.piece };
        start.has_file = true;
        front.push_back(Piece::File { range, head_pieces });
    }

    /// Moves the front of a reply out of the buffer that earlier replies are in.
    fn part_reply(&mut self, start: &mut ReplyStart, spares: &mut Spares) {
        if start.at == 0 {
            return;
        }
        let mut front = spares.take();
        if let Some(before) = &mut self.front
            && let Some(Piece::Bytes(shared)) = before.pieces.get_mut(start.piece)
        {
            front.extend_from_slice(&shared[start.at..]);
            shared.truncate(start.at);
            if !front.is_empty() {
                before.pieces.insert(start.piece + 1, Piece::Bytes(front));
            }
        } else {
            front.extend_from_slice(&self.tail[start.at..]);
            self.tail.truncate(start.at);
            self.end_tail(spares);
            self.tail = front;
        }
        (start.piece, start.at) = (start.piece + 1, 0);
    }

    /// True if the first piece is of the head of a range of a file.
    fn begins_with_a_head(&self) -> bool {
        let Some((at, _)) = self.first_file() else { return false };
        at > 0 && matches!(self.piece(at), Some(Piece::File { head_pieces, .. }) if *head_pieces == at)
    }

    /// Takes off the first piece.
    pub(crate) fn take_piece(&mut self) -> Option<Piece> {
        self.pop_front().or_else(|| (!self.tail.is_empty()).then(|| Piece::Bytes(std::mem::take(&mut self.tail))))
    }

    /// Appends a copy of its bytes to `to`. Ranges of files have none.
    pub fn copy_to(&self, to: &mut Vec<u8>) {
        self.pieces().for_each(|piece| to.extend_from_slice(piece.as_slice()));
        to.extend_from_slice(&self.tail);
    }

    /// Bytes of memory that it takes: a range of a file holds none of the file before it is read. Of two outputs this is
    /// the sum, however their pieces come together.
    #[inline]
    pub(crate) fn memory_bytes(&self) -> usize {
        let Some(front) = &self.front else { return self.tail.len() };
        front.bytes - front.file_bytes + front.files * FILE_RANGE_BYTES + self.tail.len()
    }

    /// Bytes of memory that its ranges of files will take while they are sent: two windows at most.
    #[inline]
    pub(crate) fn window_bytes(&self) -> usize {
        self.front.as_ref().map_or(0, |front| front.file_bytes.min(2 * FILE_WINDOW_BYTES))
    }

    /// True if it begins with bytes that can be sent: not if it is empty, or a range must be read first.
    pub(crate) fn is_ready(&self) -> bool {
        let waits = self.has_files() && matches!(self.piece(0), Some(Piece::File { .. }));
        !waits && !self.is_empty()
    }

    /// True if there are ranges of files in it.
    #[inline]
    pub(crate) fn has_files(&self) -> bool {
        self.front.as_ref().is_some_and(|front| front.files > 0)
    }

    /// Place of the first range of a file, and the bytes in front of it.
    #[inline]
    fn first_file(&self) -> Option<(usize, usize)> {
        self.front.as_ref().filter(|front| front.files > 0).map(|front| front.before_file)
    }

    /// What to read next, at most a window, unless a window is there already; `sending` bytes count to it.
    pub(crate) fn file_to_read(&self, sending: usize) -> Option<FileRange> {
        let (at, _) = self.first_file().filter(|(_, before)| before + sending < FILE_WINDOW_BYTES)?;
        let Piece::File { range, .. } = self.piece(at)? else { return None };
        Some(FileRange { bytes: range.bytes.min(FILE_WINDOW_BYTES), ..range.clone() })
    }

    /// Puts what was read of `range` into its place. False: the first range is not the one this is about.
    pub(crate) fn file_was_read(&mut self, range: &FileRange, bytes: Buffer, spares: &mut Spares) -> bool {
        let Some((at, _)) = self.first_file() else { return false };
        let Some(front) = &mut self.front else { return false };
        let Some(Piece::File { range: rest, .. }) = front.pieces.get(at) else { return false };
        if rest.offset != range.offset || !rest.file.is_same(&range.file) || rest.bytes < bytes.len() {
            return false;
        }
        front.fill_file(bytes, spares);
        true
    }

    /// Takes what can be sent: everything in front of the first range of a file. The head of that goes alone: it is to wait
    /// for the range in the kernel, and the replies in front of it must not.
    #[inline]
    pub(crate) fn take_ready(&mut self, spares: &mut Spares) -> SendBatch {
        if !self.has_files() {
            return self.take();
        }
        self.take_before_file(spares)
    }

    fn take_before_file(&mut self, spares: &mut Spares) -> SendBatch {
        let Some((mut at, mut bytes)) = self.first_file() else { return self.take() };
        let Some(front) = &mut self.front else { return self.take() };
        if let Piece::File { head_pieces, .. } = front.pieces[at]
            && head_pieces < at
        {
            bytes -= front.pieces.range(at - head_pieces..at).map(Piece::len).sum::<usize>();
            at -= head_pieces;
        }
        let mut ready = spares.fronts.take();
        front.move_to(&mut ready, at, bytes);
        SendBatch { output: Self { front: Some(ready), ..Self::default() }, sent: 0 }
    }

    /// Makes the tail a piece, so that another piece can follow it: where that goes is returned.
    fn end_tail(&mut self, spares: &mut Spares) -> &mut Front {
        let front = self.front.get_or_insert_with(|| spares.fronts.take());
        if !self.tail.is_empty() {
            front.push_back(Piece::Bytes(std::mem::take(&mut self.tail)));
        }
        front
    }

    /// Before a piece follows the tail: in a reply of many pieces short ones do not keep a buffer each, because the budget counts their bytes.
    pub(crate) fn fit_tail(&mut self, start: ReplyStart, spares: &mut Spares) {
        let is_one_of_many = self.piece_count().saturating_sub(start.piece) >= BUFFERS_OF_REPLY_MAX;
        if is_one_of_many && !self.tail.is_empty() && self.tail.len() < self.tail.capacity() / 2 {
            let fitting = self.tail.as_slice().to_vec();
            spares.give(std::mem::replace(&mut self.tail, fitting));
        }
    }

    /// Bytes in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.piece_bytes() + self.tail.len()
    }

    /// Where its last bytes end, where its last piece is, and the number of pieces: to see whether they are moved.
    #[cfg(test)]
    pub(crate) fn end(&self) -> (*const u8, Option<*const Piece>, usize) {
        (self.tail.as_ptr_range().end, self.pieces().last().map(std::ptr::from_ref), self.piece_count())
    }

    /// True when nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Throws away what is in it, and keeps the buffer.
    pub fn clear(&mut self) {
        self.front.iter_mut().for_each(|front| front.clear());
        self.tail.clear();
    }

    /// Gives the buffers back for reuse.
    pub(crate) fn recycle(mut self, spares: &mut Spares) {
        self.take().recycle(spares);
    }

    /// Throws away what was added when more than `len` bytes were in it.
    pub fn truncate(&mut self, len: usize) {
        self.tail.truncate(len.saturating_sub(self.piece_bytes()));
        let Some(front) = &mut self.front else { return };
        while front.bytes > len
            && let Some(last) = front.pop_back()
        {
            if let Some(keep) = len.checked_sub(front.bytes).filter(|keep| *keep > 0) {
                front.push_back(last.cut(keep).0);
            }
        }
    }

    fn pop_front(&mut self) -> Option<Piece> {
        self.front.as_mut()?.pop_front()
    }

    /// Takes everything, to be sent.
    #[inline]
    pub fn take(&mut self) -> SendBatch {
        SendBatch { output: std::mem::take(self), sent: 0 }
    }
}

#[cfg(test)]
mod tests;
