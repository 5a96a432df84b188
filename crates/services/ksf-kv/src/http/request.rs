//! What the head of a request says, as places in the message: so that it is read once, and costs no memory of its own.

use std::borrow::Cow;

use ksf_proto::http1::{self, Asked, BodyLength};
use ksf_store::log::Purpose;

use super::conditions::Conditions;
use super::plan::has_password;
use crate::settings::Settings;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Head,
    Put,
    Post,
    Delete,
    /// One of HTTP that no target here takes.
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
    /// `Content-Range`.
    content_range: Option<Place>,
    content_type: Option<Place>,
    /// A browser sends the request for a page, not for the person in front of it: `Sec-Fetch-Site` is other than `none`.
    is_for_page: bool,
    /// One of them is there more than once.
    is_twice: bool,
}

impl Fields {
    fn of(head: &[u8], asked: &Asked<'_, '_>) -> Self {
        let mut fields = Self::default();
        for (name, value) in asked.fields() {
            let is = |known: &str| name.eq_ignore_ascii_case(known);
            if name.len() == 14 && is("sec-fetch-site") {
                fields.is_for_page |= !value.trim_ascii().eq_ignore_ascii_case(b"none");
                continue;
            }
            let field = match name.len() {
                4 if is("host") => &mut fields.host,
                5 if is("range") => &mut fields.range,
                6 if is("origin") => &mut fields.origin,
                8 if is("if-match") => &mut fields.if_match,
                8 if is("if-range") => &mut fields.if_range,
                12 if is("content-type") => &mut fields.content_type,
                13 if is("content-range") => &mut fields.content_range,
                13 if is("if-none-match") => &mut fields.if_none_match,
                13 if is("authorization") => &mut fields.authorization,
                14 if is("content-length") => &mut fields.length,
                _ => continue,
            };
            let is_twice = field.replace(Place::of(value, head)).is_some();
            fields.is_twice |= is_twice;
        }
        // What a target in absolute form names, whatever the field says.
        fields.host = asked.authority().map(|authority| Place::of(authority.text().as_bytes(), head));
        fields
    }
}

/// A request whose head was read. What takes `message` is asked with the message that begins with that head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(super) method: Method,
    framing: http1::Request,
    head_bytes: usize,
    /// Path and query; `None` if the target is no path.
    target: Option<(Place, Option<Place>)>,
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
                "OPTIONS" | "PATCH" | "TRACE" => Method::Other,
                _ => return Err(501_u16),
            };
            let place = |part: &str| Place::of(part.as_bytes(), head);
            let target = asked.target.filter(|target| target.path != "*");
            let target = target.map(|target| (place(target.path), target.query.map(place)));
            Ok((method, target, Fields::of(head, &asked)))
        };
        let (framing, looked) = http1::Request::parse_with(head, look).map_err(http1::BadHead::status)?;
        let (method, target, fields) = looked?;
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
        let (path, query) = self.target?;
        let path: &[u8] = match path.of_message(message) {
            b"" => b"/",
            path => path,
        };
        Some((path, query.map(|query| query.of_message(message))))
    }

    /// The authority of the target, else the value of `Host`.
    pub(super) fn host<'m>(&self, message: &'m [u8]) -> Option<&'m [u8]> {
        self.fields.host.map(|place| place.of_message(message))
    }

    fn authorization<'m>(&self, message: &'m [u8]) -> Option<&'m [u8]> {
        self.fields.authorization.map(|place| place.of_message(message))
    }

    /// True if its head has the password.
    pub(crate) fn has_password(&self, head: &[u8], settings: &Settings) -> bool {
        self.authorization(head).is_some_and(|given| has_password(given, settings))
    }

    /// True if a browser sends it for a page.
    pub(super) fn is_for_page(&self) -> bool {
        self.fields.origin.is_some() || self.fields.is_for_page
    }

    /// True if the body is a part of a value, or several parts, and says so.
    pub(super) fn is_partial(&self, message: &[u8]) -> bool {
        const PARTS: &[u8] = b"multipart/byteranges";
        let content_type = self.fields.content_type.map_or(&b""[..], |place| place.of_message(message).trim_ascii());
        let has_parts = content_type.get(..PARTS.len()).is_some_and(|front| front.eq_ignore_ascii_case(PARTS));
        self.fields.content_range.is_some() || has_parts
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
