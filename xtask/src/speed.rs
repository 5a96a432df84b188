//! `cargo xtask speed`: the figures of reports in documents.
//!
//! A figure of a report stands behind a marker (`bench/cite.rs`). In a document where every figure is to be marked, a
//! figure of another kind (a version, a size, what was seen by hand) is in code, or named by a comment:
//!
//! ```text
//!   <!-- not of a report: Linux 6.18; 64 messages; 83 % of the time; a third of them -->
//! ```
//!
//! A comment before the first section speaks of the whole document, each other one of its section.
//!
//! Figures are numbers in digits, and of those in words what only a measurement can tell: ratios (half, a third, four
//! fifths, twice, a factor of two) and numbers of runs (one run, four of the server's runs). Other words for numbers (two
//! CPUs, one system call for each) and other words for ratios (most, a few) are not looked at.

use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use crate::bench::cite::{END, Problem, fill, names};

#[derive(clap::Args)]
pub(crate) struct SpeedOptions {
    /// Write nothing: say which figures are not those of their report, or have no marker, and fail if there is one
    #[arg(long)]
    check: bool,
    /// Write nothing: print all markers that the report in DIR has a figure for, with these
    #[arg(long, value_name = "DIR", conflicts_with = "check")]
    names: Option<PathBuf>,
}

/// A document with figures of reports.
struct Document {
    path: &'static str,
    /// From the document.
    results: &'static str,
    /// No figure is without a marker.
    all_marked: bool,
}

const DOCUMENTS: [Document; 3] = [
    Document { path: "docs/speed.md", results: "../bench/results", all_marked: true },
    Document { path: "docs/limitations.md", results: "../bench/results", all_marked: false },
    Document { path: "README.md", results: "bench/results", all_marked: true },
];

pub(crate) fn run(options: &SpeedOptions) -> Result<()> {
    if let Some(dir) = &options.names {
        names(dir)?.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    let mut problems = Vec::new();
    for document in &DOCUMENTS {
        let look = document.look()?;
        problems.extend(look.problems);
        if options.check {
            problems.extend(look.stale);
        } else if look.text != look.filled {
            fs::write(document.place(), look.filled).with_context(|| format!("cannot write {}", document.path))?;
            eprintln!("speed: wrote figures into {}", document.path);
        }
    }
    problems.iter().for_each(|problem| println!("{problem}"));
    ensure!(problems.is_empty(), "{} figures are not those of a report", problems.len());
    eprintln!("speed: all figures are those of their reports");
    Ok(())
}

/// What is wrong in a document, as `path:line: what`.
struct Found {
    path: &'static str,
    problem: Problem,
}

impl fmt::Display for Found {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}:{}: {}", self.path, self.problem.line, self.problem.what)
    }
}

/// What was found in a document.
struct Look {
    text: String,
    filled: String,
    /// Markers without a figure, and figures without a marker.
    problems: Vec<Found>,
    /// Figures that are others now.
    stale: Vec<Found>,
}

impl Document {
    fn place(&self) -> PathBuf {
        crate::root().join(self.path)
    }

    fn look(&self) -> Result<Look> {
        let text = fs::read_to_string(self.place()).with_context(|| format!("cannot read {}", self.path))?;
        let filled = fill(&text, &crate::root().join("bench/results"), self.results);
        let mut problems = filled.problems;
        if self.all_marked {
            problems.extend(unmarked(&text));
        }
        let found = |problem| Found { path: self.path, problem };
        Ok(Look {
            text,
            filled: filled.text,
            problems: problems.into_iter().map(found).collect(),
            stale: filled.stale.into_iter().map(found).collect(),
        })
    }
}

/// How a comment begins that names figures of another kind.
const OTHER_KIND: &str = " not of a report:";

