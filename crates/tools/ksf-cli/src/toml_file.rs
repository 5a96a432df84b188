//! Files in TOML: a table is read part by part, and a mistake is told with its place.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::de::value::Error as NoValue;
use serde::de::{Deserialize as _, DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Visitor};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use crate::output::{Failure, Status, one_line};

/// Reads a file by `parse`, which is given its top table.
pub(crate) fn read<T>(path: &Path, parse: impl FnOnce(Table<'_>) -> Result<T, Mistake>) -> Result<T, Failure> {
    let text = fs::read_to_string(path).map_err(|error| {
        let what = format!("cannot read {}: {error}", path.display());
        Failure::new(Status::of_input(&error), what).remedy("check the path")
    })?;
    let folder = path.parent().unwrap_or(Path::new(""));
    Table::parse(&text, folder).and_then(parse).map_err(|mistake| mistake.in_file(path, &text))
}

/// Reads a file that is one table of the fields of `T`.
pub(crate) fn read_plain<T: DeserializeOwned>(path: &Path) -> Result<T, Failure> {
    read(path, |mut table| {
        let plain = table.take()?;
        table.end("this file")?;
        Ok(plain)
    })
}

/// What is wrong in a file, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mistake {
    /// Bytes of the text that are wrong; none where something as a whole is.
    place: Option<Range<usize>>,
    pub(crate) what: String,
}

impl Mistake {
    /// One that no single line holds.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Mistake { place: None, what: what.into() }
    }

    /// The same with more words.
    pub(crate) fn with(mut self, more: &str) -> Self {
        self.what.push_str(more);
        self
    }

    fn in_file(&self, path: &Path, text: &str) -> Failure {
        let what = one_line(&self.what);
        let Some(place) = &self.place else {
            return Failure::new(Status::Config, format!("{}: {what}", path.display()));
        };
        let before = &text[..place.start.min(text.len())];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, str::len) + 1;
        Failure::new(Status::Config, format!("{}:{line}:{column}: {what}", path.display())).remedy("correct that line")
    }
}

impl From<toml::de::Error> for Mistake {
    fn from(error: toml::de::Error) -> Self {
        Mistake { place: error.span(), what: error.message().to_owned() }
    }
}

/// A table of a file. Several types take the keys that are theirs; what nobody takes is a mistake.
#[derive(Debug, Default)]
pub(crate) struct Table<'a> {
    place: Range<usize>,
    left: DeTable<'a>,
    /// Every key that was asked for, whether it was there or not.
    known: Vec<&'static str>,
    folder: PathBuf,
}

impl<'a> Table<'a> {
    /// The top table of a text. Paths in it begin at `folder`.
    pub(crate) fn parse(text: &'a str, folder: &Path) -> Result<Self, Mistake> {
        let table = DeTable::parse(text)?;
        Ok(Table { place: table.span(), left: table.into_inner(), known: Vec::new(), folder: folder.to_owned() })
    }

    /// Where relative paths begin.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// All keys that nobody took yet, with their values.
    pub(crate) fn whole(&self) -> Result<toml::Table, Mistake> {
        let table = Spanned::new(self.place.clone(), DeValue::Table(self.left.clone()));
        Ok(toml::Table::deserialize(table.into_deserializer())?)
    }

    /// Takes the keys that are fields of `T`, and reads them.
    pub(crate) fn take<T: DeserializeOwned>(&mut self) -> Result<T, Mistake> {
        let keys = keys::<T>();
        self.known.extend(keys);
        let taken: DeTable<'a> = keys.iter().filter_map(|key| self.left.remove_entry(*key)).collect();
        Ok(T::deserialize(Spanned::new(self.place.clone(), DeValue::Table(taken)).into_deserializer())?)
    }

    /// Takes the tables of an array, as in `[[key]]`; none where the key is missing.
    pub(crate) fn take_tables(&mut self, key: &'static str) -> Result<Vec<Table<'a>>, Mistake> {
        self.known.push(key);
        let Some(value) = self.left.remove(key) else { return Ok(Vec::new()) };
        let wrong = |place| Mistake { place: Some(place), what: format!("`{key}` is written as [[{key}]]") };
        let place = value.span();
        let DeValue::Array(array) = value.into_inner() else { return Err(wrong(place)) };
        let table = |entry: Spanned<DeValue<'a>>| match (entry.span(), entry.into_inner()) {
            (place, DeValue::Table(left)) => Ok(Table { place, left, known: Vec::new(), folder: self.folder.clone() }),
            (place, _) => Err(wrong(place)),
        };
        array.into_iter().map(table).collect()
    }

