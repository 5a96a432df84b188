//! HTTP/1 (RFC 9112): where a message ends, and what a server or a proxy must know to answer or forward it.
//!
//! ```text
//!   stream = head body head body ...        head: until an empty line; read as a whole, at most so many bytes
//!                                           body: counted ([`Body`]) as it passes, in pieces of any size
//! ```
//!
//! A head says how long its body is ([`BodyLength`]); a [`Body`] then takes pieces off the stream until the message is
//! over. Nothing is buffered here: the reader of the stream keeps the beginning of a head, and bodies pass. Where two
//! readers could disagree about the end of a message (smuggled requests, RFC 9112 section 11.2) the message is refused.

mod body;
mod fields;
mod forward;
mod head;
mod target;

pub use body::{Body, BodyLength, CHUNK_END, LAST_CHUNK, MalformedBody, begin_chunk, unchunked};
pub use forward::{forward_request, forward_response};
pub use head::{Asked, BadHead, EmptyLines, FIELDS_MAX, Request, Response, head_bytes};
pub use target::{Authority, Target};

/// The reason phrase of a status this crate's users send; empty for others (RFC 9112, section 4 allows that).
pub fn reason(status: u16) -> &'static str {
    match status {
        100 => "Continue",
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        206 => "Partial Content",
        304 => "Not Modified",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        411 => "Length Required",
        412 => "Precondition Failed",
        413 => "Content Too Large",
        414 => "URI Too Long",
        416 => "Range Not Satisfiable",
        417 => "Expectation Failed",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        507 => "Insufficient Storage",
        _ => "",
    }
}