/// Figures that neither stand behind a marker nor are of another kind, and comments that name what is not there.
fn unmarked(text: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    let comments = comments(text);
    let mut plain = text.as_bytes().to_vec();
    for (place, comment) in &comments {
        let is_marker = !comment.starts_with(' ') && *comment != "/";
        let figure_end = text[place.end..].find(END).filter(|_| is_marker).map_or(0, |length| length + END.len());
        blank(&mut plain, place.start..place.end + figure_end);
    }
    blank_fences(&mut plain);
    problems.extend(blank_inline(&mut plain, "`", "`").into_iter().map(|place| {
        let what = "a backtick has no other one in its paragraph, so what is code cannot be told".to_owned();
        Problem { line: line_of(text, place), what }
    }));
    blank_inline(&mut plain, "](", ")");

    for (place, comment) in &comments {
        let Some(phrases) = comment.strip_prefix(OTHER_KIND) else { continue };
        let scope = scope(text, place.start);
        for phrase in phrases.split(';') {
            let phrase = phrase.split_whitespace().collect::<Vec<_>>().join(" ");
            let places = phrase_places(&plain, &phrase, &scope);
            if places.is_empty() {
                let what = format!("\"{phrase}\" is said to be of no report, and is not there");
                problems.push(Problem { line: line_of(text, place.start), what });
            }
            places.into_iter().for_each(|place| blank(&mut plain, place));
        }
    }
    let mut figures = figures(&plain);
    figures.extend(figures_in_words(&plain));
    figures.sort_by_key(|place| place.start);
    problems.extend(figures.into_iter().map(|place| {
        let figure = text[place.clone()].split_whitespace().collect::<Vec<_>>().join(" ");
        let what = format!("{figure} has no marker, and no comment says that it is not of a report");
        Problem { line: line_of(text, place.start), what }
    }));
    problems
}

/// Comments with what is between their marks.
fn comments(text: &str) -> Vec<(Range<usize>, &str)> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(start) = text[from..].find("<!--").map(|at| from + at) {
        let Some(length) = text[start..].find("-->") else { break };
        found.push((start..start + length + 3, &text[start + 4..start + length]));
        from = start + length + 3;
    }
    found
}

/// The section that a place is in; the whole text before the first one.
fn scope(text: &str, place: usize) -> Range<usize> {
    match text[..place].rfind("\n## ") {
        None => 0..text.len(),
        Some(start) => start..text[place..].find("\n## ").map_or(text.len(), |length| place + length),
    }
}

fn blank(text: &mut [u8], place: Range<usize>) {
    text[place].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
}

fn find(text: &[u8], word: &str, from: usize) -> Option<usize> {
    let rest = text.get(from..)?;
    rest.windows(word.len()).position(|window| window == word.as_bytes()).map(|at| from + at)
}

/// Blanks blocks of code.
fn blank_fences(text: &mut [u8]) {
    const FENCE: &str = "```";
    let mut from = 0;
    while let Some(start) = find(text, FENCE, from) {
        let Some(end) = find(text, FENCE, start + FENCE.len()) else { return };
        from = end + FENCE.len();
        blank(text, start..from);
    }
}

/// Blanks what is between two marks of one paragraph. Returns where a mark has no second one in its paragraph: what follows
/// it stays.
fn blank_inline(text: &mut [u8], open: &str, close: &str) -> Vec<usize> {
    let mut alone = Vec::new();
    let mut from = 0;
    while let Some(start) = find(text, open, from) {
        let paragraph_end = find(text, "\n\n", start).unwrap_or(text.len());
        from = start + open.len();
        match find(&text[..paragraph_end], close, from) {
            None => alone.push(start),
            Some(end) => {
                from = end + close.len();
                blank(text, start..from);
            }
        }
    }
    alone
}

/// Where a phrase stands, also across the end of a line, and not as a part of longer numbers or words.
fn phrase_places(text: &[u8], phrase: &str, scope: &Range<usize>) -> Vec<Range<usize>> {
    let same = |byte: &u8, wanted: &u8| byte == wanted || (*byte == b'\n' && *wanted == b' ');
    let is_at = |start: usize| {
        let end = start + phrase.len();
        let is_alone = (start == 0 || !belongs_to_word(text[start - 1])) && !goes_on(text, end);
        is_alone && text[start..end].iter().zip(phrase.as_bytes()).all(|(byte, wanted)| same(byte, wanted))
    };
    let last = scope.end.saturating_sub(phrase.len());
    (scope.start..=last).filter(|start| !phrase.is_empty() && is_at(*start)).map(|at| at..at + phrase.len()).collect()
}

/// Whether a number or a word goes on here: with a point or a comma only if a digit is behind it.
fn goes_on(text: &[u8], at: usize) -> bool {
    match text.get(at) {
        Some(b'.' | b',') => text.get(at + 1).is_some_and(u8::is_ascii_digit),
        Some(byte) => byte.is_ascii_alphanumeric() || *byte == b'_',
        None => false,
    }
}

