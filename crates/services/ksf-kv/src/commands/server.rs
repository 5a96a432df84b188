//! The connection and the server.

use ksf_proto::resp::Version;

use super::{Call, NOT_AN_INTEGER, Result, SYNTAX, Standing};
use crate::settings::Durability;

/// The version of Redis whose commands these are: clients choose by it.
const REDIS_VERSION: &str = "7.0.15";

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

pub(super) fn hello(call: &mut Call<'_, '_>) -> Result {
    let mut version = call.session.version;
    if let Some(wanted) = call.args.get(1) {
        version = match *wanted {
            b"2" => Version::Resp2,
            b"3" => Version::Resp3,
            _ => return Err("NOPROTO unsupported protocol version".into()),
        };
    }
    let mut rest = call.args.get(2..).unwrap_or_default();
    let (mut name, mut known) = (None, false);
    while let [option, after @ ..] = rest {
        rest = match (&option.to_ascii_uppercase()[..], after) {
            (b"SETNAME", [given, after @ ..]) => {
                name = Some(given.to_vec());
                after
            }
            (b"AUTH", [user, password, after @ ..]) => {
                is_known(call, user, password)?;
                known = true;
                after
            }
            _ => return Err(SYNTAX.into()),
        };
    }
    if known {
        call.session.standing = Standing::Known;
    }
    if call.session.standing != Standing::Known {
        return Err("NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> \
                    AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol \
                    version at the same time"
            .into());
    }
    call.session.version = version;
    if let Some(name) = name {
        call.session.name = name;
    }
    let mut to = call.write();
    to.map(7);
    to.bulk(b"server");
    to.bulk(b"redis");
    to.bulk(b"version");
    to.bulk(REDIS_VERSION.as_bytes());
    to.bulk(b"proto");
    to.integer(if version == Version::Resp3 { 3 } else { 2 });
    to.bulk(b"id");
    to.integer(1);
    to.bulk(b"mode");
    to.bulk(b"standalone");
    to.bulk(b"role");
    to.bulk(b"master");
    to.bulk(b"modules");
    to.array(0);
    Ok(())
}

pub(super) fn client(call: &mut Call<'_, '_>) -> Result {
    let given = call.args.get(2).copied();
    match &call.args[1].to_ascii_uppercase()[..] {
        b"SETNAME" => {
            call.session.name = given.ok_or(SYNTAX)?.to_vec();
            call.write().ok();
        }
        b"GETNAME" => {
            call.room().take(call.session.name.len())?;
            let name = call.session.name.clone();
            let mut to = call.write();
            if name.is_empty() { to.null() } else { to.bulk(&name) }
        }
        b"SETINFO" => call.write().ok(),
        b"ID" => call.write().integer(1),
        _ => return Err(unknown_subcommand(call)),
    }
    Ok(())
}

pub(super) fn unknown_subcommand(call: &Call<'_, '_>) -> super::Failed {
    let text = |at: usize| String::from_utf8_lossy(call.args[at]).into_owned();
    super::Failed(format!("ERR unknown subcommand '{}'. Try {} HELP.", text(1), text(0).to_ascii_uppercase()))
}

pub(super) fn command(call: &mut Call<'_, '_>) -> Result {
    match call.args.get(1).map(|sub| sub.to_ascii_uppercase()).as_deref() {
        None => call.write().array(0),
        Some(b"DOCS") => call.write().map(0),
        Some(b"GETKEYS") if call.args.len() > 2 => {
            let args = &call.args[2..];
            let command = super::find(args[0]).ok_or("ERR Invalid command specified")?;
            if !super::has_arity(command.arity, args.len()) {
                return Err("ERR Invalid number of arguments specified for command".into());
            }
            let keys = super::keys_of(command, args);
            if keys.is_empty() {
                return Err("ERR The command has no key arguments".into());
            }
            let mut to = call.write();
            to.array(keys.len());
            keys.iter().for_each(|key| to.bulk(key));
        }
        Some(b"COUNT") => call.write().integer(super::COMMANDS.len() as i64),
        Some(_) => return Err(unknown_subcommand(call)),
    }
    Ok(())
}

pub(super) fn config(call: &mut Call<'_, '_>) -> Result {
    if !call.args[1].eq_ignore_ascii_case(b"GET") {
        return Err(unknown_subcommand(call));
    }
    let fsync = match call.shard.settings.durability {
        Durability::Always => "always",
        Durability::Every { .. } => "everysec",
        Durability::None => "no",
    };
    let memory_bytes_max = maxmemory(call).to_string();
    let known: [(&str, &str); 5] = [
        ("appendonly", "yes"),
        ("appendfsync", fsync),
        ("maxmemory", &memory_bytes_max),
        ("maxmemory-policy", "noeviction"),
        ("save", ""),
    ];
    let wanted = |name: &str| call.args[2..].iter().any(|pattern| super::keys::matches(pattern, name.as_bytes()));
    let found: Vec<_> = known.into_iter().filter(|(name, _)| wanted(name)).collect();
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

pub(super) fn info(call: &mut Call<'_, '_>) -> Result {
    let store = call.shard.shard.store();
    let (keys, sizes) = (store.keys(), store.memory().sizes());
    let text = format!(
        "# Server\r\nredis_version:{REDIS_VERSION}\r\nksf_version:{}\r\nredis_mode:standalone\r\n\
         process_id:{}\r\n\r\n# Persistence\r\nksf_durability:{}\r\n\r\n\
         # Memory\r\nused_memory:{}\r\nused_memory_dataset:{}\r\nmaxmemory:{}\r\nmaxmemory_policy:noeviction\r\n\
         ksf_values_in_memory_bytes:{}\r\nksf_values_on_disk:{}\r\nksf_values_on_disk_bytes:{}\r\n\r\n\
         # Keyspace\r\ndb0:keys={keys},expires=0,avg_ttl=0\r\n",
        env!("CARGO_PKG_VERSION"),
        std::process::id(),
        call.shard.settings.durability,
        sizes.used,
        sizes.used,
        maxmemory(call),
        sizes.values,
        sizes.away,
        sizes.away_bytes,
    );
    call.write().verbatim(&text);
    Ok(())
}

/// Bytes of memory that keys and values may take, as Redis says it: 0 where there is no bound.
fn maxmemory(call: &Call<'_, '_>) -> usize {
    match call.shard.settings.memory_bytes_max {
        usize::MAX => 0,
        bytes => bytes,
    }
}

/// `MEMORY USAGE`: of a key with cells, all of them.
pub(super) fn memory(call: &mut Call<'_, '_>) -> Result {
    if !call.args[1].eq_ignore_ascii_case(b"USAGE") {
        return Err(unknown_subcommand(call));
    }
    let key = match *call.args {
        [_, _, key] => key,
        [_, _, key, option, count] if option.eq_ignore_ascii_case(b"SAMPLES") => {
            if super::integer(count).ok_or(NOT_AN_INTEGER)? < 0 {
                return Err(SYNTAX.into());
            }
            key
        }
        [_, _] => return Err("ERR wrong number of arguments for 'memory|usage' command".into()),
        _ => return Err(SYNTAX.into()),
    };
    match call.read(&[key], |view| view.memory_of(key)) {
        Some(bytes) => call.write().integer(bytes as i64),
        None => call.write().null(),
    }
    Ok(())
}
