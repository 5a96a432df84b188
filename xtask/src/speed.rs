//! `cargo xtask speed`: the figures of reports in documents.
//!
//! A figure of a report stands behind a marker (`bench/cite.rs`). In a document where every figure is to be marked, a
//! figure of another kind (a version, a size, what was seen by hand) is in code, or named by a comment:
//!
//! ```text
//!   <!-- not of a report: Linux 6.18; 64 messages; 83 % of the time -->
//! ```
//!
//! A comment before the first section speaks of the whole document, each other one of its section.

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
    blank_between(&mut plain, "```", "```");
    blank_between(&mut plain, "`", "`");
    blank_between(&mut plain, "](", ")");

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
    problems.extend(figures(&plain).into_iter().map(|place| {
        let what = format!("{} has no marker, and no comment says that it is not of a report", &text[place.clone()]);
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

fn blank_between(text: &mut [u8], open: &str, close: &str) {
    let find = |text: &[u8], word: &str, from: usize| {
        text[from..].windows(word.len()).position(|window| window == word.as_bytes()).map(|at| from + at)
    };
    let mut from = 0;
    while let Some(start) = find(text, open, from) {
        let Some(end) = find(text, close, start + open.len()) else { return };
        from = end + close.len();
        blank(text, start..from);
    }
}

/// Where a phrase stands, also across the end of a line, and not as a part of longer numbers.
fn phrase_places(text: &[u8], phrase: &str, scope: &Range<usize>) -> Vec<Range<usize>> {
    let same = |byte: &u8, wanted: &u8| byte == wanted || (*byte == b'\n' && *wanted == b' ');
    let is_at = |start: usize| {
        let end = start + phrase.len();
        let is_alone =
            (start == 0 || !belongs_to_word(text[start - 1])) && !text.get(end).is_some_and(u8::is_ascii_digit);
        is_alone && text[start..end].iter().zip(phrase.as_bytes()).all(|(byte, wanted)| same(byte, wanted))
    };
    let last = scope.end.saturating_sub(phrase.len());
    (scope.start..=last).filter(|start| !phrase.is_empty() && is_at(*start)).map(|at| at..at + phrase.len()).collect()
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