    /// A mistake at the place of this table.
    pub(crate) fn mistake(&self, what: impl Into<String>) -> Mistake {
        Mistake { place: Some(self.place.clone()), what: what.into() }
    }

    /// Whether this key was asked for.
    pub(crate) fn knows(&self, key: &str) -> bool {
        self.known.contains(&key)
    }

    /// The first key that nobody took.
    pub(crate) fn unknown(&self) -> Option<&str> {
        self.first_left().map(|key| key.get_ref().as_ref())
    }

    fn first_left(&self) -> Option<&Spanned<DeString<'a>>> {
        self.left.keys().min_by_key(|key| key.span().start)
    }

    /// Refuses what nobody took. `owner`: whose table this is, in words.
    pub(crate) fn end(self, owner: &str) -> Result<(), Mistake> {
        let Some(key) = self.first_left() else { return Ok(()) };
        let known: Vec<String> = self.known.iter().map(|key| format!("`{key}`")).collect();
        let what = format!("unknown field `{}`; {owner} has {}", key.get_ref(), known.join(", "));
        Err(Mistake { place: Some(key.span()), what })
    }
}

/// The fields of a type, under the names that they have in a file.
fn keys<T: DeserializeOwned>() -> &'static [&'static str] {
    struct Asked<'a>(&'a mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Asked<'_> {
        type Error = NoValue;

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _name: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, NoValue> {
            *self.0 = fields;
            self.deserialize_any(visitor)
        }

        fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, NoValue> {
            Err(NoValue::custom("there is no value, only a question for names"))
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut keys: &'static [&'static str] = &[];
    // It always fails, because there is no value.
    let _ = T::deserialize(Asked(&mut keys));
    keys
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct One {
        number: u8,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Other {
        #[serde(default, rename = "word")]
        text: String,
    }

    fn both(text: &str) -> Result<(One, Other), Failure> {
        let read = |mut table: Table<'_>| {
            let both = (table.take()?, table.take()?);
            table.end("this table").map(|()| both)
        };
        Table::parse(text, Path::new("")).and_then(read).map_err(|mistake| mistake.in_file(Path::new("file"), text))
    }

    #[test]
    fn a_table_is_read_by_several_types() {
        assert_eq!(keys::<Other>(), ["word"]);
        assert_eq!(both("word = \"a\"\nnumber = 7").unwrap(), (One { number: 7 }, Other { text: "a".into() }));
        assert_eq!(both("number = 7").unwrap().1, Other { text: String::new() });
    }

    #[test]
    fn a_mistake_has_its_place_and_what_is_known() {
        for (text, start) in [
            ("number = 7\nwork = 1", "file:2:1: unknown field `work`; this table has `number`, `word`; correct"),
            ("z = 1\nnumber = 7\na = 1", "file:1:1: unknown field `z`"),
            ("number = 777", "file:1:10: "),
            ("word = 'x'", "file:1:1: missing field `number`"),
            ("number = 7\nnumber = 8", "file:2:1: "),
            ("number", "file:1:7: "),
        ] {
            let failure = both(text).unwrap_err();
            assert!(failure.to_string().starts_with(start), "{text}: {failure}");
            assert_eq!(failure.status, Status::Config);
        }
    }

    #[test]
    fn tables_of_an_array_are_read_one_by_one() {
        let names = |text: &str| -> Result<Vec<One>, Mistake> {
            let mut table = Table::parse(text, Path::new(""))?;
            table.take_tables("of")?.iter_mut().map(Table::take).collect()
        };
        assert_eq!(names("[[of]]\nnumber = 1\n[[of]]\nnumber = 2").unwrap(), [One { number: 1 }, One { number: 2 }]);
        assert!(names("").unwrap().is_empty());
        assert!(names("[of]\nnumber = 1").unwrap_err().what.contains("[[of]]"));
        assert!(names("of = [1]").unwrap_err().what.contains("[[of]]"));
    }
}
