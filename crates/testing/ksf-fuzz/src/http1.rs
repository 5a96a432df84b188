//! HTTP/1: heads are read in one way however they arrive, what a proxy writes is read as what it had read, and the way
//! streams are cut does not matter, from clients nor from backends.

use std::sync::Arc;

use ksf::CloseReason;
use ksf::connection::Connection;
use ksf::env::Env;
use ksf::outgoing::{ExchangeRequest, HangUp, Upstream};
use ksf::pool::Chunk;
use ksf_proto::http1::{Body, BodyLength, Request, Response, forward_request, forward_response, head_bytes, unchunked};
use ksf_services::http::{PageServer, Proxy};

use crate::input::{Choices, Cuts};
use crate::stream::{new_connection, receive, same_for_every_cut, send};

/// The head at the front of a stream, of a request and of a response, and its body.
pub fn http1_message(input: &[u8]) {
    let mut choices = Choices::new(input);
    let (seed, flags) = (choices.byte(), choices.byte());
    let stream = choices.rest();
    let Some(length) = head_bytes(stream, 0) else { return };
    for scanned in 0..length {
        assert_eq!(head_bytes(&stream[..scanned], 0), None, "a head ends twice");
        assert_eq!(head_bytes(stream, scanned), Some(length), "{scanned} bytes were looked at before");
    }
    let (head, behind) = stream.split_at(length);
    let keep_alive = flags & 1 != 0;
    if let Ok(request) = Request::parse(head) {
        let mut written = Vec::new();
        forward_request(head, keep_alive, &mut written).expect("what was read can be written");
        assert_eq!(head_bytes(&written, 0), Some(written.len()), "one head is written");
        // All but what is for one hop only.
        let max_forwards = request.max_forwards.map(|forwards| forwards.saturating_sub(1));
        let expected = Request { keep_alive, max_forwards, ..request };
        assert_eq!(Request::parse(&written), Ok(expected), "{}", String::from_utf8_lossy(&written));
        same_body(Body::new(request.body), behind, seed);
    }
    let to_head = flags & 2 != 0;
    if let Ok(response) = Response::parse(head, to_head) {
        let mut written = Vec::new();
        let in_chunks = response.body == BodyLength::UntilClose;
        forward_response(head, 1, keep_alive, in_chunks, &mut written).expect("what was read can be written");
        assert_eq!(head_bytes(&written, 0), Some(written.len()), "one head is written");
        let again = Response::parse(&written, to_head).expect("what was written can be read");
        let body = if in_chunks { BodyLength::Chunked } else { response.body };
        assert_eq!((again.status, again.body), (response.status, body));
        same_body(Body::new(response.body), behind, seed);
    }
}

/// A body takes the same bytes however they arrive, and none behind its end.
fn same_body(whole: Body, stream: &[u8], seed: u8) {
    let mut at_once = whole;
    let taken = at_once.take(stream);
    let mut body = whole;
    let mut sum = 0;
    for piece in Cuts::new(seed).cut(stream) {
        match body.take(piece) {
            Ok(bytes) => {
                sum += bytes;
                if bytes < piece.len() {
                    assert!(body.is_done(), "bytes are left, and the body is not over");
                    break;
                }
            }
            Err(error) => return assert_eq!(taken, Err(error)),
        }
    }
    assert_eq!((taken, at_once.is_done()), (Ok(sum), body.is_done()));
}

/// The page server answers a stream in one way however it arrives, and with whole answers only.
pub fn http1_page(input: &[u8]) {
    let mut choices = Choices::new(input);
    let seed = choices.byte();
    let service = Arc::new(PageServer::new(0, seed & 1 == 0, 1));
    let (sent, _) = same_for_every_cut(&service, choices.rest(), seed);
    let mut rest = &sent[..];
    while !rest.is_empty() {
        let length = head_bytes(rest, 0).expect("an answer is whole");
        Response::parse(&rest[..length], false).expect("an own answer can be read");
        rest = &rest[length..];
    }
}

/// The proxy passes the same to backends and to its client however both streams arrive: the client's first, then, for
/// each request, the backend's, which then ends.
pub fn http1_proxy(input: &[u8]) {
    let mut choices = Choices::new(input);
    let (seed, client_bytes) = (choices.byte(), usize::from(choices.byte()));
    let (client, backend) = choices.rest().split_at(client_bytes.min(choices.rest().len()));
    let at_once = |stream| vec![stream];
    let in_pieces = |stream| Cuts::new(seed).cut(stream).collect::<Vec<_>>();
    let (mut met, mut again) =
        (meet(&at_once(client), &at_once(backend)), meet(&in_pieces(client), &in_pieces(backend)));
    if met.reason == Some(CloseReason::MalformedFrame)
        && let (Some((passed, Some(false))), Some((passed_again, Some(false)))) =
            (met.passed.last_mut(), again.passed.last_mut())
    {
        // The rest of a request was refused: the backend has got what arrived before it.
        let common = passed.len().min(passed_again.len());
        passed.truncate(common);
        passed_again.truncate(common);
    }
    assert_eq!(met, again);
}

