//! `COMMAND`, and `HELP` of commands with subcommands: what the table of commands says.

use ksf_proto::resp::Writer;

use super::arguments;
use super::pattern::Pattern;
use super::table::{Asked, COMMANDS, Command, Facts, KeySpec, Subcommand};
use super::{Call, Failed, Result, SYNTAX};

pub(super) fn command(call: &mut Call<'_, '_>) -> Result {
    let subcommand = call.args.get(1).map(|name| name.to_ascii_lowercase());
    let rest = call.args.get(2..).unwrap_or_default();
    match subcommand.as_deref() {
        None => info(call, &[])?,
        Some(b"count") => call.write().integer(COMMANDS.len() as i64),
        Some(b"docs") => docs(call, rest)?,
        Some(b"getkeys") => get_keys(call, rest, false)?,
        Some(b"getkeysandflags") => get_keys(call, rest, true)?,
        Some(b"help") => help(call),
        Some(b"info") => info(call, rest)?,
        Some(b"list") => list(call, rest)?,
        // The table has no others.
        Some(_) => return Err(SYNTAX.into()),
    }
    // In a transaction, there may be many of these replies.
    call.room().check()
}

/// The lines of `HELP`, of the subcommands of the command that was asked.
pub(super) fn help(call: &mut Call<'_, '_>) {
    let Some(Asked { command, .. }) = Asked::of(call.args) else { return };
    let mut to = call.write();
    to.array(1 + 2 * command.subcommands.len());
    let name = command.name.to_ascii_uppercase();
    to.simple(&format!("{name} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"));
    for subcommand in command.subcommands {
        to.simple(&String::from_utf8_lossy(subcommand.own_name()).to_ascii_uppercase());
        to.simple(&format!("    {}", subcommand.facts.summary));
    }
}

/// What one name says: that of a command, or `client|id`.
#[derive(Clone, Copy)]
enum Named {
    Command(&'static Command),
    Subcommand(&'static Subcommand),
}

impl Named {
    fn find(name: &[u8]) -> Option<Self> {
        let words: Vec<&[u8]> = name.split(|byte| *byte == b'|').collect();
        match (Asked::of(&words)?, words.len()) {
            (Asked { command, .. }, 1) => Some(Self::Command(command)),
            (Asked { subcommand: Some(subcommand), .. }, 2) => Some(Self::Subcommand(subcommand)),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Command(command) => command.name,
            Self::Subcommand(subcommand) => subcommand.name,
        }
    }

    fn facts(self) -> &'static Facts {
        match self {
            Self::Command(command) => &command.facts,
            Self::Subcommand(subcommand) => &subcommand.facts,
        }
    }

    fn arity(self) -> i32 {
        match self {
            Self::Command(command) => command.arity,
            Self::Subcommand(subcommand) => subcommand.arity,
        }
    }

    fn subcommands(self) -> &'static [Subcommand] {
        match self {
            Self::Command(command) => command.subcommands,
            Self::Subcommand(_) => &[],
        }
    }
}

/// All of these, or every command.
fn info(call: &mut Call<'_, '_>, names: &[&[u8]]) -> Result {
    if names.is_empty() {
        call.write().array(COMMANDS.len());
        COMMANDS.iter().for_each(|command| write_info(&mut call.write(), Named::Command(command)));
        return Ok(());
    }
    call.write().array(names.len());
    for name in names {
        match Named::find(name) {
            Some(named) => write_info(&mut call.write(), named),
            None => call.write().null(),
        }
        call.room().check()?;
    }
    Ok(())
}

fn write_statuses(to: &mut Writer<'_>, words: impl Iterator<Item = String> + Clone) {
    to.set(words.clone().count());
    words.for_each(|word| to.simple(&word));
}

fn write_info(to: &mut Writer<'_>, named: Named) {
    let facts = named.facts();
    let (first, last, step) = facts.keys_at();
    to.array(10);
    to.bulk(named.name().as_bytes());
    to.integer(named.arity().into());
    write_statuses(to, facts.flags().map(str::to_owned));
    to.integer(first as i64);
    to.integer(last.into());
    to.integer(step as i64);
    write_statuses(to, facts.categories().map(|category| format!("@{category}")));
    to.set(facts.tips.len());
    facts.tips.iter().for_each(|tip| to.bulk(tip.as_bytes()));
    to.set(facts.keys.len());
    facts.keys.iter().for_each(|spec| write_spec(to, spec));
    match named.subcommands() {
        [] => to.set(0),
        subcommands => {
            to.array(subcommands.len());
            subcommands.iter().for_each(|subcommand| write_info(to, Named::Subcommand(subcommand)));
        }
    }
}

fn write_access(to: &mut Writer<'_>, access: &str) {
    write_statuses(to, access.split(' ').map(str::to_owned));
}

