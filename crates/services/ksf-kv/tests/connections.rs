//! Commands about connections, and commands that clients send at connect: `CLIENT`, `COMMAND`,
//! `HELLO`, compared with Redis.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::common::{Client, Compared, Redis, Serving, engines};
use ksf::limits::Limits;
use ksf_test::{stream, wait_until};

/// Commands with equal replies from this server and from Redis.
pub(crate) const SAME_AS_REDIS: &[&str] = &[
    "CLIENT",
    "CLIENT NONSENSE",
    "CLIENT ID x",
    "CLIENT GETNAME",
    "CLIENT SETNAME me",
    "CLIENT GETNAME",
    "CLIENT SETNAME",
    "CLIENT SETNAME a\nb",
    "CLIENT SETNAME ä",
    "CLIENT GETNAME",
    "CLIENT LIST x",
    "CLIENT LIST ID",
    "CLIENT LIST ID 99999",
    "CLIENT LIST ID 0",
    "CLIENT LIST ID 1 x",
    "CLIENT LIST TYPE",
    "CLIENT LIST TYPE pubsub",
    "CLIENT LIST TYPE replica",
    "CLIENT LIST TYPE x",
    "CLIENT LIST TYPE normal x",
    "CLIENT NO-EVICT on",
    "CLIENT NO-EVICT OFF",
    "CLIENT NO-EVICT x",
    "CLIENT KILL",
    "CLIENT KILL 192.0.2.1:5",
    "CLIENT KILL ID 99999",
    "CLIENT KILL ID x",
    "CLIENT KILL ID 0",
    "CLIENT KILL ID",
    "CLIENT KILL ADDR 192.0.2.1:5",
    "CLIENT KILL LADDR 192.0.2.1:5",
    "CLIENT KILL TYPE pubsub",
    "CLIENT KILL TYPE x",
    "CLIENT KILL USER x",
    "CLIENT KILL USER default ID 99999",
    "CLIENT KILL SKIPME x ID 9",
    "CLIENT KILL x y",
    "CLIENT KILL a b c",
    "CLIENT REPLY",
    "CLIENT REPLY x",
    "CLIENT REPLY ON",
    "CLIENT GETREDIR",
    "CLIENT TRACKINGINFO",
    "CLIENT UNBLOCK 99999",
    "CLIENT UNBLOCK x",
    "CLIENT UNBLOCK 99999 x",
    "CLIENT UNBLOCK 99999 ERROR",
    "CLIENT HELP x",
    "HELLO 4",
    "HELLO x",
    "HELLO 3 SETNAME",
    "HELLO 3 SETNAME a\nb",
    "HELLO 3 AUTH x",
    "HELLO 3 AUTH x y",
    "HELLO 3 NONSENSE",
    // Options in front of an error take effect, except for the version.
    "HELLO 3 SETNAME front NONSENSE",
    "CLIENT GETNAME",
    "HELLO 3 SETNAME second AUTH x y",
    "CLIENT GETNAME",
    "HELLO 3 SETNAME third SETNAME a\nb",
    "CLIENT GETNAME",
    "HELLO 4 SETNAME fourth",
    "CLIENT GETNAME",
    "HGETALL none",
    "CLIENT SETNAME me",
    "AUTH",
    "AUTH x",
    "AUTH default x",
    "AUTH x y",
    "AUTH a b c",
    "PING",
    "PING a",
    "PING a b",
    "ECHO",
    "ECHO a",
    "SELECT",
    "SELECT 0",
    "SELECT x",
    "SELECT -1",
    "SELECT 99999999999",
    "WAIT 0 0",
    "WAIT 1 10",
    "WAIT x 0",
    "WAIT 0 x",
    "WAIT 0 -1",
    "WAIT 0 9223372036854775807",
    "WAIT 0 -9223372036854775808",
    "WAIT -9223372036854775808 0",
    "CLIENT PAUSE -9223372036854775808",
    "CLIENT KILL ID 9223372036854775807",
    "CLIENT KILL ID -9223372036854775808",
    "CLIENT LIST ID 9223372036854775807 -9223372036854775808",
    "CLIENT UNBLOCK -9223372036854775808",
    "WAIT 0",
    "WAIT -1 1000000",
    "MULTI",
    "WAIT 1 1000000",
    "EXEC",
    "CLIENT PAUSE",
    "CLIENT PAUSE x",
    "CLIENT PAUSE -1",
    "CLIENT PAUSE 1 x",
    "CLIENT PAUSE 1 WRITE x",
    "CLIENT PAUSE 0",
    "CLIENT UNPAUSE",
    "CLIENT UNPAUSE x",
    "TIME x",
    "COMMAND NONSENSE",
    "COMMAND COUNT x",
    "COMMAND HELP x",
    "COMMAND INFO nonsense",
    "COMMAND INFO get nonsense",
    "COMMAND INFO client|nonsense",
    "COMMAND INFO client|id|x",
    "COMMAND DOCS nonsense",
    "COMMAND LIST x",
    "COMMAND LIST FILTERBY x y",
    "COMMAND LIST FILTERBY PATTERN",
    "COMMAND LIST FILTERBY PATTERN nonsense*",
    "COMMAND LIST FILTERBY ACLCAT nonsense",
    "COMMAND LIST FILTERBY MODULE x",
    "COMMAND GETKEYS",
    "COMMAND GETKEYS get",
    "COMMAND GETKEYS set a",
    "COMMAND GETKEYS client id",
    "COMMAND GETKEYS client getname",
    "COMMAND GETKEYS object encoding a",
    "COMMAND GETKEYS object help",
    "COMMAND GETKEYS object nonsense a",
    "COMMAND GETKEYS mset a 1 b 2",
    "COMMAND GETKEYS sunionstore a b c",
    "COMMAND GETKEYS lcs a b IDX",
    "COMMAND GETKEYSANDFLAGS ping",
    "COMMAND GETKEYSANDFLAGS get a",
    "COMMAND GETKEYSANDFLAGS mset a 1 b 2",
    "COMMAND GETKEYSANDFLAGS lmove a b left right",
    "COMMAND GETKEYSANDFLAGS sinterstore a b c",
    "COMMAND GETKEYSANDFLAGS set a 1",
    "COMMAND GETKEYSANDFLAGS set a 1 NX GET",
    "CONFIG",
    "CONFIG NONSENSE",
    "CONFIG GET",
    "CONFIG GET nonsense other",
    "CONFIG GET cluster-enabled",
    "OBJECT",
    "OBJECT NONSENSE",
    "OBJECT ENCODING",
    "OBJECT HELP",
    "CLUSTER",
    "CLUSTER NONSENSE",
    "CLUSTER INFO",
    "CLUSTER HELP",
    "CLUSTER KEYSLOT",
    "CLUSTER KEYSLOT a",
    "CLUSTER SLOTS",
    "CLUSTER SHARDS",
    "CLUSTER NODES",
    "CLUSTER MYID",
    "CLUSTER LINKS",
    "CLUSTER REPLICAS x",
    "CLUSTER SLAVES x",
    "CLUSTER COUNT-FAILURE-REPORTS x",
    "CLUSTER COUNTKEYSINSLOT 0",
    "CLUSTER GETKEYSINSLOT 0 1",
    "READONLY",
    "READONLY x",
    "READWRITE",
    "ASKING",
    "INFO cluster",
    "INFO nonsense",
    "MULTI",
    "CLIENT NONSENSE",
    "RESET",
    "EXEC",
    "CLIENT GETNAME",
    "MULTI",
    "CLIENT",
    "EXEC",
];