/// What came of a client and its backends.
#[derive(Debug, PartialEq)]
struct Met {
    /// What the client got, with bodies that the proxy put into chunks as they were, and why its connection ended if it did.
    sent: Vec<u8>,
    reason: Option<CloseReason>,
    needs_reset: bool,
    /// What backends got, each in turn, and whether its connection may be kept.
    passed: Vec<(Vec<u8>, Option<bool>)>,
}

fn meet(client: &[&[u8]], backend: &[&[u8]]) -> Met {
    let backends = ["10.0.0.1:80", "10.0.0.2:80"].map(|addr| addr.parse().expect("an address"));
    let service = Arc::new(Proxy::new(backends.to_vec(), true, 1));
    let (mut connection, mut env) = new_connection(&service);
    let mut met = Met { sent: Vec::new(), reason: None, needs_reset: false, passed: Vec::new() };
    for piece in client {
        receive(&mut connection, &mut env, piece);
        send(&mut connection, &mut env, &mut met.sent);
    }
    let mut answered = 0;
    loop {
        carry_out(&mut connection, &mut env, &mut met);
        if answered == met.passed.len() {
            break;
        }
        answered += 1;
        let mut sent = Vec::new();
        connection.upstream(Upstream::Connected { reused: false }, &mut env);
        for piece in backend {
            carry_out(&mut connection, &mut env, &mut met);
            let (_, hung_up) = &mut met.passed[answered - 1];
            if hung_up.is_some() {
                // What comes behind an answer ends a connection that was to be kept; the shard sees to that.
                *hung_up = Some(false);
                break;
            }
            if met.passed.len() != answered {
                break;
            }
            connection.upstream(Upstream::Received(Chunk::from_vec(piece.to_vec())), &mut env);
            send(&mut connection, &mut env, &mut sent);
        }
        carry_out(&mut connection, &mut env, &mut met);
        if met.passed.len() == answered && met.passed[answered - 1].1.is_none() {
            connection.upstream(Upstream::Ended, &mut env);
            send(&mut connection, &mut env, &mut sent);
        }
        met.sent.extend(joined(sent));
    }
    (met.reason, met.needs_reset) = (connection.finished(), connection.needs_reset());
    connection.end(&mut env);
    assert_eq!((env.pool.in_use(), env.budget.input_bytes()), (0, 0), "slots, bytes of unfinished messages");
    met
}

/// The responses of one exchange. Where the proxy put the body into chunks, which are those of the pieces that arrived, its data is
/// in one chunk.
fn joined(mut sent: Vec<u8>) -> Vec<u8> {
    const CHUNKED: &[u8] = b"\r\nVia: 1.1 ksf\r\nTransfer-Encoding: chunked\r\n";
    let (mut start, mut is_chunked) = (0, false);
    while let Some(length) = head_bytes(&sent[start..], 0) {
        let head = &sent[start..start + length];
        let is_final = Response::parse(head, false).expect("an own response can be read").status >= 200;
        let fields = head.strip_suffix(b"\r\n").unwrap_or_default();
        let fields = fields.strip_suffix(b"Connection: close\r\n").unwrap_or(fields);
        is_chunked = is_final && fields.ends_with(CHUNKED);
        start += length;
        if is_final {
            break;
        }
    }
    if is_chunked {
        let mut body = Body::new(BodyLength::Chunked);
        let bytes = body.take(&sent[start..]).expect("chunks of the proxy follow the grammar");
        let data = unchunked(&sent[start..start + bytes]);
        let end = if body.is_done() { "0\r\n\r\n" } else { "" };
        let chunk = [format!("{:x}\r\n", data.len()).as_bytes(), &data, b"\r\n", end.as_bytes()].concat();
        sent.splice(start..start + bytes, chunk);
    }
    sent
}

/// Plays the shard.
fn carry_out(connection: &mut Connection, env: &mut Env, met: &mut Met) {
    for (_, order) in env.take_exchange_requests() {
        match order {
            ExchangeRequest::Dial { .. } => met.passed.push((Vec::new(), None)),
            ExchangeRequest::Pass(bytes) => {
                met.passed.last_mut().expect("dialed first").0.extend_from_slice(&bytes);
                connection.passed(bytes.len(), env);
            }
            ExchangeRequest::HangUp(how) => {
                met.passed.last_mut().expect("dialed first").1 = Some(how == HangUp::Keep);
            }
            other => panic!("{other:?}"),
        }
    }
}
