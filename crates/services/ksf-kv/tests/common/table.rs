//! Every command of the store's table, with arguments that it accepts: for tests that drive all of them.

use std::collections::BTreeSet;

/// Numbers of elements of a key, and bytes of each.
pub(crate) type Size = (usize, usize);

/// Shapes of keys.
const KINDS: [&str; 7] = ["string", "short", "number", "list", "set", "hash", "zset"];
/// Longest string of a key.
const STRING_BYTES_MAX: usize = 900 << 10;
/// Bytes of a command that makes a part of a key.
const COMMAND_BYTES: usize = 512 << 10;

/// The name of the key of this shape. All are in slot 3300.
pub(crate) fn key(kind: &str) -> String {
    format!("{{b}}{kind}")
}

/// The commands that make the key of this shape anew.
pub(crate) fn make(kind: &str, (parts, part_bytes): Size) -> Vec<Vec<String>> {
    let key = key(kind);
    let string = match kind {
        "string" => Some("x".repeat((parts * part_bytes).min(STRING_BYTES_MAX))),
        "short" => Some("ab".repeat(200)),
        "number" => Some("1".into()),
        _ => None,
    };
    if let Some(string) = string {
        return vec![vec!["SET".into(), key, string]];
    }
    let part = |at: usize| format!("{at:06}{}", "x".repeat(part_bytes - 6));
    let numbers: Vec<usize> = (0..parts).collect();
    let all = numbers.chunks((COMMAND_BYTES / part_bytes).max(1)).map(|numbers| {
        let (name, with_number) = match kind {
            "list" => ("RPUSH", false),
            "set" => ("SADD", false),
            "hash" => ("HSET", true),
            _ => ("ZADD", true),
        };
        let elements = numbers.iter().flat_map(|at| with_number.then(|| at.to_string()).into_iter().chain([part(*at)]));
        [name.to_owned(), key.clone()].into_iter().chain(elements).collect()
    });
    [vec!["DEL".into(), key.clone()]].into_iter().chain(all).collect()
}

/// The commands that make a key of each shape.
pub(crate) fn make_all(size: Size) -> Vec<Vec<String>> {
    KINDS.iter().flat_map(|kind| make(kind, size)).collect()
}

/// Commands as they are sent.
pub(crate) fn encoded(commands: &[Vec<String>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for words in commands {
        bytes.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
        words.iter().for_each(|word| bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes()));
    }
    bytes
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

/// Commands whose arguments do not follow from the table; the last one is the command itself.
fn special(name: &str) -> &'static [&'static str] {
    match name {
        "client|kill" => &["CLIENT KILL ID 999999999"],
        "client|no-evict" => &["CLIENT NO-EVICT ON"],
        "client|no-touch" => &["CLIENT NO-TOUCH ON"],
        "client|pause" => &["CLIENT PAUSE 0 WRITE"],
        "client|reply" => &["CLIENT REPLY ON"],
        "client|setinfo" => &["CLIENT SETINFO LIB-NAME name"],
        "cluster|count-failure-reports" => &["CLUSTER COUNT-FAILURE-REPORTS $id"],
        "cluster|getkeysinslot" => &["CLUSTER GETKEYSINSLOT 3300 1000"],
        "cluster|replicas" => &["CLUSTER REPLICAS $id"],
        "cluster|slaves" => &["CLUSTER SLAVES $id"],
        "command|getkeys" => &["COMMAND GETKEYS MGET $list $set"],
        "command|getkeysandflags" => &["COMMAND GETKEYSANDFLAGS MGET $list $set"],
        "copy" => &["COPY $list {b}copy REPLACE"],
        "discard" => &["MULTI", "GET $string", "DISCARD"],
        "exec" => &["MULTI", "GET $string", "LRANGE $list 0 -1", "EXEC"],
        "hello" => &["HELLO 2"],
        "ksf.backup" => &["KSF.BACKUP BEGIN"],
        "linsert" => &["LINSERT $list BEFORE 1 2"],
        "lmove" => &["LMOVE $list $list LEFT RIGHT"],
        "wait" => &["WAIT 0 0"],
        _ => &[],
    }
}

/// Commands that are refused whatever their arguments are, each with the reason.
const REFUSED: [(&str, &str); 3] = [
    ("auth", "no password is set: tests/strangers.rs sends it where one is"),
    ("object|freq", "the store does not count uses"),
    ("object|idletime", "the store does not keep when a key was used"),
];

/// A row of the table.
struct Row {
    name: String,
    arity: i64,
    is_write: bool,
    /// Places of the first and the last key, and the distance of two.
    keys: (usize, i64, usize),
    /// Shapes of keys that it takes, by its categories.
    kinds: Vec<&'static str>,
}

