//! Targets of requests (RFC 9112, section 3.2) and the authorities in them and in `Host` (RFC 3986, section 3.2).

use std::net::{Ipv4Addr, Ipv6Addr};

/// A host and a port, as `Host` and targets in absolute form have them: without a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Authority<'h> {
    text: &'h str,
    host: &'h str,
    port: Option<u16>,
}

impl<'h> Authority<'h> {
    /// Reads an authority: a name, an IPv4 address, or an IPv6 address in brackets and without a zone, and a port of
    /// 1 to 65535, which may be empty. `None` for anything else. The empty text is an authority with an empty host: a
    /// target without an authority has it in `Host`.
    ///
    /// A name may have all characters of RFC 3986 but the comma, which stands between two values of a field.
    pub fn parse(text: &'h str) -> Option<Self> {
        let (host, port) = match text.strip_prefix('[') {
            Some(bracketed) => {
                let (address, behind) = bracketed.split_once(']')?;
                address.parse::<Ipv6Addr>().ok()?;
                let port = if behind.is_empty() { None } else { Some(behind.strip_prefix(':')?) };
                (&text[..address.len() + 2], port)
            }
            None => {
                let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
                if !is_name(host.as_bytes()) || host.is_empty() && port.is_some() {
                    return None;
                }
                (host, port)
            }
        };
        let port = match port {
            None | Some("") => None,
            Some(digits) => Some(port_number(digits)?),
        };
        Some(Self { text, host, port })
    }

    /// The whole of it.
    pub fn text(&self) -> &'h str {
        self.text
    }

    /// The host, an IPv6 address with its brackets.
    pub fn host(&self) -> &'h str {
        self.host
    }

    /// The port, if one is named.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// True if the host is an address, so that no name was resolved to reach it.
    pub fn is_address(&self) -> bool {
        self.host.starts_with('[') || self.host.parse::<Ipv4Addr>().is_ok()
    }
}

/// Decimal digits alone: at most five, and from 1 to 65535.
fn port_number(digits: &str) -> Option<u16> {
    let is_number = digits.len() <= 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
    if is_number { digits.parse().ok().filter(|port| *port > 0) } else { None }
}

/// `reg-name` without the comma.
fn is_name(mut rest: &[u8]) -> bool {
    while let [byte, behind @ ..] = rest {
        rest = match (byte, behind) {
            (b'%', [high, low, behind @ ..]) if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => behind,
            (byte, _) if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+;=".contains(byte) => behind,
            _ => return false,
        };
    }
    true
}

/// What a request is for: a path here, or on the host that the target names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target<'h> {
    /// The authority of a target in absolute form.
    pub authority: Option<Authority<'h>>,
    /// The path: begins with a slash, is empty behind an authority, or `*`.
    pub path: &'h str,
    /// What follows the first question mark.
    pub query: Option<&'h str>,
}

impl<'h> Target<'h> {
    /// Reads the target of a request that is not CONNECT: in origin form, in absolute form with the scheme `http`, or
    /// `*` of OPTIONS. `None` for anything else.
    pub fn parse(method: &str, text: &'h str) -> Option<Self> {
        const SCHEME: &str = "http://";
        if !has_target_bytes(text) {
            return None;
        }
        if text == "*" {
            return (method == "OPTIONS").then_some(Self { authority: None, path: text, query: None });
        }
        let (authority, rest) = if text.starts_with('/') {
            (None, text)
        } else {
            let (scheme, rest) = text.split_at_checked(SCHEME.len())?;
            let (authority, rest) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
            let authority = Authority::parse(authority).filter(|authority| !authority.host.is_empty());
            if !scheme.eq_ignore_ascii_case(SCHEME) {
                return None;
            }
            (Some(authority?), rest)
        };
        let (path, query) = rest.split_once('?').map_or((rest, None), |(path, query)| (path, Some(query)));
        Some(Self { authority, path, query })
    }

    /// Appends the target as the server of its authority gets it: the path, or `*` for OPTIONS of the whole server
    /// (RFC 9112, section 3.2.4).
    pub(super) fn put(&self, method: &str, out: &mut Vec<u8>) {
        let path = match (self.path, self.query) {
            ("", None) if method == "OPTIONS" => "*",
            ("", _) => "/",
            (path, _) => path,
        };
        out.extend_from_slice(path.as_bytes());
        if let Some(query) = self.query {
            out.push(b'?');
            out.extend_from_slice(query.as_bytes());
        }
    }
}

/// True if a target has no bytes that some reader takes for its end: other than visible ASCII, and `#`, which begins
/// what a client keeps to itself.
pub(super) fn has_target_bytes(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_are_a_host_and_a_port() {
        for (text, host, port) in [
            ("h", "h", None),
            ("h:80", "h", Some(80)),
            ("h:", "h", None),
            ("a-b._~!$&'()*+;=%41", "a-b._~!$&'()*+;=%41", None),
            ("127.0.0.1:65535", "127.0.0.1", Some(65535)),
            ("[::1]", "[::1]", None),
            ("[::ffff:1.2.3.4]:00080", "[::ffff:1.2.3.4]", Some(80)),
            ("", "", None),
        ] {
            let read = Authority::parse(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((read.host(), read.port(), read.text()), (host, port, text));
        }
        for wrong in [
            "a b",
            "a\tb",
            "a,b",
            "u@h",
            "u:p@h",
            "h:x",
            "h:-1",
            "h:+1",
            "h:0",
            "h:65536",
            "h:000080",
            "h:0x50",
            "h:80:evil",
            "h: 80",
            "::1",
            ":80",
            "[::1",
            "[::1]x",
            "[::1].evil.example:80",
            "[::1]:80:80",
            "[::1]80",
            "[fe80::1%25lo]",
            "[fe80::1%lo]",
            "[]",
            "[x]",
            "[1.2.3.4]",
            "h%",
            "h%4",
            "h%zz",
            "h/",
            "h?",
            "h#",
            "h\\",
            "\u{fc}",
            "h\0",
        ] {
            assert_eq!(Authority::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn targets_are_passed_on_in_origin_form() {
        for (method, text, authority, passed) in [
            ("GET", "/", None, "/"),
            ("GET", "//x/?a?b", None, "//x/?a?b"),
            ("GET", "http://h", Some("h"), "/"),
            ("GET", "HTTP://h:8?q", Some("h:8"), "/?q"),
            ("GET", "http://[::1]:8/a?", Some("[::1]:8"), "/a?"),
            ("OPTIONS", "*", None, "*"),
            ("OPTIONS", "http://h", Some("h"), "*"),
            ("OPTIONS", "http://h/", Some("h"), "/"),
            ("OPTIONS", "http://h?", Some("h"), "/?"),
        ] {
            let target = Target::parse(method, text).unwrap_or_else(|| panic!("{text}"));
            let mut out = Vec::new();
            target.put(method, &mut out);
            assert_eq!((target.authority.map(|read| read.text()), &*out), (authority, passed.as_bytes()), "{text}");
        }
        for wrong in [
            "",
            "x",
            "*",
            "h:80",
            "http:/h",
            "http://",
            "http:///x",
            "http://u@h/",
            "http://h:x/",
            "https://h/",
            "ftp://h/",
            "/a#b",
            "/\u{fc}",
            "/a b",
            "http://h#f",
            "?q",
            "http://a b/",
        ] {
            assert_eq!(Target::parse("GET", wrong), None, "{wrong:?}");
        }
    }
}
