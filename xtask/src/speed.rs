//! `cargo xtask speed`: docs/speed.md with the figures of the reports that it names.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::bench::cite::fill;

fn path() -> PathBuf {
    crate::root().join("docs/speed.md")
}

/// The text as it is, and as it should be.
fn texts() -> Result<(String, String)> {
    let text = fs::read_to_string(path()).context("cannot read docs/speed.md")?;
    let filled = fill(&text, &crate::root().join("bench/results")).context("docs/speed.md")?;
    Ok((text, filled))
}

pub(crate) fn rewrite() -> Result<()> {
    let (text, filled) = texts()?;
    if text == filled {
        eprintln!("speed: docs/speed.md has the figures of its reports");
        return Ok(());
    }
    fs::write(path(), filled).context("cannot write docs/speed.md")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docs_speed_says_what_the_reports_say() {
        let (text, filled) = texts().unwrap();
        assert!(text == filled, "docs/speed.md differs from bench/results; run: cargo xtask speed");
    }

    /// A measured figure has a marker before it, or an older one ("found by hand") says that it has none.
    #[test]
    fn no_figure_of_docs_speed_is_written_by_hand() {
        let (text, _) = texts().unwrap();
        let mut rest = text.as_str();
        let mut by_hand = Vec::new();
        while let Some((before, marker)) = rest.split_once("<!--") {
            by_hand.extend(decimals(before));
            let (marker, after) = marker.split_once("-->").unwrap();
            let is_marker = !marker.starts_with(' ');
            rest = if is_marker { after.split_once("<!--/-->").unwrap().1 } else { after };
        }
        by_hand.extend(decimals(rest));
        by_hand.retain(|number| !NOT_MEASURED.contains(&number.as_str()));
        assert!(by_hand.is_empty(), "without a marker: {by_hand:?}");
    }

    /// Versions of Linux, and a quantile.
    const NOT_MEASURED: [&str; 3] = ["6.1", "6.18", "99.9"];

    /// Numbers with a point: integers may be anything.
    fn decimals(text: &str) -> Vec<String> {
        let words = text.split(|letter: char| !letter.is_ascii_digit() && letter != '.');
        let words = words.map(|word| word.trim_matches('.')).filter(|word| word.contains('.'));
        words.map(str::to_owned).collect()
    }
}
