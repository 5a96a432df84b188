//! Heads as a proxy passes them on: without the fields that are for one hop only (RFC 9110, section 7.6.1).

use super::fields::options;
use super::head::{Asked, BadHead, FIELDS_MAX, NO_TARGET, Request, is_unframed};
use super::target::Target;

/// How a proxy is named in `Via` (RFC 9110, section 7.6.3): a pseudonym, so that nothing of the machine is told.
const VIA: &[u8] = b"Via: 1.1 ksf\r\n";

/// Appends the head of a request for a backend. `keep_alive`: the proxy wants to use the connection again.
///
/// - The version is the client's, so that a backend never answers a client of HTTP/1.0 in chunks.
/// - A target in absolute form becomes a path, and its host the value of `Host` (RFC 9112, section 3.2.2).
/// - `Max-Forwards` of OPTIONS and TRACE is one less; at 0 the request must not be passed on: [`Request::max_forwards`].
///
/// # Errors
///
/// [`BadHead`], as [`Request::parse`]; nothing was appended.
pub fn forward_request(head: &[u8], keep_alive: bool, out: &mut Vec<u8>) -> Result<(), BadHead> {
    let put = |asked: Asked<'_, '_>| asked.target.map(|target| put_request(&asked, &target, keep_alive, out));
    Request::parse_with(head, put)?.1.ok_or(NO_TARGET)
}

fn put_request(asked: &Asked<'_, '_>, target: &Target<'_>, keep_alive: bool, out: &mut Vec<u8>) {
    out.extend_from_slice(asked.method.as_bytes());
    out.push(b' ');
    target.put(asked.method, out);
    out.extend_from_slice(if asked.minor == 0 { b" HTTP/1.0\r\n" } else { b" HTTP/1.1\r\n" });
    let counts_forwards = asked.max_forwards.is_some();
    if let Some(authority) = target.authority {
        put_field("Host", authority.text().as_bytes(), out);
    }
    put_fields(asked.fields, out, |name| match name.len() {
        4 => target.authority.is_some() && name.eq_ignore_ascii_case("host"),
        12 => counts_forwards && name.eq_ignore_ascii_case("max-forwards"),
        _ => false,
    });
    if let Some(forwards) = asked.max_forwards {
        put_field("Max-Forwards", forwards.saturating_sub(1).to_string().as_bytes(), out);
    }
    out.extend_from_slice(VIA);
    put_connection(asked.minor, keep_alive, out);
    out.extend_from_slice(b"\r\n");
}

