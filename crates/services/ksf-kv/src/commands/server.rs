//! The connection and the server.

use ksf_proto::resp::Version;

use super::{Call, Result, SYNTAX};

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
    match call.integer(1)? {
        0 => call.write().ok(),
        _ => return Err("ERR DB index is out of range".into()),
    }
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
    let mut name = None;
    while let [option, after @ ..] = rest {
        rest = match (&option.to_ascii_uppercase()[..], after) {
            (b"SETNAME", [given, after @ ..]) => {
                name = Some(given.to_vec());
                after
            }
            (b"AUTH", [_, _, ..]) => {
                return Err("ERR AUTH <password> called without any password configured for the default user. \
                            Are you sure your configuration is correct?"
                    .into());
            }
            _ => return Err(SYNTAX.into()),
        };
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

fn unknown_subcommand(call: &Call<'_, '_>) -> super::Failed {
    let text = |at: usize| String::from_utf8_lossy(call.args[at]).into_owned();
    super::Failed(format!("ERR unknown subcommand '{}'. Try {} HELP.", text(1), text(0).to_ascii_uppercase()))
}

pub(super) fn command(call: &mut Call<'_, '_>) -> Result {
    match call.args.get(1).map(|sub| sub.to_ascii_uppercase()).as_deref() {
        None => call.write().array(0),
        Some(b"DOCS") => call.write().map(0),
        Some(b"COUNT") => call.write().integer(super::COMMANDS.len() as i64),
        Some(_) => return Err(unknown_subcommand(call)),
    }
    Ok(())
}

pub(super) fn config(call: &mut Call<'_, '_>) -> Result {
    if !call.args[1].eq_ignore_ascii_case(b"GET") {
        return Err(unknown_subcommand(call));
    }
    let known: [(&str, &str); 3] = [("appendonly", "yes"), ("appendfsync", "always"), ("save", "")];
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

pub(super) fn dbsize(call: &mut Call<'_, '_>) -> Result {
    let keys = call.shard.shard.store().keys();
    call.write().integer(keys as i64);
    Ok(())
}

pub(super) fn info(call: &mut Call<'_, '_>) -> Result {
    let store = call.shard.shard.store();
    let keys = store.keys();
    let text = format!(
        "# Server\r\nredis_version:{REDIS_VERSION}\r\nksf_version:{}\r\nredis_mode:standalone\r\n\
         process_id:{}\r\n\r\n# Persistence\r\nksf_durability:always\r\n\r\n# Memory\r\nused_memory_dataset:{}\r\n\r\n\
         # Keyspace\r\ndb0:keys={keys},expires=0,avg_ttl=0\r\n",
        env!("CARGO_PKG_VERSION"),
        std::process::id(),
        store.index().memory_bytes(),
    );
    call.write().verbatim(&text);
    Ok(())
}