fn write_spec(to: &mut Writer<'_>, KeySpec { access, at: (first, last, step) }: &KeySpec) {
    // Counted from the first one.
    let last = if *last < 0 { *last } else { *last - *first as i32 };
    to.map(3);
    to.bulk(b"flags");
    write_access(to, access);
    to.bulk(b"begin_search");
    to.map(2);
    to.bulk(b"type");
    to.bulk(b"index");
    to.bulk(b"spec");
    to.map(1);
    to.bulk(b"index");
    to.integer(*first as i64);
    to.bulk(b"find_keys");
    to.map(2);
    to.bulk(b"type");
    to.bulk(b"range");
    to.bulk(b"spec");
    to.map(3);
    to.bulk(b"lastkey");
    to.integer(last.into());
    to.bulk(b"keystep");
    to.integer(*step as i64);
    to.bulk(b"limit");
    to.integer(0);
}

/// Of these, as far as they are there, or of every command.
fn docs(call: &mut Call<'_, '_>, names: &[&[u8]]) -> Result {
    let found: Vec<Named> = match names {
        [] => COMMANDS.iter().map(Named::Command).collect(),
        names => names.iter().filter_map(|name| Named::find(name)).collect(),
    };
    call.write().map(found.len());
    found.into_iter().try_for_each(|named| {
        write_docs(&mut call.write(), named);
        // There may be as many as fit into the command.
        call.room().check()
    })
}

fn write_docs(to: &mut Writer<'_>, named: Named) {
    let (facts, subcommands) = (named.facts(), named.subcommands());
    to.bulk(named.name().as_bytes());
    let arguments = arguments::of(named.name());
    to.map(3 + usize::from(arguments.is_some()) + usize::from(!subcommands.is_empty()));
    for (key, value) in [("summary", facts.summary), ("since", facts.since), ("group", facts.group)] {
        to.bulk(key.as_bytes());
        to.bulk(value.as_bytes());
    }
    if let Some(arguments) = arguments {
        to.bulk(b"arguments");
        arguments::write(to, arguments);
    }
    if !subcommands.is_empty() {
        to.bulk(b"subcommands");
        to.map(subcommands.len());
        subcommands.iter().for_each(|subcommand| write_docs(to, Named::Subcommand(subcommand)));
    }
}

/// What is done with the keys of a command. That of `SET` depends on its options.
fn access_of(asked: Asked, spec: &KeySpec, args: &[&[u8]]) -> &'static str {
    if asked.name() != "set" {
        return spec.access;
    }
    let tells = args.iter().skip(3).any(|option| option.eq_ignore_ascii_case(b"GET"));
    if tells { "RW access update" } else { "OW update" }
}

fn get_keys(call: &mut Call<'_, '_>, args: &[&[u8]], with_access: bool) -> Result {
    let asked = Asked::of(args).ok_or("ERR Invalid command specified")?;
    if asked.facts().keys.is_empty() {
        return Err("ERR The command has no key arguments".into());
    }
    if !asked.takes(args.len()) {
        return Err("ERR Invalid number of arguments specified for command".into());
    }
    let of_spec = |spec: &'static KeySpec| {
        let access = access_of(asked, spec, args);
        super::table::places(spec.at, args.len()).map(move |at| (args[at], access))
    };
    let keys: Vec<(&[u8], &str)> = asked.facts().keys.iter().flat_map(of_spec).collect();
    let mut room = call.room();
    keys.iter().try_for_each(|(key, _)| room.take(key.len()))?;
    let mut to = call.write();
    to.array(keys.len());
    for (key, access) in keys {
        if with_access {
            to.array(2);
        }
        to.bulk(key);
        if with_access {
            write_access(&mut to, access);
        }
    }
    Ok(())
}

fn list(call: &mut Call<'_, '_>, args: &[&[u8]]) -> Result {
    let lower = |word: &[u8]| String::from_utf8_lossy(word).to_ascii_lowercase();
    let filter = match args {
        [] => None,
        [filter, by, what] if filter.eq_ignore_ascii_case(b"FILTERBY") => Some((lower(by), what.to_ascii_lowercase())),
        _ => return Err(SYNTAX.into()),
    };
    let takes = |named: &Named| match &filter {
        None => Ok(true),
        Some((by, what)) => match &by[..] {
            "pattern" => Ok(Pattern::read(what)?.takes(named.name().as_bytes())),
            "aclcat" => Ok(named.facts().categories().any(|category| category.as_bytes().eq_ignore_ascii_case(what))),
            // There are none.
            "module" => Ok(false),
            _ => Err(Failed::from(SYNTAX)),
        },
    };
    let all = COMMANDS.iter().flat_map(|command| {
        let subcommands = command.subcommands.iter().map(Named::Subcommand);
        std::iter::once(Named::Command(command)).chain(subcommands)
    });
    let mut found = Vec::new();
    for named in all {
        if takes(&named)? {
            found.push(named.name());
        }
    }
    let mut to = call.write();
    to.array(found.len());
    found.iter().for_each(|name| to.bulk(name.as_bytes()));
    Ok(())
}
