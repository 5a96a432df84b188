//! Where requests go: `http://HOST[:PORT][/PATH][?QUERY]`, and the bytes that ask for it.

use std::fmt;

use crate::error::LoadError;
use crate::options::target::Target;

/// The port of a URL that names none (RFC 9110, section 4.2.1).
const PORT: u16 = 80;

/// A URL of the scheme `http`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Url {
    pub(crate) target: Target,
    /// Host and port as written.
    authority: String,
    /// The value of `Host`: the authority without a zone, which is of this machine alone (RFC 6874, section 3).
    host: String,
    /// Path and query, beginning with a slash.
    path: String,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Url, LoadError> {
        let invalid = |reason: &str| {
            LoadError::Usage(format!("invalid URL `{text}`: {reason} (expected http://HOST[:PORT][/PATH])"))
        };
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(invalid("it does not begin with http://"));
        };
        match scheme.to_ascii_lowercase().as_str() {
            "http" => {}
            "https" => return Err(invalid("there is no TLS here; load the server's plain port")),
            _ => return Err(invalid("only http is spoken here")),
        }
        // The part behind # is the client's own and never sent (RFC 9110, section 4.1).
        let rest = rest.split('#').next().unwrap_or_default();
        let (authority, path) = match rest.find(['/', '?']) {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        if authority.contains('@') {
            return Err(invalid("names and passwords are not sent; use --header 'Authorization: ...'"));
        }
        if !path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(invalid("blanks and other than ASCII letters must be percent-encoded"));
        }
        if authority.starts_with("unix:") {
            return Err(invalid("only TCP is spoken here"));
        }
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let target = Target::of_authority(authority, PORT)?;
        let zone = authority.find("%25").filter(|_| authority.starts_with('[')).zip(authority.find(']'));
        let host =
            zone.map_or(authority.to_owned(), |(from, to)| format!("{}{}", &authority[..from], &authority[to..]));
        Ok(Url { target, authority: authority.to_owned(), host, path })
    }

    /// The bytes of a request. `headers` are whole lines without their ends; `close` asks the server to close the
    /// connection after its answer (RFC 9112, section 9.6).
    pub(crate) fn request(&self, headers: &[String], close: bool) -> Box<[u8]> {
        let named = |name: &str| {
            headers.iter().any(|line| line.split(':').next().is_some_and(|have| have.eq_ignore_ascii_case(name)))
        };
        let mut text = format!("GET {} HTTP/1.1\r\n", self.path);
        if !named("host") {
            text += &format!("Host: {}\r\n", self.host);
        }
        if !named("user-agent") {
            text += concat!("User-Agent: ksf-load/", env!("CARGO_PKG_VERSION"), "\r\n");
        }
        for line in headers {
            text += &format!("{line}\r\n");
        }
        if close {
            text += "Connection: close\r\n";
        }
        text += "\r\n";
        text.into_bytes().into()
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.path)
    }
}

/// Checks one `--header`.
pub(crate) fn check_header(line: &str) -> Result<(), LoadError> {
    let usage = |reason: &str| Err(LoadError::Usage(format!("--header `{line}`: {reason}")));
    let Some((name, value)) = line.split_once(':') else { return usage("write `Name: value`") };
    if !is_token(name) {
        return usage("the name is no token");
    }
    if value.bytes().any(|byte| byte < b' ' && byte != b'\t' || byte == 0x7f) {
        return usage("the value has control characters");
    }
    match name.to_ascii_lowercase().as_str() {
        "connection" => usage("whether a connection is kept is said by --requests-per-connection and --close"),
        "content-length" | "transfer-encoding" => usage("requests have no body"),
        _ => Ok(()),
    }
}