#[test]
fn questions_about_the_connection_are_answered_as_by_redis() {
    let Some(mut both) = Compared::start() else { return };
    for version in ["2", "3"] {
        // The numbers of the connections differ.
        let [ours, theirs] = both
            .ask(&format!("HELLO {version}"))
            .map(|told| told.replace(&format!(" id {}", number_behind(&told, " id ")), ""));
        assert_eq!(ours, theirs, "HELLO {version}");
        both.assert_same(SAME_AS_REDIS);
    }
    both.serving.stop();
}

/// The text behind a word, up to a space.
fn number_behind<'t>(text: &'t str, word: &str) -> &'t str {
    let behind = text.split_once(word).map_or("", |(_, behind)| behind);
    behind.split(' ').next().unwrap_or_default()
}

/// Sorted names of the commands and subcommands that the server lists.
fn names<S: std::io::Read + std::io::Write>(client: &mut Client<S>, filter: &str) -> Vec<String> {
    let listed = client.ask(&format!("COMMAND LIST{filter}"));
    let mut names: Vec<String> =
        listed.trim_matches(['[', ']']).split(' ').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    names.sort();
    names
}

/// Removes the notes of Redis about some keys.
fn without_notes(mut text: String) -> String {
    while let Some(from) = text.find("notes ") {
        let bytes = text[from..].find("flags").expect("they come first");
        text.replace_range(from..from + bytes, "");
    }
    text
}