impl Row {
    /// From the reply to `COMMAND INFO name`.
    fn read(name: &str, told: &str) -> Self {
        let lines: Vec<&str> = told.lines().collect();
        let number = |at: usize| lines[at].trim_start_matches([':', '*']).parse::<i64>().unwrap();
        // The name, the arity, and the flags with their count.
        let (arity, flags) = (number(4), number(5) as usize);
        let is_write = lines[6..6 + flags].contains(&"+write");
        let keys = (number(6 + flags) as usize, number(7 + flags), number(8 + flags) as usize);
        let categories: Vec<&str> =
            lines[10 + flags..].iter().take_while(|line| line.starts_with('+')).copied().collect();
        let takes = |kind: &str| {
            categories.iter().any(|category| match *category {
                "+@string" | "+@bitmap" => matches!(kind, "string" | "short" | "number"),
                "+@list" => kind == "list",
                "+@set" => kind == "set",
                "+@hash" => kind == "hash",
                "+@sortedset" => kind == "zset",
                "+@keyspace" | "+@transaction" => true,
                _ => false,
            })
        };
        let mut kinds: Vec<&str> = KINDS.into_iter().filter(|kind| keys.0 > 0 && takes(kind)).collect();
        if kinds.is_empty() {
            kinds.push("string");
        }
        Self { name: name.to_owned(), arity, is_write, keys, kinds }
    }

    /// Commands with as many arguments as the row takes: keys of a shape where it has keys, and anything else between them.
    fn candidates(&self, id: &str) -> Vec<(Option<&'static str>, Vec<Vec<String>>)> {
        let special = special(&self.name);
        if !special.is_empty() {
            let mut commands: Vec<Vec<String>> = special.iter().map(|text| words(text)).collect();
            let mut named = None;
            for word in commands.iter_mut().flatten() {
                if word == "$id" {
                    *word = id.to_owned();
                } else if let Some(kind) = KINDS.iter().find(|kind| word.strip_prefix('$') == Some(kind)) {
                    *word = key(kind);
                    named = Some(*kind);
                }
            }
            return vec![(named, commands)];
        }
        let names: Vec<String> = self.name.split('|').map(str::to_owned).collect();
        let least = self.arity.unsigned_abs() as usize;
        let counts = if self.arity < 0 { vec![least, least + 1, least + 2] } else { vec![least] };
        let (mut seen, mut candidates) = (BTreeSet::new(), Vec::new());
        for kind in self.kinds.iter().copied() {
            for count in counts.iter().copied().filter(|count| *count >= names.len()) {
                let (first, last, step) = self.keys;
                let last = if last < 0 { count as i64 + last } else { last };
                let is_key =
                    |at: usize| first > 0 && at >= first && at as i64 <= last && (at - first).is_multiple_of(step);
                let rests: [&[&str]; 9] = [
                    &["KEY"],
                    &["0", "-1"],
                    &["-inf", "+inf"],
                    &["1", "KEY"],
                    &["*"],
                    &["1"],
                    &["64"],
                    &["-64"],
                    &["new", "1"],
                ];
                for rest in rests {
                    let mut rest = rest.iter().cycle();
                    let word = |at: usize| {
                        if at < names.len() {
                            return names[at].clone();
                        }
                        if is_key(at) {
                            return key(kind);
                        }
                        rest.next().map(|word| word.replace("KEY", &key(kind))).unwrap_or_default()
                    };
                    let command: Vec<String> = (0..count).map(word).collect();
                    if seen.insert(command.clone()) {
                        candidates.push((Some(kind), vec![command]));
                    }
                }
            }
        }
        candidates
    }
}

/// A command of the table with arguments that it accepts.
pub(crate) struct Driven {
    pub(crate) name: String,
    pub(crate) is_write: bool,
    kind: Option<&'static str>,
    /// The last one is the command; the others are in front of it on its connection.
    commands: Vec<Vec<String>>,
}

impl Driven {
    /// The command itself.
    #[allow(dead_code, reason = "not every test looks at the words")]
    pub(crate) fn words(&self) -> &[String] {
        self.commands.last().map(Vec::as_slice).unwrap_or_default()
    }

    /// Commands in front of it, each with a short reply: a command that writes has its key made anew.
    fn before(&self, size: Size) -> Vec<Vec<String>> {
        let made = self.kind.filter(|_| self.is_write).map(|kind| make(kind, size)).unwrap_or_default();
        let own = &self.commands[..self.commands.len() - 1];
        made.into_iter().chain(own.iter().cloned()).collect()
    }

    /// The command with all that is in front of it.
    pub(crate) fn request(&self, size: Size) -> Vec<u8> {
        let mut commands = self.before(size);
        commands.extend(self.commands.last().cloned());
        encoded(&commands)
    }

