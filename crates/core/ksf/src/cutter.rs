//! Cuts a byte stream into messages.
//!
//! A [`Cutter`] has no socket and no clock. It is handed what was received, and says what comes next. Its owner decides
//! when to go on: a [`Connection`](crate::connection::Connection) of a shard, or the reader of a connection in the
//! multiplexor (`ksf-mux`), which gives unfinished messages back as they were on the wire.
//!
//! ```text
//!   chunk ──► next() ──► Cut::InPlace(range)    whole in the chunk: no copy
//!                   ├──► Cut::Assembled(buffer) put together from several chunks, or from several parts
//!                   ├──► Cut::More              the chunk is used up
//!                   └──► Cut::NoRoom            memory is short: nothing was taken, ask again later
//! ```
//!
//! A message that is not whole in a chunk is put together in a [`Buffer`]. When the header tells the length, the buffer
//! has that size from the start, and [`Cutter::direct`] lends it, so that the rest can be received straight into it.

mod rule;

use std::ops::Range;
use std::time::Duration;

use self::rule::{check_size, front};
use crate::buffers::{Buffer, Buffers};
use crate::framing::{Frame, Part};
use crate::limits::Time;

pub use self::rule::{CutError, Native, Rule};

/// Memory for messages that arrived in part. The owner of several cutters bounds what they keep together.
pub trait Room {
    /// True, and counted, if `bytes` more may be kept.
    fn grow(&mut self, bytes: usize) -> bool;

    /// `bytes` are kept no longer.
    fn shrink(&mut self, bytes: usize);

    /// False if `bytes` more would leave too little for others. The cutter then returns the pages of a used buffer that it
    /// does not need before it asks for room.
    fn fits(&self, bytes: usize) -> bool {
        let _ = bytes;
        true
    }
}

/// What comes next in the stream.
#[derive(Debug)]
pub enum Cut {
    /// A message that lies whole in the chunk.
    InPlace(Range<usize>),
    /// A message that was put together.
    Assembled(Buffer),
    /// The chunk is used up.
    More,
    /// There is no room for what follows: it stays in the chunk.
    NoRoom,
}

/// The state between two chunks: nothing at a message boundary, else the message that arrived in part. The room for that is
/// made for the first message that does, and kept: most connections of a server are idle, and many never need it.
#[derive(Debug, Default)]
pub struct Cutter {
    unfinished: Option<Box<Unfinished>>,
}

/// The message that arrived in part, if one did.
#[derive(Debug, Default)]
struct Unfinished {
    /// Bodies of the finished parts, then what of the current part is there: its body, or its raw beginning while its
    /// header is unknown.
    buffer: Option<Buffer>,
    /// The buffer is lent.
    lent: bool,
    /// It was lent before, for the same message.
    lends: bool,
    /// Bytes of `buffer` that belong to finished parts.
    finished_bytes: usize,
    /// The current part, once its header is cut.
    part: Option<Progress>,
    parts: u32,
    /// Raw bytes that the rule has seen.
    scanned: usize,
    /// Raw bytes with which the rule wants to be asked again; [`ANY_BYTES`] if it did not say.
    need_bytes: usize,
    started: Time,
    /// Nothing of the message is there: it has the rest of what came before.
    awaited: bool,
    /// Arrival of its last bytes.
    heard: Time,
    /// Memory counted with the owner's room: the pages that the buffer takes, and the headers that are kept.
    charged_bytes: usize,
    /// Bytes copied since the owner asked last.
    copied_bytes: usize,
    /// What was cut off around the bodies, where the owner may want the stream back.
    wire: Option<Box<Wire>>,
}

#[derive(Clone, Copy, Debug)]
struct Progress {
    body_left: usize,
    trailer_left: usize,
    last: bool,
}

/// Headers of the unfinished message, each with the place of its body.
#[derive(Debug, Default)]
struct Wire {
    headers: Vec<u8>,
    /// End of a header in `headers`, and where in the bodies it belongs.
    places: Vec<(usize, usize)>,
}

impl Wire {
    /// Memory for headers that a cutter keeps between messages.
    const KEEP_BYTES: usize = 256;

    fn memory_bytes(&self) -> usize {
        self.headers.len() + size_of_val(&self.places[..])
    }