/// Version and group of the first command in `docs`.
fn history(docs: &str) -> String {
    let part = docs
        .split(" since ")
        .map(|part| part.split(' ').collect::<Vec<_>>())
        .find(|part| part.get(1) == Some(&"group"));
    let part = part.unwrap_or_else(|| panic!("no history: {docs}"));
    format!("{} {}", part[0], part[2].trim_end_matches(']'))
}

/// The documentation of the arguments of a command itself.
fn arguments<'d>(docs: &'d str, name: &str) -> Option<&'d str> {
    let own = docs.split(" subcommands [").next()?.split_once(" arguments [[")?.1;
    assert!(docs.contains(&format!("[{name} [summary ")), "{docs}");
    Some(own.trim_end_matches(']'))
}

#[test]
fn command_info_and_docs_match_redis() {
    let Some(mut both) = Compared::start() else { return };
    for version in ["2", "3"] {
        both.ask(&format!("HELLO {version}"));
        let all = names(&mut both.client, "");
        let (subcommands, commands): (Vec<_>, Vec<_>) = all.iter().partition(|name| name.contains('|'));
        assert!(commands.len() > 130 && subcommands.len() > 30, "{} {}", commands.len(), subcommands.len());
        assert_eq!(both.client.ask("COMMAND COUNT"), format!(":{}", commands.len()));
        // Commands of Redis 7.2, and commands of ksf alone.
        let is_newer = |name: &str| matches!(name, "client|setinfo" | "client|no-touch") || name.starts_with("ksf.");
        let shared: Vec<&String> = all.iter().filter(|name| !is_newer(name)).collect();
        for name in &shared {
            let [ours, theirs] = both.ask(&format!("COMMAND INFO {name}"));
            let theirs = without_notes(theirs);
            // Subcommands are compared one by one.
            let first = |text: &str| text.split(&format!("{name}|")).next().map(str::to_owned);
            assert_eq!(first(&ours), first(&theirs), "RESP{version}: {name}");
            let [ours, theirs] = both.ask(&format!("COMMAND DOCS {name}"));
            assert_eq!(history(&ours), history(&theirs), "RESP{version}: {name}");
            assert_eq!(arguments(&ours, name), arguments(&theirs, name), "RESP{version}: {name}");
        }
        let everything = both.client.ask("COMMAND");
        assert_eq!(everything, both.client.ask("COMMAND INFO"));
        assert!(commands.iter().all(|name| everything.contains(&format!("[{name} :"))), "{everything}");
        let docs = both.client.ask("COMMAND DOCS");
        assert!(all.iter().all(|name| docs.contains(&format!("{name} [summary "))), "{docs}");
        for category in
            ["string", "hash", "list", "set", "sortedset", "connection", "transaction", "dangerous", "write"]
        {
            let filter = format!(" FILTERBY ACLCAT {category}");
            let [ours, theirs] = [names(&mut both.client, &filter), names(&mut both.redis.client, &filter)];
            let theirs: Vec<_> = theirs.into_iter().filter(|name| all.contains(name)).collect();
            let ours: Vec<_> = ours.into_iter().filter(|name| !is_newer(name)).collect();
            assert_eq!(ours, theirs, "{category}");
        }
    }
    both.serving.stop();
}

