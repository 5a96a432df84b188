//! What the head of a request says, as places in the message: so that it is read once, and costs no memory of its own.

use std::borrow::Cow;

use ksf_proto::http1::{self, Asked, BodyLength};
use ksf_store::log::Purpose;

use super::conditions::Conditions;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Head,
    Put,
    Post,
    Delete,
    Other,
}

/// Where something lies in a message.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    start: u32,
    end: u32,
}

impl Place {
    /// Where this part of the message is.
    fn of(part: &[u8], message: &[u8]) -> Self {
        let start = part.as_ptr().addr().wrapping_sub(message.as_ptr().addr());
        // What is no part of it is nowhere: an empty value has no address that matters.
        let place = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        Self { start: place(start), end: place(start.saturating_add(part.len())) }
    }

    fn of_message(self, message: &[u8]) -> &[u8] {
        message.get(self.start as usize..self.end as usize).unwrap_or_default()
    }
}

/// The fields that matter here.
#[derive(Clone, Copy, Debug, Default)]
struct Fields {
    host: Option<Place>,
    origin: Option<Place>,
    authorization: Option<Place>,
    length: Option<Place>,
    range: Option<Place>,
    if_range: Option<Place>,
    if_match: Option<Place>,
    if_none_match: Option<Place>,
    /// One of them is there more than once.
    is_twice: bool,
}

impl Fields {
    fn of(head: &[u8], asked: &Asked<'_, '_>) -> Self {
        let mut fields = Self::default();
        for (name, value) in asked.fields() {
            let is = |known: &str| name.eq_ignore_ascii_case(known);
            let field = match name.len() {
                4 if is("host") => &mut fields.host,
                5 if is("range") => &mut fields.range,
                6 if is("origin") => &mut fields.origin,
                8 if is("if-match") => &mut fields.if_match,
                8 if is("if-range") => &mut fields.if_range,
                13 if is("if-none-match") => &mut fields.if_none_match,
                13 if is("authorization") => &mut fields.authorization,
                14 if is("content-length") => &mut fields.length,
                _ => continue,
            };
            let is_twice = field.replace(Place::of(value, head)).is_some();
            fields.is_twice |= is_twice;
        }
        fields
    }
}

/// A request whose head was read. What takes `message` is asked with the message that begins with that head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(super) method: Method,
    framing: http1::Request,
    head_bytes: usize,
    target: Place,
    fields: Fields,
}

impl Request {
    /// Reads a whole head.
    ///
    /// # Errors
    ///
    /// The status to answer.
    pub(super) fn read(head: &[u8]) -> Result<Self, u16> {
        let look = |asked: Asked<'_, '_>| {
            let method = match asked.method {
                "GET" => Method::Get,
                "HEAD" => Method::Head,
                "PUT" => Method::Put,
                "POST" => Method::Post,
                "DELETE" => Method::Delete,
                _ => Method::Other,
            };
            (method, Place::of(asked.target.as_bytes(), head), Fields::of(head, &asked))
        };
        let (framing, (method, target, fields)) =
            http1::Request::parse_with(head, look).map_err(http1::BadHead::status)?;
        if fields.is_twice {
            return Err(400);
        }
        Ok(Self { method, framing, head_bytes: head.len(), target, fields })
    }

    pub(super) fn body_length(&self) -> BodyLength {
        self.framing.body
    }

    pub(super) fn expects_continue(&self) -> bool {
        self.framing.expects_continue
    }

    pub(super) fn minor(&self) -> u8 {
        self.framing.minor
    }

    pub(super) fn keep_alive(&self) -> bool {
        self.framing.keep_alive
    }

    /// Whether the head says how long the body is.
    pub(super) fn has_length(&self) -> bool {
        self.framing.body == BodyLength::Chunked || self.fields.length.is_some()
    }

    /// What it takes room in the log for, if it does.
    pub(crate) fn purpose(&self) -> Option<Purpose> {
        match self.method {
            Method::Put | Method::Post => Some(Purpose::Writing),
            Method::Delete => Some(Purpose::Removing),
            Method::Get | Method::Head | Method::Other => None,
        }
    }

    /// Whether the response has neither a value nor a list in it.
    pub(crate) fn has_short_reply(&self) -> bool {
        self.method != Method::Get
    }

    /// Path and query; `None` if the target is no path.
    pub(super) fn target<'m>(&self, message: &'m [u8]) -> Option<(&'m [u8], Option<&'m [u8]>)> {
        const SCHEME: &[u8] = b"http://";
        let target = self.target.of_message(message);
        let target = match target {
            [b'/', ..] => target,
            _ => {
                let (scheme, rest) = target.split_at_checked(SCHEME.len())?;
                if !scheme.eq_ignore_ascii_case(SCHEME) {
                    return None;
                }
                let path = rest.iter().position(|byte| *byte == b'/');
                path.map_or(&b"/"[..], |path| &rest[path..])
            }
        };
        Some(match target.iter().position(|byte| *byte == b'?') {
            Some(mark) => (&target[..mark], Some(&target[mark + 1..])),
            None => (target, None),
        })
    }

    pub(super) fn host<'m>(&self, message: &'m [u8]) -> Option<&'m [u8]> {
        self.fields.host.map(|place| place.of_message(message))
    }

    pub(super) fn authorization<'m>(&self, message: &'m [u8]) -> Option<&'m [u8]> {
        self.fields.authorization.map(|place| place.of_message(message))
    }

    /// Whether a browser sends it for a page.
    pub(super) fn has_origin(&self) -> bool {
        self.fields.origin.is_some()
    }

    pub(super) fn conditions<'m>(&self, message: &'m [u8]) -> Conditions<'m> {
        let Fields { range, if_range, if_match, if_none_match, .. } = self.fields;
        let [range, if_range, if_match, if_none_match] =
            [range, if_range, if_match, if_none_match].map(|place| place.map(|place| place.of_message(message)));
        Conditions { range, if_range, if_match, if_none_match }
    }

    pub(super) fn body<'m>(&self, message: &'m [u8]) -> Cow<'m, [u8]> {
        let body = message.get(self.head_bytes..).unwrap_or_default();
        match self.framing.body {
            BodyLength::Chunked => http1::unchunked(body).into(),
            BodyLength::Fixed(_) | BodyLength::UntilClose => body.into(),
        }
    }
}
