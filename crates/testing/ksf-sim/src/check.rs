//! Compares what happened on one connection with what the ideal server would have done.

use ksf::framing::Framing;
use ksf::limits::Limits;
use ksf::{CloseReason, Order};

use crate::ideal::{Ideal, decode, payload};
use crate::script::{SimRequest, reply_to};

/// What happened on one connection.
pub(crate) struct History<'a> {
    pub(crate) framing: Framing,
    pub(crate) order: Order,
    /// Number of the peer.
    pub(crate) peer: u32,
    /// What its bytes mean.
    pub(crate) ideal: &'a Ideal,
    /// Messages the service saw.
    pub(crate) handed: &'a [Vec<u8>],
    /// Bytes the peer got.
    pub(crate) taken: &'a [u8],
    /// Why it ended.
    pub(crate) reason: CloseReason,
}

/// How many replies arrived, if all is as it must be.
pub(crate) fn check(history: &History<'_>) -> Result<usize, String> {
    let &History { framing, ideal, handed, taken, reason, .. } = history;
    if !ideal.messages.starts_with(handed) {
        return Err(format!("the service saw other messages than the peer sent: {} of them", handed.len()));
    }
    let by_its_bytes = matches!(
        reason,
        CloseReason::PeerClosed
            | CloseReason::PeerClosedMidMessage
            | CloseReason::MalformedFrame
            | CloseReason::OversizedMessage
            | CloseReason::EndlessFragments
            | CloseReason::EndlessHeader
    );
    if by_its_bytes && (reason, handed.len()) != (ideal.end, ideal.messages.len()) {
        let (seen, sent, end) = (handed.len(), ideal.messages.len(), ideal.end);
        return Err(format!("ended by {reason:?} after {seen} messages, expected {end:?} after {sent}"));
    }
    let requests: Vec<_> =
        handed.iter().filter_map(|message| SimRequest::from_text(payload(framing, message))).collect();
    let no_limits = Limits { message_bytes_max: usize::MAX >> 8, fragments_max: u32::MAX, ..Limits::default() };
    let arrived = decode(framing, &no_limits, taken);
    let torn = arrived.end != CloseReason::PeerClosed;
    let aborted = matches!(
        reason,
        CloseReason::FileRange
            | CloseReason::Io
            | CloseReason::ReplyLimit
            | CloseReason::SendTimeout
            | CloseReason::DrainTimeout
    );
    if torn && !aborted {
        return Err(format!("the last reply is torn ({:?}), and the end was orderly", arrived.end));
    }
    let replies: Vec<_> = arrived.messages.iter().map(|message| payload(framing, message)).collect();
    let tally = match history.order {
        Order::Requests => in_order(&requests, &replies)?,
        Order::Free => in_any_order(history.peer, &requests, &replies)?,
    };
    let answers_all = matches!(
        reason,
        CloseReason::PeerClosed | CloseReason::PeerClosedMidMessage | CloseReason::Drained | CloseReason::Service
    );
    if answers_all && tally.late_missing + tally.prompt_missing > 0 {
        return Err(format!("{} replies are missing at an orderly end", tally.late_missing + tally.prompt_missing));
    }
    if !aborted && tally.prompt_missing > 0 {
        return Err(format!("{} replies that waited for nothing are missing", tally.prompt_missing));
    }
    Ok(replies.len())
}

/// Replies that did not arrive: those that were only held back, by a deferred one or by a gate, count as late.
#[derive(Default)]
struct Tally {
    prompt_missing: usize,
    late_missing: usize,
}

/// Each request's prompt replies, then its late ones in any order, then those of the next request.
fn in_order(requests: &[SimRequest], replies: &[&[u8]]) -> Result<Tally, String> {
    let mut rest = replies;
    let mut tally = Tally::default();
    let mut held_back = false;
    for request in requests {
        let prompt = request.prompt_replies();
        let arrived = prompt.len().min(rest.len());
        for (expected, reply) in prompt.iter().zip(rest) {
            if expected != reply {
                return Err(unexpected(reply, request));
            }
        }
        rest = &rest[arrived..];
        let missing = prompt.len() - arrived;
        // A deferred request may hold back its own prompt replies, too: it waited behind another when it came.
        held_back |= (request.is_deferred() || request.is_gated()) && rest.is_empty();
        if held_back {
            tally.late_missing += missing;
        } else {
            tally.prompt_missing += missing;
        }
        let mut late = request.late_replies();
        while !late.is_empty() && !rest.is_empty() {
            let at = late.iter().position(|expected| expected == rest[0]);
            late.swap_remove(at.ok_or_else(|| unexpected(rest[0], request))?);
            rest = &rest[1..];
        }
        tally.late_missing += late.len();
    }
    match rest.first() {
        Some(reply) => Err(format!("a reply too many: to {:?}", reply_to(reply))),
        None => Ok(tally),
    }
}

/// Prompt replies in the order of requests, late ones anywhere behind the prompt ones of their request.
fn in_any_order(peer: u32, requests: &[SimRequest], replies: &[&[u8]]) -> Result<Tally, String> {
    let mut prompt = requests
        .iter()
        .flat_map(|request| request.prompt_replies().into_iter().map(move |reply| (request.number, reply)));
    let gated = requests.iter().filter(|request| request.is_gated()).map(|request| request.number).min();
    let mut due: Vec<(u32, Vec<u8>)> = requests
        .iter()
        .flat_map(|request| request.late_replies().into_iter().map(move |reply| (request.number, reply)))
        .collect();
    let mut next = prompt.next();
    for reply in replies {
        let number = match reply_to(reply) {
            Some((of, number)) if of == peer => number,
            other => return Err(format!("a reply to somebody else: {other:?}")),
        };
        if next.as_ref().is_some_and(|(_, expected)| expected == reply) {
            next = prompt.next();
            continue;
        }
        let at = due.iter().position(|(of, expected)| *of == number && expected == reply);
        let at = at.ok_or_else(|| format!("a reply to request {number} that is wrong, doubled or out of order"))?;
        if next.as_ref().is_some_and(|(waits, _)| *waits <= number) {
            return Err(format!("the late reply to request {number} overtook an earlier prompt one"));
        }
        due.swap_remove(at);
    }
    // What is behind a gate holds back everything behind it.
    let held_back = next.as_ref().is_some_and(|(number, _)| gated.is_some_and(|gated| gated <= *number));
    let missing = usize::from(next.is_some()) + prompt.count();
    let (prompt_missing, held_missing) = if held_back { (0, missing) } else { (missing, 0) };
    Ok(Tally { prompt_missing, late_missing: held_missing + due.len() })
}

fn unexpected(reply: &[u8], request: &SimRequest) -> String {
    let (peer, number) = (request.peer, request.number);
    match reply_to(reply) {
        Some(of) if of == (peer, number) => format!("a wrong or doubled reply to request {number}"),
        Some((of, other)) => format!("a reply to request {other} of peer {of} in the place of {number} of peer {peer}"),
        None => format!("no reply at all in the place of request {number}"),
    }
}