#[test]
fn client_info_matches_redis() {
    let Some(mut both) = Compared::start() else { return };
    for before in [&["HELLO 2"][..], &["HELLO 3 SETNAME me"], &["CLIENT SETNAME other"], &["RESET", "GET a"]] {
        for question in before {
            both.ask(question);
        }
        for question in ["CLIENT INFO", "CLIENT LIST", "CLIENT LIST TYPE normal"] {
            let [ours, theirs] = both.ask(question);
            assert!(ours.ends_with('\n') && ours.lines().count() == 1, "{ours}");
            for key in ["name", "age", "idle", "db", "sub", "psub", "ssub", "multi", "cmd", "user", "redir", "resp"] {
                let key = format!(" {key}=");
                let value = |text: &str| number_behind(text, &key).trim_end().to_owned();
                let is_time = key == " age=" || key == " idle=";
                assert!(is_time || value(&ours) == value(&theirs), "{question}:{key}: {ours}{theirs}");
                assert!(!is_time || value(&ours).parse::<u64>().is_ok(), "{ours}");
            }
        }
    }
    both.serving.stop();
}

#[test]
fn client_list_shows_names_libraries_and_last_commands() {
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let (mut one, mut other) = (serving.connect(), serving.connect());
        let [one_id, other_id] = [&mut one, &mut other].map(|client| client.ask("CLIENT ID"));
        assert_ne!(one_id, other_id);
        for said in
            ["CLIENT SETNAME worker", "CLIENT SETINFO LIB-NAME go-redis(,go1.24)", "CLIENT SETINFO lib-ver 9.7.0"]
        {
            assert_eq!(other.ask(said), "+OK");
        }
        assert_eq!(other.ask("CLIENT SETINFO nonsense 1"), "-ERR Unrecognized option 'nonsense'");
        assert!(other.ask("CLIENT SETINFO lib-ver a\nb").starts_with("-ERR lib-ver cannot contain spaces"));
        other.ask("MULTI");
        other.ask("GET a");
        let line = one.ask(&format!("CLIENT LIST ID {}", &other_id[1..]));
        for part in [
            &*format!("id={} ", &other_id[1..]),
            &format!("addr={} ", other.0.get_ref().local_addr().unwrap()),
            "name=worker ",
            "flags=x ",
            "multi=1 ",
            "cmd=get ",
            "lib-name=go-redis(,go1.24) lib-ver=9.7.0\n",
        ] {
            assert!(line.contains(part), "{engine}: no {part} in {line}");
        }
        other.ask("DISCARD");
        let all = one.ask("CLIENT LIST");
        assert!(
            all.lines().count() == 2 && all.contains("flags=N db=0 sub=0 psub=0 ssub=0 multi=-1 cmd=discard"),
            "{all}"
        );
        assert!(one.ask("INFO clients").contains("connected_clients:2\r\n"));
        drop(other);
        wait_until("it is gone", || one.ask("CLIENT LIST").lines().count() == 1);
        serving.stop();
    }
}

#[test]
fn killed_connection_ends_while_it_is_idle() {
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let mut one = serving.connect();
        let mut others: Vec<Client> = (0..8).map(|_| serving.connect()).collect();
        let ids: Vec<String> = others.iter_mut().map(|other| other.ask("CLIENT ID")).collect();
        let kill_by_id = format!("CLIENT KILL ID {}", &ids[0][1..]);
        assert_eq!(one.ask(&kill_by_id), ":1", "{engine}");
        assert_eq!(stream::read_rest(&mut others.remove(0).0), b"", "{engine}");
        let address = others[0].0.get_ref().local_addr().unwrap();
        assert_eq!(one.ask(&format!("CLIENT KILL {address}")), "+OK", "{engine}");
        assert_eq!(stream::read_rest(&mut others.remove(0).0), b"", "{engine}");
        wait_until("both are gone", || one.ask("CLIENT LIST").lines().count() == 7);
        assert_eq!(one.ask(&kill_by_id), ":0", "{engine}");
        assert_eq!(one.ask("CLIENT KILL TYPE normal"), ":6", "{engine}");
        for other in &mut others {
            assert_eq!(stream::read_rest(&mut other.0), b"", "{engine}");
        }
        wait_until("all are gone", || one.ask("CLIENT LIST").lines().count() == 1);
        // A connection that has sent nothing ends with its first command.
        let mut silent = serving.connect();
        wait_until("it is there", || one.ask("CLIENT LIST").lines().count() == 2);
        assert_eq!(one.ask("CLIENT KILL SKIPME yes"), ":1", "{engine}");
        silent.send(&["SET", "a", "1"]);
        assert_eq!(stream::read_rest(&mut silent.0), b"", "{engine}");
        assert_eq!(one.ask("EXISTS a"), ":0", "{engine}");
        assert_eq!(one.ask("CLIENT KILL SKIPME no"), ":1", "{engine}: its own reply comes first");
        assert_eq!(stream::read_rest(&mut one.0), b"", "{engine}");
        serving.stop();
    }
}