    fn clear(&mut self) {
        self.headers.clear();
        self.headers.shrink_to(Self::KEEP_BYTES);
        self.places.clear();
        self.places.shrink_to(Self::KEEP_BYTES / size_of::<(usize, usize)>());
    }

    fn push(&mut self, header: &[u8], place: usize) {
        self.headers.extend_from_slice(header);
        self.places.push((self.headers.len(), place));
    }
}

/// Bytes lent at least, if as many are missing. More are lent once more have arrived: what is counted as input grows with
/// what a peer sends, not with what it announces.
const LOAN_BYTES: usize = 64 << 10;

/// More bytes than there will be: each further one may tell how the message goes on.
const ANY_BYTES: usize = usize::MAX;

/// The unit in which memory is counted.
const PAGE_BYTES: usize = 4096;

impl Cutter {
    /// A cutter that can give back an unfinished message as it was on the wire: [`Cutter::take_unread`].
    pub fn keeping_wire() -> Self {
        Self { unfinished: Some(Box::new(Unfinished { wire: Some(Box::default()), ..Unfinished::default() })) }
    }

    /// True at a message boundary.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.unfinished.as_ref().is_none_or(|unfinished| unfinished.is_none())
    }

    /// When the unfinished message began to arrive, or was [awaited](Self::await_rest) first.
    pub fn since(&self) -> Option<Time> {
        let unfinished = self.unfinished.as_ref().filter(|unfinished| unfinished.awaited || !unfinished.is_none());
        unfinished.map(|unfinished| unfinished.started)
    }

    /// The next message has the rest of what came before: its time begins now, and not with its first byte.
    pub fn await_rest(&mut self, now: Time) {
        let unfinished = self.unfinished.get_or_insert_default();
        (unfinished.awaited, unfinished.started) = (true, now);
    }

    /// Counts the time of the unfinished message from now on: its peer was not read meanwhile.
    pub fn restart(&mut self, now: Time) {
        if let Some(unfinished) = &mut self.unfinished {
            unfinished.started = now;
        }
    }

    /// Does not count this time of the unfinished message: its peer was not read meanwhile.
    pub fn put_off(&mut self, unread: Duration) {
        if let Some(unfinished) = &mut self.unfinished {
            unfinished.started = unfinished.started.plus(unread);
        }
    }

    /// When the last bytes of the unfinished message arrived; `None` at a message boundary.
    pub(crate) fn heard(&self) -> Option<Time> {
        self.unfinished.as_ref().filter(|unfinished| !unfinished.is_none()).map(|unfinished| unfinished.heard)
    }

    /// Bytes of the unfinished message arrived now, or wait to be received.
    pub(crate) fn note_heard(&mut self, now: Time) {
        if let Some(unfinished) = &mut self.unfinished {
            unfinished.heard = now;
        }
    }

    /// Memory that the unfinished message takes of the owner's room.
    pub(crate) fn charged_bytes(&self) -> usize {
        self.unfinished.as_ref().map_or(0, |unfinished| unfinished.charged_bytes)
    }

    /// Bytes of the unfinished message that are kept.
    pub fn unfinished_bytes(&self) -> usize {
        self.unfinished.as_ref().map_or(0, |unfinished| unfinished.kept_bytes())
    }

    /// Bytes of the unfinished message that arrived. Only a cutter that [keeps them](Self::keeping_wire) counts those of
    /// its headers.
    pub fn arrived_bytes(&self) -> usize {
        let wire = self.unfinished.as_ref().and_then(|unfinished| unfinished.wire.as_ref());
        self.unfinished_bytes() + wire.map_or(0, |wire| wire.headers.len())
    }

    /// True while the length of the unfinished message, or of its next part, is unknown.
    pub fn needs_header(&self) -> bool {
        self.unfinished.as_ref().is_some_and(|unfinished| unfinished.buffer.is_some() && unfinished.part.is_none())
    }

    /// Bytes that are missing of the unfinished message, or of its part; 0 while its length is unknown.
    pub fn missing_bytes(&self) -> usize {
        let part = self.unfinished.as_ref().and_then(|unfinished| unfinished.part.as_ref());
        part.map_or(0, |part| part.body_left + part.trailer_left)
    }

    /// Bytes that were copied to put messages together, since the last time this was asked.
    pub fn take_copied_bytes(&mut self) -> usize {
        self.unfinished.as_mut().map_or(0, |unfinished| std::mem::take(&mut unfinished.copied_bytes))
    }

    /// Forgets the unfinished message.
    pub fn reset(&mut self, room: &mut impl Room) {
        if let Some(unfinished) = &mut self.unfinished {
            drop(unfinished.clear(room));
        }
    }

    /// The unfinished message as it was on the wire, which is forgotten. Only of a cutter that [keeps
    /// it](Self::keeping_wire).
    pub fn take_unread(&mut self, room: &mut impl Room) -> Vec<u8> {
        let unread = self.unfinished.as_ref().map_or_else(Vec::new, |unfinished| unfinished.on_the_wire());
        self.reset(room);
        unread
    }

    /// Takes messages off the front of `chunk[*at..]` as long as that is simple: each lies there whole, in one part. A
    /// short cut in front of [`Self::next`], which does what this leaves.
    #[inline]
    pub fn take_whole<R: Rule>(&self, chunk: &[u8], at: &mut usize, rule: &R, mut each: impl FnMut(Range<usize>)) {
        if self.is_idle() {
            let start = *at;
            *at += rule.whole_messages(&chunk[start..], |body| each(start + body.start..start + body.end));
        }
    }

    /// The next message of the stream, whose unconsumed bytes are `chunk[*at..]`. `at` moves on over what was taken.
    ///
    /// # Errors
    ///
    /// What the peer did; nothing further can be cut.
    #[inline]
    pub fn next<R: Rule>(
        &mut self,
        chunk: &[u8],
        at: &mut usize,
        rule: &mut R,
        room: &mut impl Room,
        buffers: &Buffers,
        now: Time,
    ) -> Result<Cut, CutError<R::Error>> {
        if *at >= chunk.len() {
            return Ok(Cut::More);
        }
        if self.is_idle() {
            let rest = &chunk[*at..];
            let frame = front(rule, rest, 0)?;
            if let Frame::Part(part) = frame
                && part.last
                && part.total_bytes() <= rest.len()
            {
                if !rule.cuts_pieces() {
                    check_size(rule, part.body_bytes)?;
                }
                if let Some(unfinished) = &mut self.unfinished {
                    unfinished.awaited = false;
                }
                let start = *at + part.header_bytes;
                *at += part.total_bytes();
                return Ok(Cut::InPlace(start..start + part.body_bytes));
            }
            let unfinished = self.unfinished.get_or_insert_default();
            if !unfinished.begin(frame, rest, at, rule, room, buffers)? {
                return Ok(Cut::NoRoom);
            }
            if !std::mem::take(&mut unfinished.awaited) {
                unfinished.started = now;
            }
            unfinished.heard = now;
            // This is called for parts without a body, too, which are complete as soon as they begin.
            if let Some(message) = unfinished.finish_part(room) {
                return Ok(Cut::Assembled(message));
            }
        }
        match &mut self.unfinished {
            Some(unfinished) => unfinished.go_on(chunk, at, rule, room, buffers),
            None => Ok(Cut::More),
        }
    }

    /// True if [`Cutter::direct`] lends now, or has lent and did not get it back yet. The room for the loan is counted from
    /// here on.
    #[inline]
    pub fn may_lend(&mut self, bytes_min: usize, room: &mut impl Room) -> bool {
        self.unfinished.as_mut().is_some_and(|unfinished| unfinished.may_lend(bytes_min, room))
    }

    /// Lends the buffer of a message to receive bytes of its rest into, if at least `bytes_min` bytes of it are to come
    /// or the buffer was lent for the same message before. The borrower gives it back with [`Cutter::give_back`] before
    /// anything else is cut. Nothing is lent if there is no room for these bytes: they are counted from here on.
    pub fn direct(&mut self, bytes_min: usize, room: &mut impl Room) -> Option<Direct> {
        self.unfinished.as_mut()?.direct(bytes_min, room)
    }

    /// Takes a lent buffer back, into which `received` bytes were received. Gives the message if it is complete now. After
    /// a [reset](Self::reset) the buffer is dropped.
    pub fn give_back(&mut self, direct: Direct, received: usize, room: &mut impl Room) -> Option<Buffer> {
        self.unfinished.as_mut()?.give_back(direct, received, room)
    }
}

