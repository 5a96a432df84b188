//! Where a stream of requests is: in a head, or in a body of which so much is to come.
//!
//! A request is one message, head and body, however it arrives. Only where a client waits with the body until it is told to
//! go on, the head is a message of its own.

use ksf::CloseReason;
use ksf::error::FramingError;
use ksf::framing::{Frame, Part};
use ksf::limits::Limits;
use ksf_proto::http1::{Body, BodyLength, EmptyLines, head_bytes};

use super::Request;

/// Longest head: a key of 65,535 bytes, each of which is escaped, and the fields.
const HEAD_BYTES_MAX: usize = 256 << 10;

/// Longest request of a connection on which no request had the password, head and body, where one is needed.
pub(crate) const STRANGER_BYTES_MAX: usize = 16 << 10;

/// Cuts the requests of one connection.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    /// What the message is that was cut last.
    piece: Option<Piece>,
    /// The request that is under way, where its head was read and its end is not known, or was not asked for.
    open: Option<Box<Open>>,
    empty_lines: EmptyLines,
    /// What to answer to bytes that could not be cut.
    status: Option<u16>,
    /// The status for a request above [`STRANGER_BYTES_MAX`], while that is the limit.
    stranger: Option<u16>,
    /// The same for requests without the password behind one that had it.
    refusal: Option<u16>,
}

#[derive(Clone, Copy, Debug)]
enum Piece {
    Whole(Request),
    Head(Request),
    /// A body whose head was handed over.
    Rest,
    /// Empty lines in front of a head.
    Empty,
}

#[derive(Debug)]
struct Open {
    request: Request,
    /// The head, if it was handed over.
    head: Option<Vec<u8>>,
    /// The rest of a body in chunks, which begins so many bytes behind the front of the message.
    body: Body,
    at: usize,
}

/// What was handed over.
#[derive(Debug)]
pub(crate) enum Taken {
    /// A request, which is the message.
    Whole(Request),
    /// The head of a request, which is the message; the client waits.
    Head(Request),
    /// A request whose body is the message, put together.
    Joined(Request, Vec<u8>),
}

impl Reader {
    /// One whose requests have [`STRANGER_BYTES_MAX`] bytes at most unless they are admitted, or are refused with this status. The head of
    /// a request has the limit of the request before.
    pub(crate) fn of_stranger(status: u16) -> Self {
        Self { stranger: Some(status), refusal: Some(status), ..Self::default() }
    }

    /// True unless the last request whose head was read was admitted, where it must be.
    pub(crate) fn is_of_stranger(&self) -> bool {
        self.stranger.is_some()
    }

    /// Longest request, head and body.
    fn request_bytes_max(&self, limits: &Limits) -> usize {
        match self.stranger {
            Some(_) => STRANGER_BYTES_MAX.min(limits.message_bytes_max),
            None => limits.message_bytes_max,
        }
    }

    /// `admits`: whether the request with this head has the password.
    pub(crate) fn cut(
        &mut self,
        buf: &[u8],
        scanned: usize,
        limits: &Limits,
        admits: impl Fn(&Request, &[u8]) -> bool,
    ) -> Result<Frame, FramingError> {
        if self.open.is_none() {
            let empty_bytes = self.empty_lines.take(buf).map_err(|bad| self.malformed(bad.status()))?;
            if empty_bytes > 0 {
                // Kept in front of a head they would begin a request, whose time runs out.
                self.piece = Some(Piece::Empty);
                return Ok(part(empty_bytes));
            }
            let limit = HEAD_BYTES_MAX.min(self.request_bytes_max(limits));
            let head_bytes = match head_bytes(buf, scanned) {
                Some(bytes) if bytes <= limit => bytes,
                None if buf.len() < limit => return Ok(Frame::Incomplete { need_bytes: None }),
                _ => return Err(FramingError::HeaderTooLong { limit }),
            };
            let request = match Request::read(&buf[..head_bytes]) {
                Ok(request) => request,
                Err(status) => return Err(self.malformed(status)),
            };
            self.stranger = self.refusal.filter(|_| !admits(&request, &buf[..head_bytes]));
            let mut waits = request.expects_continue();
            if let BodyLength::Fixed(bytes) = request.body_length() {
                let total = usize::try_from(bytes).ok().and_then(|bytes| head_bytes.checked_add(bytes));
                let Some(total) = total.filter(|total| *total <= self.request_bytes_max(limits)) else {
                    return Err(self.malformed(self.stranger.unwrap_or(413)));
                };
                waits &= buf.len() < total;
                if !waits {
                    self.piece = Some(Piece::Whole(request));
                    return Ok(part(total));
                }
            }
            let (head, at) = if waits { (Some(buf[..head_bytes].to_vec()), 0) } else { (None, head_bytes) };
            self.open = Some(Box::new(Open { request, head, body: Body::new(request.body_length()), at }));
            if waits {
                self.piece = Some(Piece::Head(request));
                return Ok(part(head_bytes));
            }
        }
        self.cut_body(buf, limits)
    }