#[test]
fn client_reply_off_and_skip_suppress_replies_alone() {
    let Some(mut both) = Compared::start() else { return };
    let ours = in_silence(&mut both.client);
    assert_eq!(ours, in_silence(&mut both.redis.client));
    assert_eq!(ours, ["1 after OFF", "2 after SKIP", "+OK", "+PONG", "nil", "+OK", ":2", "skipped", "+RESET"]);
    both.serving.stop();
}

/// Replies to a conversation in which some replies are turned off.
fn in_silence<S: std::io::Read + std::io::Write>(client: &mut Client<S>) -> Vec<String> {
    let mut replies = Vec::new();
    for question in ["CLIENT REPLY OFF", "SET a 1", "GET a", "NONSENSE", "CLIENT REPLY SKIP"] {
        client.send(&question.split(' ').collect::<Vec<_>>());
    }
    assert_eq!(client.ask("CLIENT REPLY ON"), "+OK");
    replies.push(format!("{} after OFF", client.ask("GET a")));
    for question in ["CLIENT REPLY SKIP", "INCR a"] {
        client.send(&question.split(' ').collect::<Vec<_>>());
    }
    replies.push(format!("{} after SKIP", client.ask("GET a")));
    // `ON` behind `SKIP` gets a reply, and so do later commands.
    client.send(&["CLIENT", "REPLY", "SKIP"]);
    replies.extend(["CLIENT REPLY ON", "PING", "GET none"].map(|question| client.ask(question)));
    client.send(&["CLIENT", "REPLY", "SKIP"]);
    client.send(&["CLIENT", "REPLY", "SKIP"]);
    client.send(&["PING"]);
    replies.extend(["CLIENT REPLY ON", "EXISTS a a"].map(|question| client.ask(question)));
    // The reply to RESET is skipped like any other, and turned on by it.
    client.send(&["CLIENT", "REPLY", "SKIP"]);
    client.send(&["RESET"]);
    replies.push(client.ask("ECHO skipped"));
    client.send(&["CLIENT", "REPLY", "OFF"]);
    replies.push(client.ask("RESET"));
    replies
}

/// The reply to a question, and its time.
fn time_of<S: std::io::Read + std::io::Write>(client: &mut Client<S>, question: &str) -> (String, Duration) {
    let asked = Instant::now();
    (client.ask(question), asked.elapsed())
}

/// The clocks of both servers count milliseconds, so a wait may be shorter by up to one.
const MILLISECOND: u64 = 1;

