//! Heads as a proxy passes them on: without the fields that are for one hop only (RFC 9110, section 7.6.1).

use super::fields::options;
use super::head::{BadHead, FIELDS_MAX};

/// How a proxy is named in `Via` (RFC 9110, section 7.6.3): a pseudonym, so that nothing of the machine is told.
const VIA: &[u8] = b"Via: 1.1 ksf\r\n";

/// Appends the head of a request for a backend. `keep_alive`: the proxy wants to use the connection again.
/// The version is the client's, so that a backend never answers a client of HTTP/1.0 in chunks.
pub fn forward_request(head: &[u8], keep_alive: bool, out: &mut Vec<u8>) -> Result<(), BadHead> {
    let mut room = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut room);
    request.parse(head).map_err(|_| BadHead::Malformed("not the grammar of RFC 9112"))?;
    let (Some(method), Some(target), Some(minor)) = (request.method, request.path, request.version) else {
        return Err(BadHead::Malformed("no request line"));
    };
    for part in [method.as_bytes(), b" ", target.as_bytes(), b" HTTP/1.", if minor == 0 { b"0" } else { b"1" }] {
        out.extend_from_slice(part);
    }
    out.extend_from_slice(b"\r\n");
    put_fields(request.headers, out);
    out.extend_from_slice(VIA);
    put_connection(minor, keep_alive, out);
    out.extend_from_slice(b"\r\n");
    Ok(())
}

/// Appends the head of a response for a client. `minor` is the version of the client's request, `keep_alive` whether
/// the proxy takes another request from it.
pub fn forward_response(head: &[u8], minor: u8, keep_alive: bool, out: &mut Vec<u8>) -> Result<(), BadHead> {
    let mut room = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut response = httparse::Response::new(&mut room);
    response.parse(head).map_err(|_| BadHead::Malformed("not the grammar of RFC 9112"))?;
    let Some(status) = response.code else { return Err(BadHead::Malformed("no status line")) };
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(&[100, 10, 1].map(|unit| b'0' + (status / unit % 10) as u8));
    out.push(b' ');
    out.extend_from_slice(response.reason.unwrap_or_default().as_bytes());
    out.extend_from_slice(b"\r\n");
    put_fields(response.headers, out);
    out.extend_from_slice(VIA);
    if status >= 200 {
        put_connection(minor, keep_alive, out);
    }
    out.extend_from_slice(b"\r\n");
    Ok(())
}

/// Nothing where the version says it already.
fn put_connection(minor: u8, keep_alive: bool, out: &mut Vec<u8>) {
    match (keep_alive, minor) {
        (false, _) => out.extend_from_slice(b"Connection: close\r\n"),
        (true, 0) => out.extend_from_slice(b"Connection: keep-alive\r\n"),
        (true, _) => {}
    }
}

/// All fields but those of one hop. `Transfer-Encoding` stays: the chunks are passed on as they came.
fn put_fields(fields: &[httparse::Header<'_>], out: &mut Vec<u8>) {
    const HOP: [&str; 8] = [
        "connection",
        "keep-alive",
        "proxy-connection",
        "te",
        "upgrade",
        "http2-settings",
        "proxy-authenticate",
        "proxy-authorization",
    ];
    // Fields that decide where the message ends cannot be talked away.
    const ESSENTIAL: [&str; 3] = ["transfer-encoding", "content-length", "host"];
    let named = |name: &str| {
        fields
            .iter()
            .filter(|field| field.name.eq_ignore_ascii_case("connection"))
            .flat_map(|field| options(field.value))
            .any(|option| option.eq_ignore_ascii_case(name.as_bytes()))
    };
    for field in fields {
        let is = |known: &str| field.name.eq_ignore_ascii_case(known);
        if HOP.iter().any(|known| is(known)) || !ESSENTIAL.iter().any(|known| is(known)) && named(field.name) {
            continue;
        }
        out.extend_from_slice(field.name.as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(field.value);
        out.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_one_hop_stay_behind() {
        let head =
            b"GET /a?b HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, X-Hop, Content-Length\r\nKeep-Alive: 5\r\n\
            X-Hop: 1\r\nTE: trailers\r\nUpgrade: h2c\r\nContent-Length: 3\r\nX: y\r\n\r\n";
        let mut out = Vec::new();
        forward_request(head, true, &mut out).unwrap();
        let expected = "GET /a?b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nX: y\r\nVia: 1.1 ksf\r\n\r\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        let mut out = Vec::new();
        forward_request(b"GET / HTTP/1.0\r\n\r\n", false, &mut out).unwrap();
        assert_eq!(out, b"GET / HTTP/1.0\r\nVia: 1.1 ksf\r\nConnection: close\r\n\r\n");
    }

    #[test]
    fn responses_are_told_whether_the_connection_stays() {
        let head = b"HTTP/1.0 404 Not Found\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nServer: z\r\n\r\n";
        let forward = |minor, keep_alive| {
            let mut out = Vec::new();
            forward_response(head, minor, keep_alive, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let fixed = "HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\nServer: z\r\nVia: 1.1 ksf\r\n";
        assert_eq!(forward(1, true), format!("{fixed}\r\n"));
        assert_eq!(forward(0, true), format!("{fixed}Connection: keep-alive\r\n\r\n"));
        assert_eq!(forward(1, false), format!("{fixed}Connection: close\r\n\r\n"));
    }
}
