//! The connection and the server.

use std::time::{SystemTime, UNIX_EPOCH};

use ksf_proto::resp::Version;

use super::pattern::Pattern;
use super::transactions::Transaction;
use super::{Call, Failed, NOT_AN_INTEGER, Replies, Result, SYNTAX, Standing};
use crate::settings::Durability;

/// The version of Redis whose commands these are: clients choose by it.
pub(super) const REDIS_VERSION: &str = "7.0.15";

pub(super) fn ping(call: &mut Call<'_, '_>) -> Result {
    match call.args {
        [_] => call.write().simple("PONG"),
        [_, text] => {
            let text = *text;
            call.write().bulk(text);
        }
        _ => return Err("ERR wrong number of arguments for 'ping' command".into()),
    }
    Ok(())
}

pub(super) fn echo(call: &mut Call<'_, '_>) -> Result {
    let text = call.args[1];
    call.write().bulk(text);
    Ok(())
}

pub(super) fn quit(call: &mut Call<'_, '_>) -> Result {
    call.write().ok();
    call.done.close = true;
    Ok(())
}

pub(super) fn select(call: &mut Call<'_, '_>) -> Result {
    database(call, 1)?;
    call.write().ok();
    Ok(())
}

/// The database that an argument names: there is one, 0.
pub(super) fn database(call: &Call<'_, '_>, at: usize) -> Result {
    match call.integer(at)? {
        0 => Ok(()),
        _ if call.shard.settings.cluster.is_some() => Err("ERR SELECT is not allowed in cluster mode".into()),
        number if i32::try_from(number).is_ok() => Err("ERR DB index is out of range".into()),
        _ => Err("ERR value is out of range, value must between -2147483648 and 2147483647".into()),
    }
}

const NO_PASSWORD: &str = "ERR AUTH <password> called without any password configured for the default user. \
                           Are you sure your configuration is correct?";
const WRONG_PASSWORD: &str = "WRONGPASS invalid username-password pair or user is disabled.";

/// Whether this user has this password: there is one user, `default`.
fn is_known(call: &Call<'_, '_>, user: &[u8], password: &[u8]) -> Result {
    let settings = &call.shard.settings;
    let right = settings.password.is_none() || settings.is_password(password);
    if user == b"default" && right { Ok(()) } else { Err(WRONG_PASSWORD.into()) }
}

pub(super) fn auth(call: &mut Call<'_, '_>) -> Result {
    match *call.args {
        [_, _] if call.shard.settings.password.is_none() => return Err(NO_PASSWORD.into()),
        [_, password] => is_known(call, b"default", password)?,
        [_, user, password] => is_known(call, user, password)?,
        _ => return Err(SYNTAX.into()),
    }
    call.session.standing = Standing::Known;
    call.write().ok();
    Ok(())
}

/// What the server is to clients.
pub(super) fn mode(call: &Call<'_, '_>) -> &'static str {
    if call.shard.settings.cluster.is_some() { "cluster" } else { "standalone" }
}

pub(super) fn hello(call: &mut Call<'_, '_>) -> Result {
    let mut version = call.session.version;
    if let Some(wanted) = call.args.get(1) {
        version = match super::integer(wanted) {
            Some(2) => Version::Resp2,
            Some(3) => Version::Resp3,
            Some(_) => return Err("NOPROTO unsupported protocol version".into()),
            None => return Err("ERR Protocol version is not an integer or out of range".into()),
        };
    }
    let mut rest = call.args.get(2..).unwrap_or_default();
    // As in Redis, an error leaves what the options in front of it did.
    while let [option, after @ ..] = rest {
        rest = match (&option.to_ascii_uppercase()[..], after) {
            (b"SETNAME", [given, after @ ..]) => {
                let name = super::clients::name(given)?;
                call.session.client.relabel(|labels| labels.name = name);
                after
            }
            (b"AUTH", [user, password, after @ ..]) => {
                is_known(call, user, password)?;
                call.session.standing = Standing::Known;
                after
            }
            _ => return Err(Failed::quoting("ERR Syntax error in HELLO option '", option, "'")),
        };
    }
    if call.session.standing != Standing::Known {
        return Err("NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> \
                    AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol \
                    version at the same time"
            .into());
    }
    call.session.version = version;
    let client = &call.session.client;
    client.speaks_resp3(version == Version::Resp3);
    let (id, mode) = (client.id, mode(call));
    let mut to = call.write();
    to.map(7);
    to.bulk(b"server");
    to.bulk(b"redis");
    to.bulk(b"version");
    to.bulk(REDIS_VERSION.as_bytes());
    to.bulk(b"proto");
    to.integer(if version == Version::Resp3 { 3 } else { 2 });
    to.bulk(b"id");
    to.integer(id as i64);
    to.bulk(b"mode");
    to.bulk(mode.as_bytes());
    to.bulk(b"role");
    to.bulk(b"master");
    to.bulk(b"modules");
    to.array(0);
    Ok(())
}

/// Puts the connection into the state in which it began.
pub(super) fn reset(call: &mut Call<'_, '_>) -> Result {
    let session = &mut *call.session;
    if call.shard.settings.password.is_some() {
        session.standing = Standing::Unknown;
    }
    session.transaction = Transaction::default();
    // As in Redis: what is skipped includes the reply to this.
    if session.replies != Replies::Skip {
        session.replies = Replies::On;
    }
    session.version = Version::Resp2;
    session.client.speaks_resp3(false);
    session.client.relabel(|labels| labels.name = Box::default());
    call.write().simple("RESET");
    Ok(())
}

