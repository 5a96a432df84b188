//! Requests as text, without a server: what a fuzzer compares.

use ksf::error::FramingError;
use ksf::framing::Frame;
use ksf::limits::Limits;

use super::plan::Plan;
use super::{Reader, Request, Taken};
use crate::commands::{Session, Standing};
use crate::settings::Settings;

/// Cuts the requests of a stream as the server does, and shows what they ask for.
#[derive(Debug, Default)]
pub struct Requests(Reader);

impl Requests {
    /// What lies at the front of `buf`, of which `scanned` bytes were looked at before.
    ///
    /// # Errors
    ///
    /// It is no request, or one that is too long.
    pub fn cut(&mut self, buf: &[u8], scanned: usize, limits: &Limits) -> Result<Frame, FramingError> {
        self.0.cut(buf, scanned, limits, |_, _| true)
    }

    /// What the message asks for that was cut last. `None`: a head whose body is to come, or empty lines.
    pub fn show(&mut self, message: &[u8]) -> Option<String> {
        match self.0.take(message)? {
            Taken::Whole(request) => Some(shown(&request, message)),
            Taken::Joined(request, whole) => Some(shown(&request, &whole)),
            Taken::Head(_) => None,
        }
    }
}

fn shown(request: &Request, message: &[u8]) -> String {
    let session = Session { standing: Standing::Known, ..Session::default() };
    let plan = Plan::of(request, message, &Settings::default(), &session);
    let (conditions, body) = (request.conditions(message), request.body(message));
    let part = conditions.part(1, body.len());
    if let super::conditions::Part::Bytes { first, last } = part {
        assert!(first <= last && last < body.len(), "a range that the value does not have");
    }
    format!("{plan:?} {conditions:?} {part:?} {body:?}")
}
