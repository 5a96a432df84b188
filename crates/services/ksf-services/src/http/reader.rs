//! Where a stream of requests is: in a head, or in a body of which so much is to come.

use ksf::error::FramingError;
use ksf::framing::{Frame, Part};
use ksf::limits::Limits;
use ksf_proto::http1::{BadHead, Body, BodyLength, EmptyLines, Request, head_bytes};

/// Longest body of a request, in bytes: a tebibyte. One that says to be longer is refused when its head has arrived.
const BODY_BYTES_MAX: u64 = 1 << 40;

/// Cuts the requests of one connection.
#[derive(Debug)]
pub struct Reader {
    piece: Piece,
    /// The request that is under way, and the rest of its body.
    request: Option<(Request, Body)>,
    empty_lines: EmptyLines,
    /// Bytes of that body which have arrived, with what stands between its chunks.
    body_bytes: u64,
    /// The shard that serves the connection.
    pub(super) shard: usize,
    /// What to answer to the bytes that could not be cut.
    refusal_status: u16,
}

/// What the message that was just cut is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Head(Request),
    Body,
    /// Empty lines in front of a head.
    Empty,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            piece: Piece::Body,
            request: None,
            empty_lines: EmptyLines::default(),
            body_bytes: 0,
            shard: 0,
            refusal_status: 400,
        }
    }
}

impl Reader {
    pub(super) fn cut(&mut self, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        if let Some((_, body)) = &mut self.request {
            let bytes = body.take(buf).map_err(|_| FramingError::Malformed)?;
            self.body_bytes += bytes as u64;
            if self.body_bytes > BODY_BYTES_MAX {
                self.refusal_status = 413;
                return Err(FramingError::Malformed);
            }
            self.piece = Piece::Body;
            return Ok(part(bytes));
        }
        let empty_bytes = self.empty_lines.take(buf).map_err(|bad| self.malformed(bad))?;
        if empty_bytes > 0 {
            // Kept in front of a head they would begin a request, whose time runs out.
            self.piece = Piece::Empty;
            return Ok(part(empty_bytes));
        }
        let limit = limits.header_bytes_max;
        let Some(bytes) = head_bytes(buf, scanned) else {
            let too_long = buf.len() >= limit;
            return if too_long { Err(too_long_head(limit)) } else { Ok(Frame::Incomplete { need_bytes: None }) };
        };
        if bytes > limit {
            return Err(too_long_head(limit));
        }
        let request = Request::parse(&buf[..bytes]).map_err(|bad| self.malformed(bad))?;
        if matches!(request.body, BodyLength::Fixed(bytes) if bytes > BODY_BYTES_MAX) {
            self.refusal_status = 413;
            return Err(FramingError::Malformed);
        }
        self.request = Some((request, Body::new(request.body)));
        self.body_bytes = 0;
        self.piece = Piece::Head(request);
        Ok(part(bytes))
    }

    fn malformed(&mut self, bad: BadHead) -> FramingError {
        self.refusal_status = bad.status();
        FramingError::Malformed
    }

    /// What the last cut message is.
    pub(super) fn take_piece(&mut self) -> Piece {
        std::mem::replace(&mut self.piece, Piece::Body)
    }

    /// True when the request under way has arrived in full.
    pub(super) fn is_at_end(&self) -> bool {
        self.request.as_ref().is_some_and(|(_, body)| body.is_done())
    }

    /// True when a part of a body is to come.
    pub(super) fn is_mid_body(&self) -> bool {
        self.request.as_ref().is_some_and(|(_, body)| !body.is_done())
    }

    /// True when a part of the body under way has arrived.
    pub(super) fn has_begun_body(&self) -> bool {
        self.body_bytes > 0
    }

    /// The request under way, if it has arrived in full.
    pub(super) fn whole_request(&self) -> Option<&Request> {
        self.request.as_ref().filter(|(_, body)| body.is_done()).map(|(request, _)| request)
    }

    /// The request that has arrived in full; the next head follows.
    pub(super) fn finish_request(&mut self) -> Option<Request> {
        self.request.take().map(|(request, _)| request)
    }

    pub(super) fn refusal_status(&self) -> u16 {
        self.refusal_status
    }
}

fn too_long_head(limit: usize) -> FramingError {
    FramingError::HeaderTooLong { limit }
}

fn part(body_bytes: usize) -> Frame {
    Frame::Part(Part { header_bytes: 0, body_bytes, trailer_bytes: 0, last: true })
}
