//! A log that is full, or memory that is, takes every command that Redis carries out when memory is used up, however often: from the
//! table that the server tells.

use crate::common::{Client, Serving, counter, engines_of_effort};
use ksf_kv::disk::DiskOptions;
use ksf_kv::{Durability, Settings};

const TIMES: usize = 10_000;
/// Commands of a pipeline.
const AT_ONCE: usize = 500;
const SEGMENT_BYTES: usize = 1 << 20;
const VALUE_BYTES: usize = 20_000;
const DELETED_AT_ONCE: usize = 10;

/// Sends commands in pipelines until a reply is an error, and returns how many were carried out before that, and the error.
fn ask_all(client: &mut Client, commands: impl IntoIterator<Item = String>) -> (Vec<String>, Option<String>) {
    let (mut replies, mut commands) = (Vec::new(), commands.into_iter().peekable());
    while commands.peek().is_some() {
        let words: Vec<String> = commands.by_ref().take(AT_ONCE).collect();
        words.iter().for_each(|words| client.send(&words.split(' ').collect::<Vec<_>>()));
        let told: Vec<String> = words.iter().map(|_| client.reply()).collect();
        if let Some(at) = told.iter().position(|reply| reply.starts_with('-')) {
            let error = told[at].clone();
            replies.extend(told.into_iter().take(at));
            return (replies, Some(error));
        }
        replies.extend(told);
    }
    (replies, None)
}

/// The commands that write, and that Redis does not refuse when memory is used up. Those that take all keys away are the last.
fn commands(client: &mut Client) -> Vec<String> {
    let names = client.ask("COMMAND LIST");
    let names = names.trim_matches(['[', ']']).split(' ').filter(|name| !name.contains('|'));
    let mut commands: Vec<String> = names.map(str::to_owned).collect();
    commands.retain(|name| {
        let about = client.ask(&format!("COMMAND INFO {name}"));
        let has = |flag: &str| about.split(['+', ' ', ']', '[']).any(|word| word == flag);
        has("write") && !has("denyoom")
    });
    commands.sort_by_key(|name| (name.starts_with("flush"), name.clone()));
    assert!(commands.len() > 20, "{commands:?}");
    commands
}

/// What a command needs, so that it changes something each time.
fn before(name: &str, times: usize) -> Box<dyn Iterator<Item = String> + '_> {
    let each = |text: fn(&str, usize) -> String| Box::new((0..times + 1).map(move |at| text(name, at)));
    match name {
        "del" | "unlink" | "getdel" => each(|name, at| format!("SET {name}:{at} value")),
        "persist" => each(|name, at| format!("SET {name}:{at} value EX 100000")),
        "expire" | "expireat" | "pexpire" | "pexpireat" => {
            let shapes = ["SET {}:0 value", "HSET {}:1 field value", "RPUSH {}:2 value", "SADD {}:3 value"];
            let others = (4..times / 2).map(move |at| format!("SET {name}:{at} value"));
            Box::new(shapes.into_iter().map(move |command| command.replace("{}", name)).chain(others))
        }
        "getex" => Box::new(std::iter::once(format!("SET {name} value"))),
        "rename" | "renamenx" => Box::new(std::iter::once(format!("HSET {name}:0 field value other value"))),
        "hdel" => each(|name, at| format!("HSET {name} {at} value")),
        "lpop" | "rpop" | "lrem" | "ltrim" => each(|name, at| format!("RPUSH {name} {at}")),
        "smove" | "spop" | "srem" => each(|name, at| format!("SADD {name} {at}")),
        "zpopmax" | "zpopmin" | "zrem" | "zremrangebyrank" | "zremrangebyscore" => {
            each(|name, at| format!("ZADD {name} {at} {at}"))
        }
        "flushall" | "flushdb" => Box::new(std::iter::empty()),
        _ => panic!("{name} is new: what does it need?"),
    }
}

