//! Keys of a snapshot of Redis as the commands that make them, none longer than those of a dump.

use std::io;

use ksf_proto::rdb::{KeyType, Part, Strings};

use super::stream::Sink;
use crate::offline::{CELL_EXTRA_BYTES, CELLS_BYTES, string_commands, write_command, write_end, write_string};

/// Makes commands of what is read.
#[derive(Debug)]
pub(super) struct Converter {
    now_ms: u64,
    key: Option<Key>,
    /// Words of the next command of the key, behind its name and the key.
    words: Vec<Vec<u8>>,
    words_bytes: usize,
    /// A member whose score follows.
    member: Option<Vec<u8>>,
    out: Vec<u8>,
    commands: u64,
}

#[derive(Debug)]
struct Key {
    key: Vec<u8>,
    kind: KeyType,
    expires_ms: Option<u64>,
}

impl Converter {
    /// Without keys that have ended by then.
    pub(super) fn new(now_ms: u64) -> Self {
        let (words, out) = (Vec::new(), Vec::new());
        Self { now_ms, key: None, words, words_bytes: 0, member: None, out, commands: 0 }
    }

    pub(super) fn take(&mut self, part: Part) {
        match part {
            Part::Nothing | Part::Database(_) | Part::End => {}
            Part::Key { key, kind, expires_ms } => {
                let has_ended = expires_ms.is_some_and(|end| end <= self.now_ms);
                self.key = (!has_ended).then_some(Key { key, kind, expires_ms });
            }
            Part::Strings(strings) => self.take_strings(&strings),
            Part::KeyEnd => {
                self.end_command();
                if let Some(Key { key, kind, expires_ms }) = self.key.take()
                    && kind != KeyType::String
                {
                    self.commands += u64::from(expires_ms.is_some());
                    written(write_end(&mut self.out, &key, expires_ms));
                }
            }
        }
    }

    fn take_strings(&mut self, strings: &Strings) {
        let Some(Key { key, kind, expires_ms }) = &self.key else { return };
        if *kind == KeyType::String {
            strings.each(|value| {
                self.commands += string_commands(value);
                written(write_string(&mut self.out, key, value, *expires_ms));
            });
            return;
        }
        let kind = *kind;
        strings.each(|string| self.push(kind, string.to_vec()));
    }

    fn push(&mut self, kind: KeyType, string: Vec<u8>) {
        self.words_bytes += string.len() + CELL_EXTRA_BYTES;
        if kind == KeyType::SortedSet {
            // A command wants the score first.
            match self.member.take() {
                None => self.member = Some(string),
                Some(member) => self.words.extend([string, member]),
            }
        } else {
            self.words.push(string);
        }
        let is_whole = self.member.is_none() && (kind != KeyType::Hash || self.words.len().is_multiple_of(2));
        if is_whole && self.words_bytes >= CELLS_BYTES {
            self.end_command();
        }
    }

    fn end_command(&mut self) {
        self.words_bytes = 0;
        let words = std::mem::take(&mut self.words);
        let Some(Key { key, kind, .. }) = self.key.as_ref().filter(|_| !words.is_empty()) else { return };
        let name: &[u8] = match kind {
            KeyType::String => return,
            KeyType::List => b"RPUSH",
            KeyType::Set => b"SADD",
            KeyType::SortedSet => b"ZADD",
            KeyType::Hash => b"HSET",
        };
        let all: Vec<&[u8]> = [name, &key[..]].into_iter().chain(words.iter().map(|word| &word[..])).collect();
        written(write_command(&mut self.out, all.into_iter()));
        self.commands += 1;
    }

    /// Hands the commands out if they have so many bytes.
    pub(super) fn hand_out(&mut self, sink: &mut Sink<'_>, bytes_min: usize) -> io::Result<()> {
        if self.out.len() >= bytes_min {
            sink(&self.out, self.commands)?;
            self.out.clear();
            self.commands = 0;
        }
        Ok(())
    }
}

/// Writing to a vector does not fail.
fn written(result: io::Result<()>) {
    debug_assert!(result.is_ok());
}
