//! Parses and authorises a request, as far as that needs no access to the store.

use std::borrow::Cow;

use ksf_proto::http1::Authority;
use ksf_store::format::KEY_BYTES_MAX;
use ksf_store::log::AppendError;
use ksf_store::store::UpdateError;

use super::Request;
use super::request::Method;
use super::response::{Response, Says};
use crate::commands::range::COUNT;
use crate::commands::{DENIED, Session, Standing};
use crate::settings::Settings;

/// A request that is permitted.
#[derive(Debug)]
pub(super) enum Plan<'m> {
    Get(Cow<'m, [u8]>),
    Put(Cow<'m, [u8]>),
    Delete(Cow<'m, [u8]>),
    /// The key is in the body.
    Post,
    List(ListPlan<'m>),
}

/// Keys to show.
#[derive(Debug)]
pub(super) struct ListPlan<'m> {
    pub(super) prefix: Cow<'m, [u8]>,
    pub(super) from: Cow<'m, [u8]>,
    pub(super) to: Option<Cow<'m, [u8]>>,
    pub(super) limit: usize,
}

/// Response to a request that is refused.
#[derive(Debug)]
pub(super) struct Refusal {
    status: u16,
    says: Says,
    text: Cow<'static, str>,
    closes: bool,
}

impl Refusal {
    pub(super) fn new(status: u16, text: impl Into<Cow<'static, str>>) -> Self {
        Self { status, says: Says::Nothing, text: text.into(), closes: false }
    }

    fn method(allowed: &'static str) -> Self {
        Self { says: Says::Allow(allowed), ..Self::new(405, format!("this target supports {allowed}")) }
    }

    pub(super) fn write(&self, response: &mut Response<'_>) {
        response.keep_alive &= !self.closes;
        response.text(self.status, self.says, &self.text);
    }
}

impl From<UpdateError> for Refusal {
    fn from(error: UpdateError) -> Self {
        match error {
            UpdateError::Append(AppendError::Full) => {
                Self::new(507, "the log is full: nothing can be written until keys are deleted")
            }
            UpdateError::Append(AppendError::TooLong { .. }) | UpdateError::TooLong { .. } => {
                Self::new(413, error.to_string())
            }
            UpdateError::Memory { .. } => Self::new(507, error.to_string()),
            UpdateError::Append(AppendError::Failed) | UpdateError::Undone => Self::new(500, error.to_string()),
        }
    }
}

impl<'m> Plan<'m> {
    /// Plans a request by its head, with which `message` begins.
    pub(super) fn of(
        request: &Request,
        message: &'m [u8],
        settings: &Settings,
        session: &Session,
    ) -> Result<Self, Refusal> {
        admit(request, message, settings, session)?;
        if request.method == Method::Other {
            return Err(Refusal::method("GET, HEAD, PUT, POST, DELETE"));
        }
        // RFC 9110, section 14.5. Stored as if it were the whole, it would replace what it is a part of.
        if matches!(request.method, Method::Put | Method::Post) && request.is_partial(message) {
            return Err(Refusal::new(
                400,
                "a value is written as a whole: send it without Content-Range and multipart/byteranges",
            ));
        }
        let (path, query) =
            request.target(message).ok_or_else(|| Refusal::new(400, "the target of a request is /KEY, or /"))?;
        let needs_length = || Refusal::new(411, "the length of the body is missing: send Content-Length, or chunks");
        let path = &path[1..];
        if path.is_empty() {
            return match request.method {
                Method::Get | Method::Head => Ok(Self::List(ListPlan::of(query)?)),
                Method::Post if request.has_length() => Ok(Self::Post),
                Method::Post => Err(needs_length()),
                _ => Err(Refusal::method("GET, HEAD, POST")),
            };
        }
        let to_key: fn(Cow<'m, [u8]>) -> Self = match request.method {
            Method::Get | Method::Head => Self::Get,
            Method::Put => Self::Put,
            Method::Delete => Self::Delete,
            Method::Post | Method::Other => return Err(Refusal::method("GET, HEAD, PUT, DELETE")),
        };
        if query.is_some() {
            return Err(Refusal::new(400, "a key has no parameters: write ? as %3F"));
        }
        let key = decoded(path)?;
        if key.len() > KEY_BYTES_MAX {
            return Err(Refusal::new(414, format!("a key has at most {KEY_BYTES_MAX} bytes")));
        }
        if request.method == Method::Put && !request.has_length() {
            return Err(needs_length());
        }
        Ok(to_key(key))
    }
}

impl<'m> ListPlan<'m> {
    fn of(query: Option<&'m [u8]>) -> Result<Self, Refusal> {
        let mut list = Self { prefix: Cow::default(), from: Cow::default(), to: None, limit: COUNT };
        let parameters = query.unwrap_or_default().split(|byte| *byte == b'&').filter(|one| !one.is_empty());
        for parameter in parameters {
            let equals = parameter.iter().position(|byte| *byte == b'=').unwrap_or(parameter.len());
            let value = decoded(parameter.get(equals + 1..).unwrap_or_default())?;
            match &parameter[..equals] {
                b"prefix" => list.prefix = value,
                b"from" => list.from = value,
                b"to" => list.to = Some(value),
                b"limit" => {
                    // Digits alone: parse would take a sign, too.
                    let digits =
                        value.iter().all(u8::is_ascii_digit).then(|| std::str::from_utf8(&value).ok()).flatten();
                    list.limit = digits
                        .and_then(|digits| digits.parse().ok())
                        .filter(|limit| *limit > 0)
                        .ok_or_else(|| Refusal::new(400, "the limit of a list is a number above 0"))?;
                }
                _ => return Err(Refusal::new(400, "a list has the parameters prefix, from, to and limit")),
            }
        }
        Ok(list)
    }
}

/// Decodes percent-encoded bytes.
fn decoded(text: &[u8]) -> Result<Cow<'_, [u8]>, Refusal> {
    if !text.contains(&b'%') {
        return Ok(text.into());
    }
    let hex = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text);
    while let [first, behind @ ..] = rest {
        let (byte, behind) = match (first, behind) {
            (b'%', [high, low, behind @ ..]) => (hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low), behind),
            (b'%', _) => (None, behind),
            _ => (Some(*first), behind),
        };
        bytes.push(byte.ok_or_else(|| Refusal::new(400, "a % is followed by two hexadecimal digits"))?);
        rest = behind;
    }
    Ok(bytes.into())
}