/// How it is asked for the time `at`.
fn asked(name: &str, at: usize, times: usize) -> String {
    // Ends of keys, of which each is later than all before: first those of some keys again and again, then those of many.
    let key = if at < times / 2 { at % 4 } else { at - times / 2 };
    match name {
        "del" | "unlink" | "getdel" | "persist" => format!("{name} {name}:{at}"),
        "expire" => format!("{name} {name}:{key} {}", 100_000 + at),
        "pexpire" => format!("{name} {name}:{key} {}", 100_000_000 + at),
        "expireat" => format!("{name} {name}:{key} {}", 4_000_000_000_usize + at),
        "pexpireat" => format!("{name} {name}:{key} {}", 4_000_000_000_000_usize + at),
        "getex" if at.is_multiple_of(2) => format!("{name} {name} EX {}", 100_000 + at),
        "getex" => format!("{name} {name} PERSIST"),
        "rename" | "renamenx" => format!("{name} {name}:{} {name}:{}", at % 2, (at + 1) % 2),
        // The second one: the first moves.
        "lrem" => format!("{name} {name} 1 {}", at + 1),
        "ltrim" => format!("{name} {name} 1 -1"),
        "smove" => format!("{name} {name} {name}:other {at}"),
        "hdel" | "srem" | "zrem" => format!("{name} {name} {at}"),
        "zremrangebyrank" => format!("{name} {name} 0 0"),
        "zremrangebyscore" => format!("{name} {name} {at} {at}"),
        "lpop" | "rpop" | "spop" | "zpopmax" | "zpopmin" => format!("{name} {name}"),
        "flushall" | "flushdb" => name.to_owned(),
        _ => panic!("{name} is new: how is it asked for?"),
    }
}

/// What fills the log.
struct Filler {
    first: usize,
    next: usize,
    /// Long ones, and then short ones.
    values: [String; 2],
    /// What says that it is full.
    refusal: &'static str,
}

impl Filler {
    /// Sets keys until they are refused.
    fn fill(&mut self, client: &mut Client) {
        for value in &self.values {
            let told = loop {
                let from = self.next;
                let (done, told) = ask_all(client, (from..from + AT_ONCE).map(|at| format!("SET fill:{at} {value}")));
                self.next = from + AT_ONCE;
                assert!(told.is_some() || done.len() == AT_ONCE);
                if let Some(told) = told {
                    break told;
                }
            };
            assert!(told.starts_with(self.refusal), "{told}");
        }
    }

    /// Deletes the oldest of them.
    fn delete(&mut self, client: &mut Client, count: usize) {
        let (first, end) = (self.first, self.first + count);
        let (_, told) = ask_all(client, (first..end).map(|at| format!("DEL fill:{at}")));
        assert_eq!(told, None);
        self.first = end;
    }
}

#[test]
fn a_full_log_takes_each_command_that_redis_takes_without_memory() {
    for engine in engines_of_effort() {
        let settings = Settings { durability: Durability::None, ..Settings::default() };
        let options = DiskOptions { segment_bytes: SEGMENT_BYTES as u64, places: 40, ..DiskOptions::default() };
        let serving = Serving::in_new_folder(|folder| Serving::start_single(engine, folder, settings, options));
        let mut client = serving.connect();
        let commands = commands(&mut client);
        for name in &commands {
            assert_eq!(ask_all(&mut client, before(name, TIMES)).1, None, "{engine}: {name}");
        }
        let values = ["v".repeat(VALUE_BYTES), "short".to_owned()];
        let mut filler = Filler { first: 0, next: 0, values, refusal: "-OOM the log is full" };
        let mut refused = Vec::new();
        for name in &commands {
            filler.fill(&mut client);
            let (replies, told) = ask_all(&mut client, (0..TIMES).map(|at| asked(name, at, TIMES)));
            if let Some(told) = told {
                refused.push(format!("{name} after {}: {told}", replies.len()));
                continue;
            }
            let nothing = replies.iter().position(|reply| [":0", "nil", "[]"].contains(&&reply[..]));
            assert_eq!(nothing, None, "{engine}: {name} had nothing to do");
            // What it wrote where others may not is to be given back before: two segments at most, and those that removals have.
            let mut has_room = |deleted: &usize| {
                let told = client.ask("SET key value");
                if told != "+OK" {
                    assert!(told.starts_with("-OOM the log is full"), "{engine}: {told} behind {name}");
                    filler.delete(&mut client, DELETED_AT_ONCE);
                }
                told == "+OK" || *deleted > 4 * SEGMENT_BYTES / VALUE_BYTES
            };
            let deleted = (0..).step_by(DELETED_AT_ONCE).find(&mut has_room).unwrap();
            assert!(deleted <= 4 * SEGMENT_BYTES / VALUE_BYTES, "{engine}: no room behind {name}");
        }
        assert!(refused.is_empty(), "{engine}: {refused:#?}");
        serving.stop();
    }
}