/// Whether the text can be the name of a field (RFC 9110, section 5.6.2).
pub(crate) fn is_token(text: &str) -> bool {
    let is_of_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_of_token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart() {
        for (text, target, authority, path) in [
            ("http://h", "h:80", "h", "/"),
            ("HTTP://h:8080/a/b?c=d#e", "h:8080", "h:8080", "/a/b?c=d"),
            ("http://[::1]:81?x", "[::1]:81", "[::1]:81", "/?x"),
            ("http://h:/", "h:80", "h:", "/"),
            ("http://[::1]:", "[::1]:80", "[::1]:", "/"),
            ("http://h:00080/", "h:80", "h:00080", "/"),
            ("http://[fe80::1%25lo]:81/", "[fe80::1%lo]:81", "[fe80::1%25lo]:81", "/"),
            ("http://[fe80::1%25eth0.1]", "[fe80::1%eth0.1]:80", "[fe80::1%25eth0.1]", "/"),
            ("http://[FE80::1%25a%2D~_]", "[FE80::1%a-~_]:80", "[FE80::1%25a%2D~_]", "/"),
        ] {
            let url = Url::parse(text).unwrap();
            assert_eq!((url.target.to_string().as_str(), url.authority.as_str()), (target, authority), "{text}");
            assert_eq!(url.path, path, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_asked_for_is_refused() {
        for (text, reason) in [
            ("h:80/", "http://"),
            ("https://h/", "TLS"),
            ("ftp://h/", "only http"),
            ("http://u:p@h/", "--header"),
            ("http://h/a b", "percent-encoded"),
            ("http://h/a\r\nX: y", "percent-encoded"),
            ("http://", "host is empty"),
            ("http://unix:/run/x", "only TCP"),
        ] {
            let error = Url::parse(text).unwrap_err();
            assert_eq!(error.exit_code(), 64, "{text}");
            assert!(error.to_string().contains(reason), "{text}: {error}");
        }
        // A port is decimal digits (RFC 3986, section 3.2.3), not a number as options take them.
        for port in [
            "x",
            "0x50",
            "+80",
            "-1",
            " 80",
            "80 ",
            "8e1",
            "80.0",
            "1k",
            "0",
            "65536",
            "18446744073709551696",
            "\u{661}",
        ] {
            for host in ["h", "[::1]"] {
                let error = Url::parse(&format!("http://{host}:{port}/")).unwrap_err();
                assert_eq!(error.exit_code(), 65, "{host}:{port}: {error}");
            }
        }
        for text in [
            "http://::1/",
            "http://h:80:80/",
            "http://[::1/",
            "http://[::1]x/",
            "http://[h]/",
            "http://[127.0.0.1]/",
            "http://[]/",
            "http://:80/",
            "http://h b/",
            "http://[fe80::1%lo]/",
            "http://[fe80::1%25]/",
            "http://[fe80::1%25a b]/",
            "http://[fe80::1%25%2f]/",
            "http://[fe80::1%25%]/",
            "http://h%25lo/",
            "http://a,b/",
            "http://h\\x/",
        ] {
            assert_eq!(Url::parse(text).unwrap_err().exit_code(), 64, "{text}");
        }
    }

    #[test]
    fn zone_is_not_told_to_the_server() {
        let text = |url: &str| String::from_utf8(Url::parse(url).unwrap().request(&[], false).into_vec()).unwrap();
        assert!(text("http://[fe80::1%25lo]:81/").contains("\r\nHost: [fe80::1]:81\r\n"));
        assert!(text("http://[fe80::1]:81/").contains("\r\nHost: [fe80::1]:81\r\n"));
    }

    #[test]
    fn requests_are_what_a_server_reads() {
        let url = Url::parse("http://h:1/p").unwrap();
        let text = |headers: &[&str], close| {
            let headers: Vec<String> = headers.iter().map(|line| line.to_string()).collect();
            String::from_utf8(url.request(&headers, close).into_vec()).unwrap()
        };
        let agent = concat!("User-Agent: ksf-load/", env!("CARGO_PKG_VERSION"));
        assert_eq!(text(&[], true), format!("GET /p HTTP/1.1\r\nHost: h:1\r\n{agent}\r\nConnection: close\r\n\r\n"));
        assert_eq!(
            text(&["host: other", "User-agent: me"], false),
            "GET /p HTTP/1.1\r\nhost: other\r\nUser-agent: me\r\n\r\n"
        );
    }

    #[test]
    fn headers_that_would_break_the_request_are_refused() {
        assert!(check_header("X-A: b\tc").is_ok());
        for wrong in ["nothing", ": x", "A B: x", "A: x\r\nB: y", "Connection: close", "content-length: 3"] {
            assert_eq!(check_header(wrong).unwrap_err().exit_code(), 64, "{wrong}");
        }
    }
}
