//! Requests carried out, by the reads and updates that the commands use, too.

use std::io::Write;

use ksf_proto::http1;
use ksf_store::cells::Shape;
use ksf_store::store::{Clock, Got, Needs};
use ksf_store::update::View;

use super::conditions::{Conditions, Part};
use super::plan::{ListPlan, Plan, Refusal};
use super::response::{BYTES, JSON, Response, Says};
use super::{Request, SHORT_REPLY_BYTES};
use crate::cluster::slot_of;
use crate::commands::range::{KeyRange, list};
use crate::commands::{Done, Session, value_bytes};
use crate::service::KvShard;
use crate::settings::Settings;

/// Bytes of a key in the body of a POST, which begins with it: PASTE's phttpd has it so.
const POST_KEY_BYTES: usize = 8;

/// Carries out a request, and writes the response to `out`.
pub(crate) fn execute(
    shard: &mut KvShard,
    session: &Session,
    request: &Request,
    message: &[u8],
    now_ns: u64,
    out: &mut Vec<u8>,
) -> Done {
    let mut response = Response::to(request, now_ns, out);
    let clock = Clock { now_ms: now_ns / 1_000_000, received_ns: None };
    let conditions = request.conditions(message);
    let bytes_max = session.reply_bytes_max;
    let plan = Plan::of(request, message, &shard.settings, session);
    let done = match plan.and_then(|plan| here(plan, request, message, &shard.settings)) {
        Ok(Plan::Get(key)) => Ok(get(shard, clock, &key, &conditions, bytes_max, &mut response)),
        Ok(Plan::List(plan)) => show(shard, clock, &plan, bytes_max, &mut response),
        Ok(Plan::Put(key)) => put(shard, clock, &key, &request.body(message), &conditions, &mut response),
        Ok(Plan::Delete(key)) => delete(shard, clock, &key, &conditions, &mut response),
        Ok(Plan::Post) => match request.body(message).split_at_checked(POST_KEY_BYTES) {
            Some((key, value)) => put(shard, clock, key, value, &conditions, &mut response),
            None => Err(Refusal::new(400, "the body begins with a key of 8 bytes")),
        },
        Err(refused) => Err(refused),
    };
    let needs = done.unwrap_or_else(|refused| {
        refused.write(&mut response);
        Needs::default()
    });
    Done { needs, close: !response.keep_alive, ..Done::default() }
}

/// Most bytes that the response to a whole request may have, from what the index knows of its key.
pub(crate) fn reply_bytes(
    shard: &mut KvShard,
    session: &Session,
    request: &Request,
    message: &[u8],
    now_ms: u64,
) -> usize {
    let bytes_max = session.reply_bytes_max;
    match Plan::of(request, message, &shard.settings, session) {
        Ok(Plan::Get(key)) => {
            let (bytes, _) = shard.shard.read(&[&key[..]], now_ms, |view| value_bytes(view.get(&key), bytes_max));
            bytes.saturating_add(SHORT_REPLY_BYTES).min(bytes_max)
        }
        Ok(Plan::List(_)) => bytes_max,
        _ => SHORT_REPLY_BYTES,
    }
}

/// The plan, if its key belongs to this node.
fn here<'m>(plan: Plan<'m>, request: &Request, message: &[u8], settings: &Settings) -> Result<Plan<'m>, Refusal> {
    let Some(cluster) = &settings.cluster else { return Ok(plan) };
    let elsewhere = |key: &[u8]| cluster.elsewhere(slot_of(key));
    let node = match &plan {
        Plan::Get(key) | Plan::Put(key) | Plan::Delete(key) => elsewhere(&key[..]),
        Plan::Post => request.body(message).split_at_checked(POST_KEY_BYTES).and_then(|(key, _)| elsewhere(key)),
        // The keys that are here.
        Plan::List(_) => None,
    };
    match node {
        Some(node) => Err(Refusal::new(421, format!("the key belongs to the node {node}"))),
        None => Ok(plan),
    }
}

/// Answers the head of a request whose client waits before it sends the body. False: the body is not wanted, and the
/// connection ends.
pub(crate) fn welcome(
    settings: &Settings,
    session: &Session,
    request: &Request,
    head: &[u8],
    now_ns: u64,
    out: &mut Vec<u8>,
) -> bool {
    match Plan::of(request, head, settings, session).and_then(|plan| here(plan, request, head, settings)) {
        Ok(_) => {
            out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
            true
        }
        Err(refused) => {
            let mut response = Response::to(request, now_ns, out);
            response.keep_alive = false;
            refused.write(&mut response);
            false
        }
    }
}

/// Answers what is no request that could be carried out, and ends the connection.
pub(crate) fn refuse(status: u16, now_ns: u64, out: &mut Vec<u8>) {
    let says = if status == 401 { Says::Authenticate } else { Says::Nothing };
    Response::to_nonsense(now_ns, out).text(status, says, http1::reason(status));
}

/// Answers a request that cannot be carried out. False: the connection ends.
pub(crate) fn fail(request: &Request, why: &str, now_ns: u64, out: &mut Vec<u8>) -> bool {
    let mut response = Response::to(request, now_ns, out);
    Refusal::new(500, why.to_owned()).write(&mut response);
    response.keep_alive
}

