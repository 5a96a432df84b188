//! Documents that name tests name those there are.

use std::fs;
use std::path::{Path, PathBuf};

use ksf::limits::Limits;

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../..");

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

/// The words in backticks of one column of every table.
fn words_of(text: &str, column: usize) -> Vec<(usize, &str)> {
    let rows = text.lines().zip(1..).filter(|(line, _)| line.starts_with('|'));
    let cells = rows.filter_map(|(line, number)| Some((number, line.split('|').nth(column)?)));
    let quoted = cells.flat_map(|(number, cell)| cell.split('`').skip(1).step_by(2).map(move |text| (number, text)));
    quoted.flat_map(|(number, text)| text.split_whitespace().map(move |word| (number, word))).collect()
}

#[test]
fn the_tests_behind_the_promises_exist() {
    tests_exist("docs/promises.md", 2, 40);
    tests_exist("docs/security.md", 3, 10);
}

#[test]
fn the_page_on_security_has_the_defaults() {
    let text = fs::read_to_string(Path::new(REPOSITORY).join("docs/security.md")).unwrap();
    let limits = Limits::default();
    for (words, has_default) in [
        ("`connections_max` connections (65,536,", limits.connections_max == 65_536),
        ("`idle_timeout_ms` is off by default", limits.idle_timeout_ms == 0),
        ("`assembly_timeout_ms` (10 s)", limits.assembly_timeout_ms == 10_000),
        ("`out_queue_bytes_max` (256 KiB)", limits.out_queue_bytes_max == 256 << 10),
        ("`send_timeout_ms` (30 s)", limits.send_timeout_ms == 30_000),
    ] {
        assert!(text.contains(words) && has_default, "{words}");
    }
}

#[test]
fn the_tests_behind_every_accelerated_feature_exist() {
    tests_exist("docs/accel.md", 3, 20);
    tests_exist("docs/accel-hazards.md", 3, 10);
}

/// A file that is in no executable would neither be compiled nor run.
#[test]
fn every_file_of_tests_is_a_part_of_an_executable() {
    let mut files = 0;
    for folder in fs::read_dir(Path::new(REPOSITORY).join("crates")).unwrap() {
        for member in fs::read_dir(folder.unwrap().path()).unwrap() {
            let member = member.unwrap().path();
            let manifest = fs::read_to_string(member.join("Cargo.toml")).unwrap();
            // Cargo takes each file for an executable.
            if !manifest.contains("autotests = false") {
                continue;
            }
            let main = fs::read_to_string(member.join("tests/main.rs")).unwrap_or_default();
            for file in fs::read_dir(member.join("tests")).unwrap() {
                let file = file.unwrap().file_name().into_string().unwrap();
                let Some(name) = file.strip_suffix(".rs") else { continue };
                files += 1;
                let is_module = main.lines().any(|line| line == format!("mod {name};"));
                let is_target = [format!("name = \"{name}\""), format!("path = \"tests/{file}\"")];
                let is_target = is_target.iter().any(|words| manifest.lines().any(|line| line == words));
                assert!(is_module || is_target, "{}/tests/{file} is not compiled", member.display());
            }
        }
    }
    assert!(files > 100, "{files} files: the folders are read wrongly");
}

fn is_crate(found: &[(PathBuf, String)], word: &str) -> bool {
    let library = Path::new(word).join("src/lib.rs");
    let program = Path::new(word).join("src/main.rs");
    found.iter().any(|(path, _)| path.ends_with(&library) || path.ends_with(&program))
}

/// `least`: how many files and functions a document names at least, if it is read rightly.
fn tests_exist(document: &str, column: usize, least: usize) {
    let mut found = Vec::new();
    for folder in ["crates", "xtask"] {
        sources(&Path::new(REPOSITORY).join(folder), &mut found);
    }
    let text = fs::read_to_string(Path::new(REPOSITORY).join(document)).unwrap();
    let (mut files, mut functions) = (0, 0);
    // A cell names a crate for the files behind it, and a file for the tests behind it.
    let (mut cell, mut of_crate, mut named) = (0, None, None);
    for (line, word) in words_of(&text, column) {
        if line != cell {
            (cell, of_crate, named) = (line, None, None);
        }
        if word.ends_with(".rs") || word.ends_with(".c") {
            files += 1;
            let is_named = |path: &Path| {
                let in_crate = of_crate.is_none_or(|name| path.iter().any(|part| part == name));
                path.ends_with(word) && (in_crate || !(word.starts_with("src/") || word.starts_with("tests/")))
            };
            let texts: Vec<&String> = found.iter().filter(|(path, _)| is_named(path)).map(|(_, text)| text).collect();
            assert!(!texts.is_empty(), "{document}:{line}: no file {word} of {of_crate:?}");
            named = Some(texts);
        } else if is_crate(&found, word) {
            of_crate = Some(word);
        } else if word.contains('_') && word.chars().all(|c| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit()) {
            functions += 1;
            let definition = [format!("fn {word}("), format!("static void {word}(")];
            let exists = |text: &String| definition.iter().any(|definition| text.contains(definition));
            let is_there = match &named {
                Some(texts) => texts.iter().any(|text| exists(text)),
                None => found.iter().any(|(_, text)| exists(text)),
            };
            assert!(is_there, "{document}:{line}: no test {word} in the file that is named");
        } else if word.contains('_') && word.chars().all(|c| c == '_' || c.is_ascii_uppercase()) {
            let quoted = format!("\"{word}\"");
            let exists = found.iter().any(|(path, text)| path.ends_with("tests/host.rs") && text.contains(&quoted));
            assert!(exists, "{document}:{line}: no mutant {word}");
        }
    }
    assert!(files > least && functions > least, "{document}: {files} files and {functions} tests: it is read wrongly");
}