/// Appends the head of a response for a client. `minor` is the version of the client's request, `keep_alive` whether
/// the proxy takes another request from it. `in_chunks`: the response has no length, and the proxy passes its body in chunks.
///
/// Fields that frame a body are left out where there is none to frame: of statuses below 200 and of 204, and
/// `Transfer-Encoding` for a client of HTTP/1.0, which gets no response in chunks.
///
/// # Errors
///
/// [`BadHead`]: it is no head of a response; nothing was appended.
pub fn forward_response(
    head: &[u8],
    minor: u8,
    keep_alive: bool,
    in_chunks: bool,
    out: &mut Vec<u8>,
) -> Result<(), BadHead> {
    let mut room = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut response = httparse::Response::new(&mut room);
    response.parse(head).map_err(|_| BadHead::Malformed("not the grammar of RFC 9112"))?;
    let Some(status) = response.code else { return Err(BadHead::Malformed("no status line")) };
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(&[100, 10, 1].map(|unit| b'0' + (status / unit % 10) as u8));
    out.push(b' ');
    out.extend_from_slice(response.reason.unwrap_or_default().as_bytes());
    out.extend_from_slice(b"\r\n");
    let (is_unframed, has_chunks) = (is_unframed(status), minor > 0);
    put_fields(response.headers, out, |name| match name.len() {
        14 => is_unframed && name.eq_ignore_ascii_case("content-length"),
        17 => (is_unframed || !has_chunks) && name.eq_ignore_ascii_case("transfer-encoding"),
        _ => false,
    });
    out.extend_from_slice(VIA);
    if in_chunks {
        out.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
    }
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

/// All fields but those of one hop and those to skip. `Transfer-Encoding` stays: the chunks are passed on as they came.
fn put_fields(fields: &[httparse::Header<'_>], out: &mut Vec<u8>, skip: impl Fn(&str) -> bool) {
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
    const ESSENTIAL: [&str; 4] = ["transfer-encoding", "content-length", "host", "max-forwards"];
    let named = |name: &str| {
        fields
            .iter()
            .filter(|field| field.name.eq_ignore_ascii_case("connection"))
            .flat_map(|field| options(field.value))
            .any(|option| option.eq_ignore_ascii_case(name.as_bytes()))
    };
    for field in fields {
        let is = |known: &str| field.name.eq_ignore_ascii_case(known);
        if skip(field.name)
            || HOP.iter().any(|known| is(known))
            || !ESSENTIAL.iter().any(|known| is(known)) && named(field.name)
        {
            continue;
        }
        put_field(field.name, field.value, out);
    }
}

fn put_field(name: &str, value: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
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

    fn passed(head: &str) -> String {
        let mut out = Vec::new();
        forward_request(head.as_bytes(), true, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn absolute_target_is_passed_as_path_with_its_own_host() {
        for (line, host, passed_line, passed_host) in [
            ("GET http://a:1/p?q HTTP/1.1", "Host: b\r\n", "GET /p?q HTTP/1.1", "a:1"),
            ("GET http://a HTTP/1.0", "", "GET / HTTP/1.0", "a"),
            ("OPTIONS http://a HTTP/1.1", "hOST: a\r\n", "OPTIONS * HTTP/1.1", "a"),
        ] {
            let expected = format!("{passed_line}\r\nHost: {passed_host}\r\nX: 1\r\nVia: 1.1 ksf\r\n");
            let out = passed(&format!("{line}\r\n{host}X: 1\r\n\r\n"));
            assert!(out.starts_with(&expected), "{out}");
        }
        let mut out = Vec::new();
        for bad in
            ["GET / HTTP/1.1\r\nHost: a b\r\n\r\n", "GET x HTTP/1.1\r\nHost: a\r\n\r\n", "GET / HTTP/1.1\r\n\r\n"]
        {
            assert!(forward_request(bad.as_bytes(), true, &mut out).is_err() && out.is_empty(), "{bad:?}");
        }
    }

    #[test]
    fn max_forwards_is_one_less() {
        let head = |method: &str, forwards| {
            format!("{method} / HTTP/1.1\r\nHost: x\r\nConnection: max-forwards\r\nMax-Forwards: {forwards}\r\n\r\n")
        };
        assert!(passed(&head("OPTIONS", "10")).contains("\r\nMax-Forwards: 9\r\n"));
        assert!(passed(&head("TRACE", "1")).contains("\r\nMax-Forwards: 0\r\n"));
        assert!(passed(&head("GET", "10")).contains("\r\nMax-Forwards: 10\r\n"));
    }

    #[test]
    fn framing_of_responses_without_a_body_stays_behind() {
        for status in ["100 Continue", "103 Early Hints", "204 No Content"] {
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n");
            let mut out = Vec::new();
            forward_response(head.as_bytes(), 1, true, false, &mut out).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), format!("HTTP/1.1 {status}\r\nA: b\r\nVia: 1.1 ksf\r\n\r\n"));
        }
    }

    #[test]
    fn responses_are_told_whether_the_connection_stays() {
        let head = b"HTTP/1.0 404 Not Found\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nServer: z\r\n\r\n";
        let forward = |minor, keep_alive| {
            let mut out = Vec::new();
            forward_response(head, minor, keep_alive, false, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let fixed = "HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\nServer: z\r\nVia: 1.1 ksf\r\n";
        assert_eq!(forward(1, true), format!("{fixed}\r\n"));
        // A client of HTTP/1.0 gets no chunks: a body that has some is not passed to it.
        let old = "HTTP/1.1 404 Not Found\r\nServer: z\r\nVia: 1.1 ksf\r\nConnection: keep-alive\r\n\r\n";
        assert_eq!(forward(0, true), old);
        assert_eq!(forward(1, false), format!("{fixed}Connection: close\r\n\r\n"));
    }
}
