//! What `COMMAND DOCS` tells of the arguments of commands: in the words of Redis 7.0, with which a test compares it.
//!
//! ```text
//!   zadd key:key@0 condition:oneof~3.0.2?(nx:pure-token=NX xx:pure-token=XX) score_member:block*(score:double member:string)
//! ```
//!
//! A line for each command that has some: `name:type`, and behind it `@` the number of the key's specification, `=` the token
//! in front of it, `~` the version since which it is there, `!` the one since which it is out of use, `?` that it may be left out, `*`
//! that there may be several, `+` that each of these has the token; in brackets its parts.

use ksf_proto::resp::Writer;

const LINES: &str = include_str!("table/arguments.txt");
const MARKS: [char; 7] = ['@', '=', '~', '!', '?', '*', '+'];

/// The arguments of a command, or of `client|id`; `None`: it has none.
pub(super) fn of(name: &str) -> Option<&'static str> {
    LINES.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
}

/// Writes what [`of`] found.
pub(super) fn write(to: &mut Writer<'_>, arguments: &str) {
    let arguments = split(arguments);
    to.array(arguments.len());
    arguments.into_iter().for_each(|argument| Argument::read(argument).write(to));
}

/// At the spaces that are in no brackets.
fn split(text: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    let is_gap = move |letter: char| {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        letter == ' ' && depth == 0
    };
    text.split(is_gap).collect()
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Argument<'t> {
    name: &'t str,
    kind: &'t str,
    key: Option<i64>,
    /// Of these, those that are there, with the words of Redis for them.
    texts: Vec<(&'static str, &'t str)>,
    flags: Vec<&'static str>,
    parts: Option<&'t str>,
}

impl<'t> Argument<'t> {
    fn read(text: &'t str) -> Self {
        let (text, parts) = match text.split_once('(') {
            Some((front, behind)) => (front, behind.strip_suffix(')')),
            None => (text, None),
        };
        let (head, mut rest) = text.split_at(text.find(MARKS).unwrap_or(text.len()));
        let (name, kind) = head.rsplit_once(':').unwrap_or((head, ""));
        let mut argument = Self { name, kind, parts, ..Self::default() };
        while let Some(mark) = rest.chars().next() {
            let behind = &rest[1..];
            let (value, next) = behind.split_at(behind.find(MARKS).unwrap_or(behind.len()));
            match mark {
                '@' => argument.key = value.parse().ok(),
                '=' => argument.texts.push(("token", value)),
                '~' => argument.texts.push(("since", value)),
                '!' => argument.texts.push(("deprecated_since", value)),
                '?' => argument.flags.push("optional"),
                '*' => argument.flags.push("multiple"),
                _ => argument.flags.push("multiple_token"),
            }
            rest = next;
        }
        argument
    }

    fn write(&self, to: &mut Writer<'_>) {
        let Self { name, kind, key, texts, flags, parts } = self;
        let more = [key.is_some(), !flags.is_empty(), parts.is_some()];
        to.map(2 + texts.len() + more.into_iter().filter(|is_there| *is_there).count());
        to.bulk(b"name");
        to.bulk(name.as_bytes());
        to.bulk(b"type");
        to.bulk(kind.as_bytes());
        if let Some(key) = key {
            to.bulk(b"key_spec_index");
            to.integer(*key);
        }
        for (what, text) in texts {
            to.bulk(what.as_bytes());
            to.bulk(text.as_bytes());
        }
        if !flags.is_empty() {
            to.bulk(b"flags");
            to.set(flags.len());
            flags.iter().for_each(|flag| to.simple(flag));
        }
        if let Some(parts) = parts {
            to.bulk(b"arguments");
            write(to, parts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::table::Asked;

    fn check(arguments: &str) {
        for argument in split(arguments) {
            let Argument { name, kind, key, parts, .. } = Argument::read(argument);
            let kinds = ["string", "integer", "double", "key", "pattern", "unix-time", "pure-token", "oneof", "block"];
            assert!(!name.is_empty() && kinds.contains(&kind), "{argument}");
            assert!(key.is_none() || kind == "key", "{argument}");
            assert_eq!(parts.is_some(), matches!(kind, "oneof" | "block"), "{argument}");
            parts.into_iter().for_each(check);
        }
    }

    #[test]
    fn every_line_is_of_a_command_and_can_be_read() {
        let names = LINES.lines().map(|line| line.split(' ').next().unwrap_or_default());
        assert!(names.clone().is_sorted());
        for name in names {
            let words: Vec<&[u8]> = name.split('|').map(str::as_bytes).collect();
            assert_eq!(Asked::of(&words).map(Asked::name), Some(name));
            check(of(name).unwrap());
        }
        assert_eq!(of("get"), Some("key:key@0"));
        assert_eq!(of("ping x"), None);
    }

    #[test]
    fn an_argument_is_read() {
        let read = Argument::read("ip:port:string=ADDR~6.2.0!7.0.0?*+");
        let texts = vec![("token", "ADDR"), ("since", "6.2.0"), ("deprecated_since", "7.0.0")];
        let flags = vec!["optional", "multiple", "multiple_token"];
        assert_eq!(read, Argument { name: "ip:port", kind: "string", texts, flags, ..Argument::default() });
        assert_eq!(split("a:block(b:key@0 c:oneof(d:x e:y)) f:string").len(), 2);
    }
}