impl Unfinished {
    /// True if there is none.
    #[inline]
    fn is_none(&self) -> bool {
        self.buffer.is_none() && !self.lent
    }

    fn kept_bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, |buffer| buffer.len())
    }

    /// Back to a message boundary; gives the buffer.
    fn clear(&mut self, room: &mut impl Room) -> Option<Buffer> {
        room.shrink(self.charged_bytes);
        let wire = self.wire.take().map(|mut wire| {
            wire.clear();
            wire
        });
        let buffer = self.buffer.take();
        *self = Self { wire, copied_bytes: self.copied_bytes, ..Self::default() };
        buffer
    }

    /// Its bytes as they came, if they are kept.
    fn on_the_wire(&self) -> Vec<u8> {
        let mut unread = Vec::new();
        if let (Some(buffer), Some(wire)) = (&self.buffer, &self.wire) {
            let (mut header, mut body) = (0, 0);
            for (end, place) in &wire.places {
                unread.extend_from_slice(&buffer[body..*place]);
                unread.extend_from_slice(&wire.headers[header..*end]);
                (header, body) = (*end, *place);
            }
            unread.extend_from_slice(&buffer[body..]);
        }
        unread
    }

    /// Takes what there is of a message that begins with `rest`, and is not whole in it. False if there is no room.
    fn begin<R: Rule>(
        &mut self,
        frame: Frame,
        rest: &[u8],
        at: &mut usize,
        rule: &R,
        room: &mut impl Room,
        buffers: &Buffers,
    ) -> Result<bool, CutError<R::Error>> {
        let buffer = match frame {
            Frame::Part(part) => {
                check_size(rule, part.body_bytes)?;
                self.check_parts(rule)?;
                self.take(part.body_bytes, 1, room, buffers)
            }
            Frame::Incomplete { .. } => self.take(rest.len(), rest.len(), room, buffers),
        };
        let Some(mut buffer) = buffer else { return Ok(false) };
        match frame {
            Frame::Part(part) => {
                self.buffer = Some(buffer);
                if let Some(wire) = &mut self.wire {
                    wire.push(&rest[..part.header_bytes], 0);
                }
                *at += part.header_bytes;
                self.start_part(part);
            }
            Frame::Incomplete { need_bytes } => {
                buffer.fill(rest);
                self.buffer = Some(buffer);
                self.copied_bytes += rest.len();
                (self.scanned, self.need_bytes) = (rest.len(), need_bytes.unwrap_or(ANY_BYTES));
                *at += rest.len();
            }
        }
        Ok(true)
    }

    /// Goes on with a message that has begun.
    fn go_on<R: Rule>(
        &mut self,
        chunk: &[u8],
        at: &mut usize,
        rule: &mut R,
        room: &mut impl Room,
        buffers: &Buffers,
    ) -> Result<Cut, CutError<R::Error>> {
        debug_assert!(!self.lent, "a buffer that is lent comes back before anything else is cut");
        while *at < chunk.len() {
            let cut = if self.part.is_some() {
                self.fill_part(&chunk[*at..], at, room, buffers)
            } else {
                self.cut_header(&chunk[*at..], at, rule, room, buffers)?
            };
            if let Some(cut) = cut {
                return Ok(cut);
            }
            if let Some(message) = self.finish_part(room) {
                return Ok(Cut::Assembled(message));
            }
        }
        Ok(Cut::More)
    }

    /// Asks for room for a buffer in which `bytes` bytes are touched, and for the headers that are kept. Of the buffer
    /// whole pages are counted.
    fn charge(&mut self, bytes: usize, room: &mut impl Room) -> bool {
        let headers = self.wire.as_ref().map_or(0, |wire| wire.memory_bytes());
        let memory = bytes.next_multiple_of(PAGE_BYTES) + headers;
        let granted = memory <= self.charged_bytes || room.grow(memory - self.charged_bytes);
        if granted {
            self.charged_bytes = self.charged_bytes.max(memory);
        }
        granted
    }

    /// A buffer for `bytes` bytes, of which `filled` come now; `None` if there is no room for the memory it takes.
    fn take(&mut self, bytes: usize, filled: usize, room: &mut impl Room, buffers: &Buffers) -> Option<Buffer> {
        let mut buffer = buffers.take(bytes);
        // One that was used before has the pages that were written then.
        let touched_bytes = buffer.touched_bytes();
        if touched_bytes > filled && !room.fits(touched_bytes) {
            buffer.forget();
        }
        let granted = self.charge(filled.max(buffer.touched_bytes()), room)
            || buffer.touched_bytes() > filled && buffer.forget() && self.charge(filled, room);
        granted.then_some(buffer)
    }

    /// Inside a part: takes as much of its body as has arrived.
    fn fill_part(&mut self, rest: &[u8], at: &mut usize, room: &mut impl Room, buffers: &Buffers) -> Option<Cut> {
        let body_left = self.part?.body_left;
        let (held, body) = (self.kept_bytes(), body_left.min(rest.len()));
        if !self.reserve(held + body_left, held + body, room, buffers) {
            return Some(Cut::NoRoom);
        }
        let (Some(buffer), Some(part)) = (&mut self.buffer, &mut self.part) else { return None };
        buffer.fill(&rest[..body]);
        self.copied_bytes += body;
        let trailer = part.trailer_left.min(rest.len() - body);
        part.body_left -= body;
        part.trailer_left -= trailer;
        *at += body + trailer;
        None
    }

    /// Between two parts, or in a header that arrived in pieces: takes as many bytes as the header needs, and cuts.
    fn cut_header<R: Rule>(
        &mut self,
        rest: &[u8],
        at: &mut usize,
        rule: &mut R,
        room: &mut impl Room,
        buffers: &Buffers,
    ) -> Result<Option<Cut>, CutError<R::Error>> {
        let held = self.kept_bytes() - self.finished_bytes;
        if held == 0 {
            // Between two parts. Asked only here: a rule of a service's own is not asked twice for the same bytes.
            self.need_bytes = match front(rule, &[], 0)? {
                Frame::Incomplete { need_bytes } => need_bytes.unwrap_or(ANY_BYTES),
                Frame::Part(_) => 1,
            };
        }
        // The least that tells: what is taken too much is given back below, and a message of many small parts must not
        // be copied once per part.
        let most = rule.look_bytes_max().saturating_add(1);
        let need = self.need_bytes.min(most).saturating_sub(held).clamp(1, rest.len());
        let bytes = self.kept_bytes() + need;
        if !self.reserve(bytes, bytes, room, buffers) {
            return Ok(Some(Cut::NoRoom));
        }
        self.append(&rest[..need]);
        *at += need;
        match front(rule, self.raw(), self.scanned)? {
            Frame::Incomplete { need_bytes } => {
                (self.scanned, self.need_bytes) = (held + need, need_bytes.unwrap_or(ANY_BYTES));
            }
            Frame::Part(part) => {
                // Before anything moves: after an error the bytes are given back as they came.
                check_size(rule, self.finished_bytes + part.body_bytes)?;
                self.check_parts(rule)?;
                // Bytes beyond this part belong to the next message; all of them came from `rest`, since without them
                // the part could not be cut.
                let surplus = (held + need).saturating_sub(part.total_bytes());
                *at -= surplus;
                self.cut_raw(part, surplus);
                // With its header known, the rest may be received into the buffer; without room for that it is not, and the
                // next bytes of the body ask again.
                let _ = self.reserve(self.finished_bytes + part.body_bytes, self.kept_bytes(), room, buffers);
            }
        }
        Ok(None)
    }

    /// The raw beginning of the current part.
    fn raw(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer[self.finished_bytes..])
    }

    fn append(&mut self, bytes: &[u8]) {
        if let Some(buffer) = &mut self.buffer {
            buffer.fill(bytes);
            self.copied_bytes += bytes.len();
        }
    }

    /// Makes the buffer one for `bytes` bytes, of which `filled` are there soon. False, and nothing changes, if there is no
    /// room for the memory it takes.
    fn reserve(&mut self, bytes: usize, filled: usize, room: &mut impl Room, buffers: &Buffers) -> bool {
        let capacity = self.buffer.as_ref().map_or(0, |buffer| buffer.capacity());
        if bytes <= capacity {
            return self.charge(filled, room);
        }
        // Classes double, so what is appended in small pieces is copied once on average.
        let Some(mut larger) = self.take(bytes.max(2 * capacity), filled, room, buffers) else { return false };
        if let Some(buffer) = &self.buffer {
            larger.fill(buffer);
            self.copied_bytes += buffer.len();
        }
        self.buffer = Some(larger);
        true
    }

    /// The header of the next part lies in the raw bytes: drops it, and the surplus behind the part.
    fn cut_raw(&mut self, part: Part, surplus: usize) {
        if let (Some(wire), Some(buffer)) = (&mut self.wire, &self.buffer) {
            wire.push(&buffer[self.finished_bytes..][..part.header_bytes], self.finished_bytes);
        }
        self.start_part(part);
        let Some(buffer) = &mut self.buffer else { return };
        let raw_bytes = buffer.len() - self.finished_bytes;
        let arrived = raw_bytes - surplus - part.header_bytes;
        let body = arrived.min(part.body_bytes);
        let trailer = arrived - body;
        let from = self.finished_bytes + part.header_bytes;
        let moved = from..from + body;
        buffer.part_mut(0..moved.end).copy_within(moved, self.finished_bytes);
        self.copied_bytes += body;
        buffer.set_len(self.finished_bytes + body);
        if let Some(progress) = &mut self.part {
            progress.body_left -= body;
            progress.trailer_left -= trailer;
        }
    }

    fn check_parts<R: Rule>(&self, rule: &R) -> Result<(), CutError<R::Error>> {
        let limit = rule.parts_max();
        if self.parts >= limit { Err(CutError::EndlessParts { limit }) } else { Ok(()) }
    }

    /// The header of the next part is known; its body is to come.
    fn start_part(&mut self, part: Part) {
        self.parts += 1;
        self.part = Some(Progress { body_left: part.body_bytes, trailer_left: part.trailer_bytes, last: part.last });
    }

    /// Ends the current part if it is complete; gives the message with its last part.
    fn finish_part(&mut self, room: &mut impl Room) -> Option<Buffer> {
        let Some(Progress { body_left: 0, trailer_left: 0, last }) = self.part else { return None };
        self.part = None;
        self.finished_bytes = self.kept_bytes();
        (self.scanned, self.need_bytes) = (0, ANY_BYTES);
        if last { self.clear(room) } else { None }
    }

    fn may_lend(&mut self, bytes_min: usize, room: &mut impl Room) -> bool {
        self.lent || self.loan_bytes(bytes_min).is_some_and(|loan| self.charge(self.kept_bytes() + loan, room))
    }

    fn direct(&mut self, bytes_min: usize, room: &mut impl Room) -> Option<Direct> {
        let missing = self.loan_bytes(bytes_min)?;
        if !self.charge(self.kept_bytes() + missing, room) {
            return None;
        }
        let buffer = self.buffer.take()?;
        (self.lent, self.lends) = (true, true);
        Some(Direct { missing, buffer })
    }

    /// How many bytes to lend.
    fn loan_bytes(&self, bytes_min: usize) -> Option<usize> {
        let bytes_min = if self.lends { 1 } else { bytes_min };
        let part = self.part.filter(|part| part.trailer_left == 0 && part.body_left >= bytes_min)?;
        let buffer = self.buffer.as_ref()?;
        // Without room the buffer did not grow when the part began.
        (buffer.room() >= part.body_left).then(|| part.body_left.min(buffer.len().max(LOAN_BYTES)))
    }

    fn give_back(&mut self, direct: Direct, received: usize, room: &mut impl Room) -> Option<Buffer> {
        if !std::mem::take(&mut self.lent) {
            return None;
        }
        let Direct { mut buffer, missing } = direct;
        let received = received.min(missing);
        buffer.set_len(buffer.len() + received);
        self.buffer = Some(buffer);
        if let Some(part) = &mut self.part {
            part.body_left -= received;
        }
        self.finish_part(room)
    }
}

/// A buffer on loan: the engine receives up to `missing` bytes into it, behind those that are there.
#[derive(Debug)]
pub struct Direct {
    buffer: Buffer,
    missing: usize,
}

impl Direct {
    /// Where the missing bytes belong. Valid as long as this value lives, also when it moves.
    pub fn room_mut(&mut self) -> &mut [u8] {
        let range = self.buffer.len()..self.buffer.len() + self.missing;
        self.buffer.part_mut(range)
    }

    /// Bytes that are missing.
    pub fn missing(&self) -> usize {
        self.missing
    }
}