/// Without replicas, `WAIT` gets its reply at the end of its time, and later commands of the
/// connection get theirs behind it. Other connections are served meanwhile.
#[test]
fn wait_for_replicas_takes_its_time_as_in_redis() {
    let mut redis = Redis::start();
    for engine in engines() {
        // A `WAIT` without a time outlasts every drain.
        let limits = Limits { drain_timeout_ms: 100, ..Limits::default() };
        let serving = Serving::fresh_with(engine, limits);
        let mut client = serving.connect();
        let wanted = Duration::from_millis(40 - MILLISECOND);
        if let Some(redis) = redis.as_mut() {
            let (told, took) = time_of(&mut redis.client, "WAIT 1 40");
            assert!(told == ":0" && took >= wanted, "{told} after {took:?}");
        }
        let (told, took) = time_of(&mut client, "WAIT 1 40");
        assert!(told == ":0" && took >= wanted, "{engine}: {told} after {took:?}");
        // In a pipeline, with a write in front of it and behind it.
        let asked = Instant::now();
        ["SET a 1", "WAIT 2 40", "INCR a", "WAIT 1 40", "GET a"]
            .iter()
            .for_each(|question| client.send(&question.split(' ').collect::<Vec<_>>()));
        let told: Vec<String> = (0..5).map(|_| client.reply()).collect();
        assert_eq!(told, ["+OK", ":0", ":2", ":0", "2"], "{engine}");
        assert!(asked.elapsed() >= 2 * wanted, "{engine}");
        // Without a time, `WAIT` never ends. It delays no other connection, and its client may
        // leave.
        let mut waiting = serving.connect();
        waiting.send(&["WAIT", "1", "0"]);
        waiting.send(&["SET", "a", "3"]);
        let mut silent = serving.connect();
        silent.send(&["CLIENT", "REPLY", "OFF"]);
        silent.send(&["WAIT", "1", "20"]);
        silent.send(&["CLIENT", "REPLY", "ON"]);
        assert_eq!(silent.reply(), "+OK", "{engine}");
        assert_eq!(client.ask("GET a"), "2", "{engine}");
        drop(waiting);
        assert_eq!(client.ask("GET a"), "2", "{engine}");
        serving.stop();
    }
}

/// A pause delays all commands, or all that write, on each connection. Then they are carried out in
/// their order.
#[test]
fn client_pause_delays_commands_as_in_redis() {
    let mut redis = Redis::start();
    for engine in engines() {
        let serving = Serving::fresh(engine);
        let mut client = serving.connect();
        let wanted = Duration::from_millis(60 - MILLISECOND);
        let check = |asked: Instant, who: &str| assert!(asked.elapsed() >= wanted, "{engine}, {who}: it did not wait");
        if let Some(redis) = redis.as_mut() {
            let asked = Instant::now();
            assert_eq!(redis.client.ask("CLIENT PAUSE 60"), "+OK");
            assert_eq!(redis.client.ask("PING"), "+PONG");
            check(asked, "redis");
        }
        let asked = Instant::now();
        assert_eq!(client.ask("CLIENT PAUSE 60"), "+OK");
        let mut others: Vec<Client> = (0..4).map(|_| serving.connect()).collect();
        for other in &mut others {
            other.send(&["INCR", "all"]);
            other.send(&["PING"]);
        }
        for other in &mut others {
            assert!(other.reply().starts_with(':'));
            check(asked, "another connection");
            assert_eq!(other.reply(), "+PONG");
        }
        assert_eq!(client.ask("GET all"), "4", "{engine}");
        // Commands that read continue. `UNPAUSE` ends the pause, which would last an hour.
        assert_eq!(client.ask("CLIENT PAUSE 3600000 WRITE"), "+OK");
        for other in &mut others {
            other.send(&["INCR", "all"]);
        }
        assert_eq!(client.ask("GET all"), "4", "{engine}");
        assert_eq!(client.ask("CLIENT UNPAUSE"), "+OK");
        let mut told: Vec<String> = others.iter_mut().map(Client::reply).collect();
        told.sort();
        assert_eq!(told, [":5", ":6", ":7", ":8"], "{engine}");
        serving.stop();
    }
}

/// Fields for exporters have the names of Redis, and values of the same type.
#[test]
fn info_persistence_has_fields_of_redis() {
    let Some(mut both) = Compared::start_with(&["--appendonly", "yes"]) else { return };
    let replies = both.ask("INFO persistence");
    let fields = |text: &str| -> BTreeMap<String, String> {
        let fields = text.lines().filter_map(|line| line.split_once(':'));
        fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let [ours, theirs] = replies.map(|reply| fields(&reply));
    for (name, value) in ours.iter().filter(|(name, _)| !name.starts_with("ksf_")) {
        let other = theirs.get(name).unwrap_or_else(|| panic!("Redis has no {name}: {theirs:?}"));
        assert_eq!(value.parse::<i64>().is_ok(), other.parse::<i64>().is_ok(), "{name}: {value}, {other}");
    }
    for name in ["rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status", "aof_enabled"] {
        assert_eq!(ours.get(name), theirs.get(name), "{name}");
    }
    assert!(ours["aof_current_size"].parse::<u64>().unwrap() >= 6 << 20, "{ours:?}");
    both.serving.stop();
}
