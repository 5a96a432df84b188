//! docs/promises.md names tests: those there are.

use std::fs;
use std::path::{Path, PathBuf};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Rust and C files below a folder, with their text.
fn sources(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if !path.ends_with("target") {
                sources(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "c") {
            let text = fs::read_to_string(&path).unwrap();
            found.push((path, text));
        }
    }
}

/// The words in backticks of the second column of every table.
fn words_of(text: &str) -> Vec<(usize, &str)> {
    let rows = text.lines().zip(1..).filter(|(line, _)| line.starts_with('|'));
    let cells = rows.filter_map(|(line, number)| Some((number, line.split('|').nth(2)?)));
    let quoted = cells.flat_map(|(number, cell)| cell.split('`').skip(1).step_by(2).map(move |text| (number, text)));
    quoted.flat_map(|(number, text)| text.split_whitespace().map(move |word| (number, word))).collect()
}

#[test]
fn the_tests_behind_the_promises_exist() {
    let mut found = Vec::new();
    for folder in ["crates", "xtask"] {
        sources(&Path::new(REPOSITORY).join(folder), &mut found);
    }
    let text = fs::read_to_string(Path::new(REPOSITORY).join("docs/promises.md")).unwrap();
    let (mut files, mut functions) = (0, 0);
    for (line, word) in words_of(&text) {
        if word.ends_with(".rs") || word.ends_with(".c") {
            files += 1;
            assert!(found.iter().any(|(path, _)| path.ends_with(word)), "docs/promises.md:{line}: no file {word}");
        } else if word.contains('_') && word.chars().all(|c| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit()) {
            functions += 1;
            let definition = [format!("fn {word}("), format!("static void {word}(")];
            let exists = |text: &String| definition.iter().any(|definition| text.contains(definition));
            assert!(found.iter().any(|(_, text)| exists(text)), "docs/promises.md:{line}: no test {word}");
        } else if word.contains('_') && word.chars().all(|c| c == '_' || c.is_ascii_uppercase()) {
            let quoted = format!("\"{word}\"");
            let exists = found.iter().any(|(path, text)| path.ends_with("tests/host.rs") && text.contains(&quoted));
            assert!(exists, "docs/promises.md:{line}: no mutant {word}");
        }
    }
    assert!(files > 40 && functions > 40, "{files} files and {functions} tests: the document is read wrongly");
}