fn belongs_to_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b',')
}

/// Numbers with their points and commas. Digits behind letters are parts of names: p99, IPv6.
fn figures(text: &[u8]) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(start) = (from..text.len()).find(|&at| belongs_to_word(text[at])) {
        let end = (start..text.len()).find(|&at| !belongs_to_word(text[at])).unwrap_or(text.len());
        if text[start].is_ascii_digit() {
            let is_number = |byte: &&u8| byte.is_ascii_digit() || matches!(byte, b'.' | b',');
            let length = text[start..end].iter().take_while(is_number).count();
            let number = &text[start..start + length];
            let points = number.iter().rev().take_while(|byte| !byte.is_ascii_digit()).count();
            found.push(start..start + length - points);
        }
        from = end;
    }
    found
}

const NUMBERS: [&str; 12] =
    ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"];
/// They are ratios wherever they stand.
const RATIOS: [&str; 17] = [
    "half",
    "halves",
    "thirds",
    "quarter",
    "quarters",
    "fifths",
    "sixths",
    "sevenths",
    "eighths",
    "ninths",
    "tenths",
    "hundredths",
    "twice",
    "thrice",
    "twofold",
    "threefold",
    "tenfold",
];
/// They are ratios behind a number or "a", and else say which one.
const PARTS: [&str; 8] = ["third", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth"];
/// Words of the longest figure in words: "four of the other server's runs".
const FIGURE_WORDS_MAX: usize = 7;

/// Ratios and numbers of runs in words.
fn figures_in_words(text: &[u8]) -> Vec<Range<usize>> {
    let words = words(text);
    let mut found: Vec<Range<usize>> = Vec::new();
    for (at, first) in words.iter().enumerate() {
        let overlaps = found.last().is_some_and(|last| first.place.start < last.end);
        if let Some(count) = figure_words(&words[at..]).filter(|_| !overlaps) {
            found.push(first.place.start..words[at + count - 1].place.end);
        }
    }
    found
}

/// How many of these words, from the first, are a figure.
fn figure_words(words: &[Word]) -> Option<usize> {
    let (first, behind) = words.split_first()?;
    let follow = behind.iter().take(FIGURE_WORDS_MAX - 1).take_while(|word| word.follows);
    let words: Vec<&str> = std::iter::once(first).chain(follow).map(|word| word.text.as_str()).collect();
    match *words {
        [number, part, ..] if NUMBERS.contains(&number) && (is_run(part) || is_part(part)) => Some(2),
        [number, "of", ref whose @ ..] if NUMBERS.contains(&number) => {
            whose.iter().position(|word| is_run(word)).map(|at| at + 3)
        }
        ["a", part, ..] if is_part(part) => Some(2),
        ["factor", "of", number, ..] if NUMBERS.contains(&number) => Some(3),
        [ratio, ..] if RATIOS.contains(&ratio) => Some(1),
        _ => None,
    }
}

fn is_run(word: &str) -> bool {
    matches!(word, "run" | "runs")
}

fn is_part(word: &str) -> bool {
    RATIOS.contains(&word) || PARTS.contains(&word)
}

/// A word of letters, in lower case.
struct Word {
    text: String,
    place: Range<usize>,
    /// Only blanks or a hyphen are between it and the word before.
    follows: bool,
}

fn words(text: &[u8]) -> Vec<Word> {
    let is_letter = |at: &usize| text[*at].is_ascii_alphabetic() || text[*at] == b'\'';
    let mut words = Vec::new();
    let mut from = 0;
    while let Some(start) = (from..text.len()).find(is_letter) {
        let end = (start..text.len()).find(|at| !is_letter(at)).unwrap_or(text.len());
        let follows = text[from..start].iter().all(|byte| matches!(byte, b' ' | b'\n' | b'-'));
        let text = String::from_utf8_lossy(&text[start..end]).to_ascii_lowercase();
        words.push(Word { text, place: start..end, follows });
        from = end;
    }
    words
}

fn line_of(text: &str, place: usize) -> usize {
    1 + text[..place].matches('\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_say_what_the_reports_say() {
        for document in &DOCUMENTS {
            let look = document.look().unwrap();
            let all: Vec<String> = look.problems.iter().chain(&look.stale).map(Found::to_string).collect();
            assert!(all.is_empty(), "see: cargo xtask speed --check\n{}", all.join("\n"));
            assert!(look.text == look.filled, "{} differs from bench/results; run: cargo xtask speed", document.path);
        }
    }

    fn found(text: &str) -> Vec<(usize, String)> {
        let word = |what: &str| what.split(' ').next().unwrap().to_owned();
        unmarked(text).into_iter().map(|problem| (problem.line, word(&problem.what))).collect()
    }

    #[test]
    fn figures_without_a_marker_are_found_with_their_lines() {
        let text = "# 9 title\nOne of 10,000 takes <!--value a b c d-->998<!--/--> bytes, or 1.5.\n\n\
                    p99 of IPv6, `-a 128`, [a](b-2.md), <!-- 77 --> 12 us\n```\n5\n```\n17\n";
        let all = [(1, "9"), (2, "10,000"), (2, "1.5"), (4, "12"), (8, "17")];
        assert_eq!(found(text), all.map(|(line, figure)| (line, figure.to_owned())));
    }

    #[test]
    fn a_comment_names_figures_of_another_kind() {
        let text = "<!-- not of a report: 64 messages; Linux\n6.18 -->\nOn Linux 6.18 64\nmessages, 164 messages.\n\
                    ## One\n<!-- not of a report: 7 us -->\n7 us and 64 messages\n## Two\n7 us\n";
        assert_eq!(found(text), [(4, "164".to_owned()), (9, "7".to_owned())]);
        let stale = unmarked("<!-- not of a report: 5 us -->\n6 seconds\n");
        assert!(stale[0].line == 1 && stale[0].what.contains("\"5 us\""), "{}", stale[0].what);
        assert_eq!(stale.len(), 2, "nor does it hide another number");
    }

    #[test]
    fn a_comment_names_no_part_of_a_longer_number() {
        for (phrase, longer, figure) in [
            ("589", "589.7", "589.7"),
            ("10,000", "10,000,000", "10,000,000"),
            ("on 6.18", "on 6.18.44", "6.18.44"),
            ("7 us", "7 users", "7"),
        ] {
            let text = format!("<!-- not of a report: {phrase} -->\n{phrase}. Also {longer}, {phrase}, and {phrase}\n");
            assert_eq!(found(&text), [(2, figure.to_owned())], "{phrase}");
        }
    }

    #[test]
    fn a_backtick_hides_nothing_outside_of_its_paragraph() {
        let text = "`5` and ` then 6.\n\n7 and `8`, [9](a-10.md\n\n11) 12\n";
        let all = [(1, "a"), (1, "6"), (3, "7"), (3, "9"), (3, "10"), (5, "11"), (5, "12")];
        assert_eq!(found(text), all.map(|(line, figure)| (line, figure.to_owned())));
    }

    #[test]
    fn ratios_and_numbers_of_runs_in_words_are_figures() {
        let figures = [
            "one run",
            "Two runs",
            "four of the other server's runs",
            "one of its runs",
            "half",
            "A third",
            "one third",
            "two-thirds",
            "a quarter",
            "four\nfifths",
            "twice",
            "a factor of two",
            "one half",
        ];
        for figure in figures {
            let said = unmarked(&format!("It has {figure}, as said.\n"));
            assert_eq!(said.len(), 1, "{figure}");
            let named = format!("<!-- not of a report: {figure} -->\nIt has {figure}, as said.\n");
            assert_eq!(unmarked(&named).len(), 0, "{figure}");
        }
        let none = "One thread on two CPUs runs; the third one. A server of two runs first: one. Runs of `half`.\n";
        assert_eq!(unmarked(none).len(), 1, "of two runs: a number of runs, as far as words tell");
        assert!(unmarked(&none.replace("of two", "of both")).is_empty());
    }

    #[test]
    fn names_are_markers_that_can_be_cited() {
        let results = crate::root().join("bench/results");
        let dirs: Vec<PathBuf> = fs::read_dir(&results).unwrap().map(|entry| entry.unwrap().path()).collect();
        for dir in dirs.iter().filter(|dir| dir.join("raw.json").exists()) {
            let all = names(dir).unwrap();
            let filled = fill(&all.join("\n"), &results, "../bench/results");
            let said: Vec<&str> = filled.problems.iter().chain(&filled.stale).map(|it| it.what.as_str()).collect();
            assert!(all.len() > 10 && said.is_empty(), "{}: {said:?}", dir.display());
        }
    }
}