    /// The same, with so many bytes in its last argument, or in one more than it takes.
    pub(crate) fn padded(&self, size: Size, bytes: usize) -> Vec<u8> {
        let mut commands = self.before(size);
        let mut words = self.commands.last().cloned().unwrap_or_default();
        if words.len() > 2 && !words.last().is_some_and(|word| word.starts_with("{b}")) {
            words.pop();
        }
        words.push("x".repeat(bytes));
        commands.push(words);
        encoded(&commands)
    }

    /// The reply to the command, among all of them.
    pub(crate) fn reply<'r>(&self, size: Size, replies: &'r str) -> &'r str {
        replies.splitn(1 + self.before(size).len(), "\r\n").last().unwrap_or_default()
    }
}

/// Every command and subcommand of the table, those that write last: each with the arguments that have the longest reply. `ask` sends
/// commands on a connection of their own, and returns all replies.
///
/// # Panics
///
/// A command accepts no arguments that follow from the table, and has none among the [`special`] ones, nor a reason among the
/// [`REFUSED`] ones.
pub(crate) fn all(size: Size, mut ask: impl FnMut(&[u8]) -> String) -> Vec<Driven> {
    ask(&encoded(&make_all(size)));
    let list = ask(&encoded(&[words("COMMAND LIST")]));
    let names: Vec<&str> = list.lines().filter(|line| !line.starts_with(['*', '$'])).collect();
    let mut rows: Vec<Row> = Vec::new();
    for name in &names {
        let row = Row::read(name, &ask(&encoded(&[words(&format!("COMMAND INFO {name}"))])));
        let has_subcommands =
            names.iter().any(|other| other.strip_prefix(name).is_some_and(|rest| rest.starts_with('|')));
        // Without a subcommand, it is none.
        if row.arity != -2 || !has_subcommands {
            rows.push(row);
        }
    }
    assert!(rows.len() > 180, "{} rows", rows.len());
    rows.sort_by_key(|row| row.is_write);
    let id = ask(&encoded(&[words("CLUSTER MYID")]));
    let id = id.lines().nth(1).unwrap_or_default();
    let mut driven = Vec::new();
    for row in rows {
        let mut best: Option<(usize, Driven)> = None;
        for (kind, commands) in row.candidates(id) {
            let one = Driven { name: row.name.clone(), is_write: row.is_write, kind, commands };
            let replies = ask(&one.request(size));
            let reply = one.reply(size, &replies);
            // Those that are refused have no length.
            let bytes = if reply.starts_with('-') { 0 } else { reply.len() };
            if best.as_ref().is_none_or(|(most, _)| bytes > *most) {
                best = Some((bytes, one));
            }
        }
        let (bytes, best) = best.unwrap_or_else(|| panic!("{}: no arguments", row.name));
        let reason = REFUSED.iter().find(|(name, _)| *name == row.name);
        match reason {
            None => assert!(bytes > 0, "{}: it accepts no arguments that this test knows", row.name),
            Some((_, reason)) => assert_eq!(bytes, 0, "{} is not refused, though {reason}", row.name),
        }
        driven.push(best);
    }
    driven
}

/// Requests of HTTP with every method that the store takes or refuses by itself, on the key of a string, on a missing key and on
/// all keys: each with its method and target, `body` where it has one, and the status of the response.
pub(crate) fn http_requests(body: &str) -> Vec<(String, Vec<u8>, u16)> {
    const STRING: &str = "/%7Bb%7Dstring";
    // `POST` reads a key in the first 8 bytes of the body.
    let post = format!("{{b}}12345{body}");
    let request = |(method, target, body, status): (&str, &str, &str, u16)| {
        let what = format!("{method} {target}");
        let length = body.len();
        let request = format!("{what} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}");
        (what, request.into_bytes(), status)
    };
    let all = [
        ("GET", STRING, "", 200),
        ("GET", "/%7Bb%7Dnone", "", 404),
        ("GET", "/", "", 200),
        ("GET", "/?prefix=%7Bb%7D&limit=1000", "", 200),
        ("HEAD", STRING, "", 200),
        ("HEAD", "/", "", 200),
        ("PUT", STRING, body, 204),
        ("DELETE", STRING, "", 204),
        ("POST", "/", &post, 201),
        ("POST", STRING, body, 405),
        ("DELETE", "/", "", 405),
        ("OPTIONS", STRING, "", 405),
        ("PATCH", STRING, body, 405),
        ("TRACE", STRING, "", 405),
        ("CONNECT", "localhost:1", "", 405),
    ];
    all.into_iter().map(request).collect()
}