pub(super) fn config(call: &mut Call<'_, '_>) -> Result {
    if !call.args[1].eq_ignore_ascii_case(b"GET") {
        // The table has no others.
        super::about::help(call);
        return Ok(());
    }
    let fsync = match call.shard.settings.durability {
        Durability::Always => "always",
        Durability::Every { .. } => "everysec",
        Durability::None => "no",
    };
    let memory_bytes_max = maxmemory(call).to_string();
    let clustered = if call.shard.settings.cluster.is_some() { "yes" } else { "no" };
    let known: [(&str, &str); 6] = [
        ("appendonly", "yes"),
        ("appendfsync", fsync),
        ("cluster-enabled", clustered),
        ("maxmemory", &memory_bytes_max),
        ("maxmemory-policy", "noeviction"),
        ("save", ""),
    ];
    let mut is_wanted = known.map(|_| false);
    for pattern in &call.args[2..] {
        let pattern = Pattern::read(pattern)?;
        is_wanted
            .iter_mut()
            .zip(&known)
            .for_each(|(is_wanted, (name, _))| *is_wanted |= pattern.takes(name.as_bytes()));
    }
    let found: Vec<_> =
        known.into_iter().zip(is_wanted).filter_map(|(one, is_wanted)| is_wanted.then_some(one)).collect();
    let mut to = call.write();
    to.map(found.len());
    for (name, value) in found {
        to.bulk(name.as_bytes());
        to.bulk(value.as_bytes());
    }
    Ok(())
}

/// The reply leaves when all that was acknowledged before is on the medium, also where replies to writes do not wait for that.
fn save_all(call: &mut Call<'_, '_>) {
    call.done.needs = call.shard.shard.store().all_appended();
    call.done.is_durable = true;
}

pub(super) fn save(call: &mut Call<'_, '_>) -> Result {
    save_all(call);
    call.write().ok();
    Ok(())
}

/// There is nothing to be done in the background: clients look at the text.
pub(super) fn bgsave(call: &mut Call<'_, '_>) -> Result {
    match call.args {
        [_] => {}
        [_, option] if option.eq_ignore_ascii_case(b"SCHEDULE") => {}
        _ => return Err(SYNTAX.into()),
    }
    save_all(call);
    call.write().simple("Background saving started");
    Ok(())
}

/// The time of the command: all that was acknowledged before is on the medium when the reply leaves.
pub(super) fn lastsave(call: &mut Call<'_, '_>) -> Result {
    save_all(call);
    let seconds = call.clock.now_ms / 1000;
    call.write().integer(seconds as i64);
    Ok(())
}

pub(super) fn dbsize(call: &mut Call<'_, '_>) -> Result {
    let keys = call.shard.shard.store().keys();
    call.write().integer(keys as i64);
    Ok(())
}

pub(super) fn time(call: &mut Call<'_, '_>) -> Result {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut to = call.write();
    to.array(2);
    to.bulk(since.as_secs().to_string().as_bytes());
    to.bulk(since.subsec_micros().to_string().as_bytes());
    Ok(())
}

/// A time to wait for, in milliseconds.
pub(super) fn timeout_ms(argument: &[u8]) -> Result<u64> {
    let timeout_ms = super::integer(argument).ok_or("ERR timeout is not an integer or out of range")?;
    u64::try_from(timeout_ms).map_err(|_| "ERR timeout is negative".into())
}

/// There is no replica: if one is waited for, then for all of the time. Without a time it does not end, as with Redis.
pub(super) fn wait(call: &mut Call<'_, '_>) -> Result {
    let replicas = call.integer(1)?;
    let until_ms = match timeout_ms(call.args[2])? {
        0 => u64::MAX,
        timeout_ms => crate::clients::monotonic_ms().saturating_add(timeout_ms),
    };
    if replicas > 0 && call.tx.is_none() {
        call.done.until_ms = Some(until_ms);
    }
    call.write().integer(0);
    Ok(())
}

/// Bytes of memory that keys and values may take, as Redis says it: 0 where there is no bound.
pub(super) fn maxmemory(call: &Call<'_, '_>) -> usize {
    match call.shard.settings.memory_bytes_max {
        usize::MAX => 0,
        bytes => bytes,
    }
}

/// `MEMORY USAGE`: of a key with cells, all of them.
pub(super) fn memory(call: &mut Call<'_, '_>) -> Result {
    if !call.args[1].eq_ignore_ascii_case(b"USAGE") {
        // The table has no others.
        super::about::help(call);
        return Ok(());
    }
    let key = match *call.args {
        [_, _, key] => key,
        [_, _, key, option, count] if option.eq_ignore_ascii_case(b"SAMPLES") => {
            if super::integer(count).ok_or(NOT_AN_INTEGER)? < 0 {
                return Err(SYNTAX.into());
            }
            key
        }
        _ => return Err(SYNTAX.into()),
    };
    match call.read(&[key], |view| view.memory_of(key)) {
        Some(bytes) => call.write().integer(bytes as i64),
        None => call.write().null(),
    }
    Ok(())
}