/// One of twelve keys is deleted, spread over all segments: from none of them cleaning frees an eighth. New values wait while that space is
/// freed for them; half of it at least, because copies of segments as short as these may lose much.
#[test]
fn a_full_log_takes_new_values_where_keys_were_deleted() {
    const PART: usize = 12;
    for engine in engines_of_effort() {
        let settings = Settings { durability: Durability::None, ..Settings::default() };
        let options = DiskOptions { segment_bytes: SEGMENT_BYTES as u64, places: 20, ..DiskOptions::default() };
        let serving = Serving::in_new_folder(|folder| Serving::start_single(engine, folder, settings, options));
        let mut client = serving.connect();
        let value = "v".repeat(1_000);
        let set = |name: &'static str| {
            let value = value.clone();
            move |at: usize| format!("SET {name}:{at} {value}")
        };
        let (filled, told) = ask_all(&mut client, (0..).map(set("old")));
        assert!(told.is_some_and(|told| told.starts_with("-OOM the log is full")), "{engine}");
        let deleted = filled.len() / PART;
        let deletes = (0..deleted).map(|at| format!("DEL old:{}", at * PART));
        assert_eq!(ask_all(&mut client, deletes).1, None, "{engine}");
        let (again, told) = ask_all(&mut client, (0..).map(set("new")));
        assert!(told.is_some_and(|told| told.starts_with("-OOM the log is full")), "{engine}");
        assert!(again.len() > deleted / 2, "{engine}: {} of {deleted}", again.len());
        serving.stop();
    }
}

#[test]
fn full_memory_takes_each_command_that_redis_takes_then() {
    const TIMES: usize = 500;
    const MEMORY_BYTES: usize = 4 << 20;
    for engine in engines_of_effort() {
        let settings = Settings { durability: Durability::None, memory_bytes_max: MEMORY_BYTES, ..Settings::default() };
        let options = DiskOptions { segment_bytes: SEGMENT_BYTES as u64, places: 40, ..DiskOptions::default() };
        let serving = Serving::in_new_folder(|folder| Serving::start_single(engine, folder, settings, options));
        let mut client = serving.connect();
        let commands = commands(&mut client);
        for name in &commands {
            assert_eq!(ask_all(&mut client, before(name, TIMES)).1, None, "{engine}: {name}");
        }
        let values = ["short"; 2].map(str::to_owned);
        let mut filler = Filler { first: 0, next: 0, values, refusal: "-OOM command not allowed" };
        let mut refused = Vec::new();
        for name in &commands {
            filler.fill(&mut client);
            let (replies, told) = ask_all(&mut client, (0..TIMES).map(|at| asked(name, at, TIMES)));
            refused.extend(told.map(|told| format!("{name} after {}: {told}", replies.len())));
            let used = counter(&serving, "memory_bytes") as usize;
            // With the last command.
            assert!(used <= MEMORY_BYTES + MEMORY_BYTES / 8 + (4 << 10), "{engine}: {used} bytes behind {name}");
        }
        assert!(refused.is_empty(), "{engine}: {refused:#?}");
        serving.stop();
    }
}
