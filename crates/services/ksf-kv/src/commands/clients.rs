//! `CLIENT`: connections, the own one and others.

use super::table::full_name;
use super::{Call, Failed, Replies, Result, SYNTAX, integer};
use crate::clients::{Client, monotonic_ms};

const BAD_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";
const LONG_NAME: &str = "ERR Client names have at most 64 bytes.";

/// Longest name of a connection, or of its library: each connection may keep three for as long as it is open.
const LABEL_BYTES_MAX: usize = 64;

/// A name, whose letters are visible.
fn label(text: &[u8]) -> Option<Box<str>> {
    let is_visible = text.len() <= LABEL_BYTES_MAX && text.iter().all(u8::is_ascii_graphic);
    std::str::from_utf8(text).ok().filter(|_| is_visible).map(Box::from)
}

/// The name of a connection.
pub(super) fn name(text: &[u8]) -> Result<Box<str>> {
    let why = if text.len() > LABEL_BYTES_MAX { LONG_NAME } else { BAD_NAME };
    label(text).ok_or_else(|| why.into())
}

fn lower(text: &[u8]) -> String {
    String::from_utf8_lossy(text).to_ascii_lowercase()
}

/// `ON` or `OFF`, which change nothing here.
fn on_or_off(call: &mut Call<'_, '_>) -> Result {
    match &lower(call.args[2])[..] {
        "on" | "off" => call.write().ok(),
        _ => return Err(SYNTAX.into()),
    }
    Ok(())
}

pub(super) fn client(call: &mut Call<'_, '_>) -> Result {
    match &lower(call.args[1])[..] {
        "getname" => {
            let name = call.session.client.labels().name;
            call.room().take(name.len())?;
            let mut to = call.write();
            if name.is_empty() { to.null() } else { to.bulk(name.as_bytes()) }
        }
        "getredir" => call.write().integer(-1),
        "help" => super::about::help(call),
        "id" => {
            let id = call.session.client.id;
            call.write().integer(id as i64);
        }
        "info" => {
            let line = call.session.client.line(call.clock.now_ms, full_name);
            call.room().take(line.len())?;
            call.write().verbatim(&line);
        }
        "kill" => return kill(call),
        "list" => return list(call),
        "no-evict" | "no-touch" => return on_or_off(call),
        "pause" => return pause(call),
        "reply" => return reply(call),
        "setinfo" => return set_info(call),
        "setname" => {
            let name = name(call.args[2])?;
            call.session.client.relabel(|labels| labels.name = name);
            call.write().ok();
        }
        "trackinginfo" => {
            let mut to = call.write();
            to.map(3);
            to.bulk(b"flags");
            to.set(1);
            to.bulk(b"off");
            to.bulk(b"redirect");
            to.integer(-1);
            to.bulk(b"prefixes");
            to.array(0);
        }
        "unblock" => return unblock(call),
        "unpause" => {
            call.shard.clients.resume();
            call.write().ok();
        }
        // The table has no others.
        _ => return Err(SYNTAX.into()),
    }
    Ok(())
}

/// More arguments than the subcommand has, which is named as it was written.
fn unfit(call: &Call<'_, '_>) -> Failed {
    let front = "ERR unknown subcommand or wrong number of arguments for '";
    Failed::quoting(front, call.args[1], "'. Try CLIENT HELP.")
}

/// Commands that come from now on wait, of all connections: all of them, or those that write.
fn pause(call: &mut Call<'_, '_>) -> Result {
    let writes_only = match call.args {
        [_, _, _] => false,
        [_, _, _, mode] if mode.eq_ignore_ascii_case(b"ALL") => false,
        [_, _, _, mode] if mode.eq_ignore_ascii_case(b"WRITE") => true,
        [_, _, _, _] => return Err("ERR CLIENT PAUSE mode must be WRITE or ALL".into()),
        _ => return Err(unfit(call)),
    };
    let timeout_ms = super::server::timeout_ms(call.args[2])?;
    call.shard.clients.pause(monotonic_ms().saturating_add(timeout_ms), writes_only);
    call.write().ok();
    Ok(())
}

fn reply(call: &mut Call<'_, '_>) -> Result {
    let replies = &mut call.session.replies;
    match &lower(call.args[2])[..] {
        "on" => {
            *replies = Replies::On;
            call.write().ok();
        }
        "off" => *replies = Replies::Off,
        "skip" if *replies != Replies::Off => *replies = Replies::SkipNext,
        "skip" => {}
        _ => return Err(SYNTAX.into()),
    }
    Ok(())
}

/// Redis has it from 7.2 on, and clients send it to any server.
fn set_info(call: &mut Call<'_, '_>) -> Result {
    let (attribute, value) = (lower(call.args[2]), label(call.args[3]));
    let is_name = match &attribute[..] {
        "lib-name" => true,
        "lib-ver" => false,
        _ => return Err(Failed::quoting("ERR Unrecognized option '", call.args[2], "'")),
    };
    let Some(value) = value else {
        return Err(Failed::from(format!("ERR {attribute} cannot contain spaces, newlines or special characters.")));
    };
    call.session.client.relabel(|labels| {
        *(if is_name { &mut labels.library } else { &mut labels.library_version }) = value;
    });
    call.write().ok();
    Ok(())
}