/// Refuses a peer that may not use the store.
fn admit(request: &Request, message: &[u8], settings: &Settings, session: &Session) -> Result<(), Refusal> {
    match session.standing {
        Standing::Denied => return Err(Refusal { closes: true, ..Refusal::new(403, DENIED) }),
        // A web page in a browser on this machine must not act with the rights of its user.
        _ if request.is_for_page() => return Err(Refusal::new(403, "requests of web pages are not served")),
        Standing::Known if session.is_tcp && !request.host(message).is_none_or(names_an_address) => {
            let text = "without a password, Host must be an address or localhost: a web page may have any other name";
            return Err(Refusal::new(421, text));
        }
        Standing::Known => {}
        Standing::Unknown => {
            if !request.has_password(message, settings) {
                let text = "the password is needed, as Basic (user default) or Bearer";
                return Err(Refusal { says: Says::Authenticate, ..Refusal::new(401, text) });
            }
        }
    }
    Ok(())
}

/// Returns true for a host that needs no name server.
fn names_an_address(host: &[u8]) -> bool {
    let authority = std::str::from_utf8(host.trim_ascii()).ok().and_then(Authority::parse);
    authority.is_some_and(|authority| {
        authority.is_address() || authority.host().is_empty() || authority.host().eq_ignore_ascii_case("localhost")
    })
}

pub(super) fn has_password(given: &[u8], settings: &Settings) -> bool {
    let Some(space) = given.iter().position(|byte| *byte == b' ') else { return false };
    let (scheme, given) = (&given[..space], given[space..].trim_ascii());
    if scheme.eq_ignore_ascii_case(b"Bearer") {
        return settings.is_password(given);
    }
    let pair = if scheme.eq_ignore_ascii_case(b"Basic") { base64(given) } else { None };
    let pair = pair.unwrap_or_default();
    let Some(colon) = pair.iter().position(|byte| *byte == b':') else { return false };
    // There is one user.
    matches!(&pair[..colon], b"" | b"default") && settings.is_password(&pair[colon + 1..])
}

/// RFC 4648, section 4.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let text = text.strip_suffix(b"==").or_else(|| text.strip_suffix(b"=")).unwrap_or(text);
    let mut bytes = Vec::with_capacity(text.len() * 3 / 4);
    let (mut bits, mut count) = (0_u32, 0_u32);
    for digit in text {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_decoded() {
        for (text, bytes) in [("a", &b"a"[..]), ("a%20b%2fc%00%ff", b"a b/c\0\xff"), ("+", b"+"), ("%25", b"%")] {
            assert_eq!(&*decoded(text.as_bytes()).unwrap(), bytes, "{text}");
        }
        for wrong in ["%", "%1", "%1g", "a%%20", "%+1"] {
            assert!(decoded(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_the_password_opens() {
        let settings = Settings { password: Some(b"open sesame".to_vec()), ..Settings::default() };
        for (given, is_right) in [
            ("Bearer open sesame", true),
            ("bearer  open sesame ", true),
            ("Basic ZGVmYXVsdDpvcGVuIHNlc2FtZQ==", true),
            ("Basic Om9wZW4gc2VzYW1l", true),
            ("Basic cm9vdDpvcGVuIHNlc2FtZQ==", false),
            ("Basic b3BlbiBzZXNhbWU=", false),
            ("Basic ZGVmYXVsdDo=", false),
            ("Basic *", false),
            ("Bearer", false),
            ("Bearer open", false),
            ("Digest open sesame", false),
            ("open sesame", false),
            ("", false),
        ] {
            assert_eq!(has_password(given.as_bytes(), &settings), is_right, "{given}");
        }
    }

    #[test]
    fn names_of_others_are_no_addresses() {
        for (host, is_address) in [
            ("127.0.0.1:6379", true),
            ("[::1]:6379", true),
            ("localhost", true),
            ("LocalHost:80", true),
            ("", true),
            ("example.org", false),
            ("example.org:6379", false),
            ("localhost.example.org", false),
            ("127.0.0.1.example.org", false),
            ("[x]", false),
            ("[::1].evil.example:80", false),
            ("[::1]evil", false),
            ("[::1]:80:evil", false),
            ("localhost:80:evil", false),
            ("localhost:evil", false),
            ("127.0.0.1:80.evil.example", false),
            ("localhost@evil.example", false),
            ("evil.example@localhost", false),
            ("localhost.", false),
            ("2130706433", false),
            ("127.1", false),
        ] {
            assert_eq!(names_an_address(host.as_bytes()), is_address, "{host}");
        }
    }
}