    /// The body of a request whose head is known.
    fn cut_body(&mut self, buf: &[u8], limits: &Limits) -> Result<Frame, FramingError> {
        let bytes_max = self.request_bytes_max(limits);
        let Some(open) = &mut self.open else { return Ok(Frame::Incomplete { need_bytes: None }) };
        if let BodyLength::Fixed(bytes) = open.request.body_length() {
            // It was found to be no more than a message may have.
            self.piece = Some(Piece::Rest);
            return Ok(part(bytes as usize));
        }
        let from = open.at.min(buf.len());
        let Ok(taken) = open.body.take(&buf[from..]) else { return Err(self.malformed(400)) };
        open.at = from + taken;
        if open.at + open.head.as_ref().map_or(0, Vec::len) > bytes_max {
            return Err(self.malformed(self.stranger.unwrap_or(413)));
        }
        if !open.body.is_done() {
            return Ok(Frame::Incomplete { need_bytes: None });
        }
        let end = open.at;
        if open.head.is_some() {
            self.piece = Some(Piece::Rest);
        } else {
            self.piece = Some(Piece::Whole(open.request));
            self.open = None;
        }
        Ok(part(end))
    }

    fn malformed(&mut self, status: u16) -> FramingError {
        self.status = Some(status);
        FramingError::Malformed
    }

    /// True if the reply to what was cut last is a status.
    pub(crate) fn has_short_reply(&self) -> bool {
        match (&self.piece, &self.open) {
            (Some(Piece::Head(_) | Piece::Empty), _) => true,
            (Some(Piece::Whole(request)), _) => request.has_short_reply(),
            (_, Some(open)) => open.request.has_short_reply(),
            _ => false,
        }
    }

    /// The request that was cut last, if it is the whole message.
    pub(crate) fn whole_request(&self) -> Option<&Request> {
        match &self.piece {
            Some(Piece::Whole(request)) => Some(request),
            _ => None,
        }
    }

    /// Bytes of a head whose body is to come.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.open.as_ref().and_then(|open| open.head.as_ref()).map_or(0, Vec::capacity)
    }

    /// What the message is that was cut last.
    pub(crate) fn take(&mut self, message: &[u8]) -> Option<Taken> {
        match self.piece.take()? {
            Piece::Whole(request) => Some(Taken::Whole(request)),
            Piece::Head(request) => Some(Taken::Head(request)),
            Piece::Empty => None,
            Piece::Rest => {
                let Open { request, head, .. } = *self.open.take()?;
                let mut whole = head.unwrap_or_default();
                whole.extend_from_slice(message);
                Some(Taken::Joined(request, whole))
            }
        }
    }

    /// True if a body is to come whose head was handed over.
    pub(crate) fn awaits_body(&self) -> bool {
        self.open.is_some()
    }

    /// The status for a connection that ends for what it sent, or for how slowly.
    pub(crate) fn status(&self, reason: CloseReason) -> u16 {
        match reason {
            CloseReason::EndlessHeader if self.open.is_none() => 431,
            CloseReason::EndlessHeader | CloseReason::OversizedMessage => 413,
            CloseReason::AssemblyTimeout => 408,
            _ => self.status.unwrap_or(400),
        }
    }
}

fn part(bytes: usize) -> Frame {
    Frame::Part(Part { header_bytes: 0, body_bytes: bytes, trailer_bytes: 0, last: true })
}

#[cfg(test)]
mod tests;