/// Nobody waits in a command.
fn unblock(call: &mut Call<'_, '_>) -> Result {
    let reason = match call.args {
        [_, _, _] => None,
        [_, _, _, reason] => Some(lower(reason)),
        _ => return Err(unfit(call)),
    };
    if !matches!(reason.as_deref(), None | Some("timeout" | "error")) {
        return Err("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR".into());
    }
    call.integer(2)?;
    call.write().integer(0);
    Ok(())
}

/// Whether connections of this type are here: all are of clients that are no replicas, and subscribe to nothing.
fn is_here(type_name: &[u8]) -> Result<bool> {
    match &lower(type_name)[..] {
        "normal" => Ok(true),
        "master" | "replica" | "slave" | "pubsub" => Ok(false),
        _ => Err(Failed::quoting("ERR Unknown client type '", type_name, "'")),
    }
}

fn list(call: &mut Call<'_, '_>) -> Result {
    let shown = match call.args {
        [_, _] => call.shard.clients.all(),
        [_, _, option, type_name] if option.eq_ignore_ascii_case(b"TYPE") => {
            if is_here(type_name)? {
                call.shard.clients.all()
            } else {
                Vec::new()
            }
        }
        [_, _, option, ids @ ..] if option.eq_ignore_ascii_case(b"ID") && !ids.is_empty() => {
            let ids = ids.iter().map(|id| integer(id).ok_or("ERR Invalid client ID"));
            let ids = ids.collect::<std::result::Result<Vec<i64>, _>>()?;
            let get = |id: i64| u64::try_from(id).ok().and_then(|id| call.shard.clients.get(id));
            ids.into_iter().filter_map(get).collect()
        }
        _ => return Err(SYNTAX.into()),
    };
    let (mut text, mut room) = (String::new(), call.room());
    for client in shown {
        let line = client.line(call.clock.now_ms, full_name);
        room.take(line.len())?;
        text.push_str(&line);
    }
    call.write().verbatim(&text);
    Ok(())
}

/// Which connections end.
#[derive(Default)]
struct Wanted {
    id: Option<u64>,
    /// Also those that no connection has.
    address: Option<String>,
    local_address: bool,
    none_of_type: bool,
    spares_own: bool,
}

impl Wanted {
    fn read(args: &[&[u8]]) -> Result<Self> {
        let mut wanted = Self { spares_own: true, ..Self::default() };
        let (pairs, rest) = args.as_chunks::<2>();
        for [option, value] in pairs {
            match (&lower(option)[..], value) {
                ("id", id) => {
                    let id = integer(id).and_then(|id| u64::try_from(id).ok()).filter(|id| *id > 0);
                    wanted.id = Some(id.ok_or("ERR client-id should be greater than 0")?);
                }
                ("addr", address) => wanted.address = Some(String::from_utf8_lossy(address).into_owned()),
                ("laddr", _) => wanted.local_address = true,
                ("type", type_name) => wanted.none_of_type |= !is_here(type_name)?,
                ("user", user) if *user == b"default" => {}
                ("user", user) => return Err(Failed::quoting("ERR No such user '", user, "'")),
                ("skipme", answer) if answer.eq_ignore_ascii_case(b"yes") => wanted.spares_own = true,
                ("skipme", answer) if answer.eq_ignore_ascii_case(b"no") => wanted.spares_own = false,
                _ => return Err(SYNTAX.into()),
            }
        }
        if rest.is_empty() { Ok(wanted) } else { Err(SYNTAX.into()) }
    }

    fn takes(&self, client: &Client, own_id: u64) -> bool {
        // At which address of this machine a connection came in is not kept.
        !self.local_address
            && !self.none_of_type
            && self.id.is_none_or(|id| id == client.id)
            && self.address.as_ref().is_none_or(|address| *address == client.address())
            && !(self.spares_own && client.id == own_id)
    }
}

fn kill(call: &mut Call<'_, '_>) -> Result {
    let is_old_form = call.args.len() == 3;
    let wanted = if is_old_form {
        Wanted { address: Some(String::from_utf8_lossy(call.args[2]).into_owned()), ..Wanted::default() }
    } else {
        Wanted::read(&call.args[2..])?
    };
    let own_id = call.session.client.id;
    let mut killed = 0;
    for client in call.shard.clients.all() {
        if !wanted.takes(&client, own_id) {
            continue;
        }
        if client.id == own_id {
            // Behind the reply.
            call.done.close = true;
            killed += 1;
        } else {
            killed += i64::from(client.kill());
        }
    }
    match (is_old_form, killed) {
        (true, 0) => return Err("ERR No such client".into()),
        (true, _) => call.write().ok(),
        (false, _) => call.write().integer(killed),
    }
    Ok(())
}