fn absent() -> Refusal {
    Refusal::new(404, "the key is not there")
}

/// The response to a request whose conditions are not met.
fn unmet(status: u16, version: Option<u64>, response: &mut Response<'_>) {
    if status == 304 {
        response.empty(304, version);
    } else {
        Refusal::new(status, "the key has another version than the request wants").write(response);
    }
}

fn get(
    shard: &mut KvShard,
    clock: Clock,
    key: &[u8],
    conditions: &Conditions<'_>,
    bytes_max: usize,
    response: &mut Response<'_>,
) -> Needs {
    let look = |view: &mut View<'_, '_>| tell(view.get(key), conditions, bytes_max, response);
    let (told, needs) = shard.shard.read(&[key], clock.now_ms, look);
    // What is refused tells of the key, too.
    if let Err(refused) = told {
        refused.write(response);
    }
    needs
}

fn tell(
    got: Option<Got<'_>>,
    conditions: &Conditions<'_>,
    bytes_max: usize,
    response: &mut Response<'_>,
) -> Result<(), Refusal> {
    let got = got.ok_or_else(absent)?;
    let (Got { shape, version, .. }, length) = (got, got.value_bytes());
    if shape != Shape::String {
        return Err(Refusal::new(409, "the key has no string: only commands of Redis show what it has"));
    }
    if let Some(status) = conditions.status(Some(version), true) {
        unmet(status, Some(version), response);
        return Ok(());
    }
    // Ranges are of GET alone.
    if response.to_head() {
        response.head(200, Says::Ranges, Some(version), BYTES, length);
        return Ok(());
    }
    let (status, says, part) = match conditions.part(version, length) {
        Part::Whole => (200, Says::Ranges, 0..length),
        Part::Bytes { first, last } => (206, Says::Part { first, last, length }, first..last + 1),
        Part::Nothing => {
            response.text(416, Says::Length(length), "the value has no such range");
            return Ok(());
        }
    };
    if part.len() > bytes_max {
        return Err(Refusal::new(500, format!("a response has at most {bytes_max} bytes: ask for a range of it")));
    }
    response.content(status, says, Some(version), BYTES, got.value().get(part).unwrap_or_default());
    Ok(())
}

fn put(
    shard: &mut KvShard,
    clock: Clock,
    key: &[u8],
    value: &[u8],
    conditions: &Conditions<'_>,
    response: &mut Response<'_>,
) -> Result<Needs, Refusal> {
    let ((was_there, unmet_status), needs) = shard.shard.update(&[key], clock, |update| {
        let before = update.get(key).map(|got| got.version);
        let status = conditions.status(before, false);
        if status.is_none() {
            update.set(key, value, None);
        }
        (before.is_some(), status)
    })?;
    match unmet_status {
        Some(status) => unmet(status, None, response),
        None => response.empty(if was_there { 204 } else { 201 }, Some(shard.shard.last_version())),
    }
    Ok(needs)
}

fn delete(
    shard: &mut KvShard,
    clock: Clock,
    key: &[u8],
    conditions: &Conditions<'_>,
    response: &mut Response<'_>,
) -> Result<Needs, Refusal> {
    let (done, needs) = shard.shard.update(&[key], clock, |update| {
        let version = update.get(key).map(|got| got.version);
        let status = version.and_then(|version| conditions.status(Some(version), false));
        let is_met = status.is_none();
        (version.is_some() && is_met && update.remove(key), status)
    })?;
    match done {
        (true, _) => response.empty(204, None),
        (false, Some(status)) => unmet(status, None, response),
        (false, None) => absent().write(response),
    }
    Ok(needs)
}

/// The keys of a range, as they are in a target, so that any bytes can be told and none needs to be escaped in JSON.
fn show(
    shard: &KvShard,
    clock: Clock,
    plan: &ListPlan<'_>,
    bytes_max: usize,
    response: &mut Response<'_>,
) -> Result<Needs, Refusal> {
    const ESCAPED_BYTES: usize = "%00".len();
    const AROUND_BYTES: usize = "\"\",".len();
    let range = KeyRange { from: &plan.from, to: plan.to.as_deref(), prefix: &plan.prefix, count: plan.limit };
    let mut left = Some(bytes_max);
    let listed = list(shard.shard.store(), &range, clock.now_ms, |key| {
        left = left.and_then(|left| left.checked_sub(ESCAPED_BYTES * key.len() + AROUND_BYTES));
        left.is_some()
    });
    if !listed.fits {
        return Err(Refusal::new(500, format!("a list has at most {bytes_max} bytes: two keys may need more")));
    }
    let mut body = b"{\"keys\":[".to_vec();
    for (at, key) in listed.keys.iter().enumerate() {
        if at > 0 {
            body.push(b',');
        }
        quote(key, &mut body);
    }
    body.extend_from_slice(b"],\"next\":");
    match &listed.next {
        Some(next) => quote(next, &mut body),
        None => body.extend_from_slice(b"null"),
    }
    body.extend_from_slice(b"}\n");
    response.content(200, Says::Nothing, None, JSON, &body);
    Ok(listed.needs)
}

fn quote(key: &[u8], out: &mut Vec<u8>) {
    out.push(b'"');
    for byte in key {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => out.push(*byte),
            // Writing to a vector does not fail.
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    out.push(b'"');
}
