//! What a reader is sent to is there: the files that ARCHITECTURE.md and CONTRIBUTING.md name.

use std::fs;
use std::path::{Path, PathBuf};

const DOCUMENTS: [&str; 2] = ["ARCHITECTURE.md", "CONTRIBUTING.md"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// All files and folders of the repository, from its root.
fn tree() -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = entry.file_name();
            if name == "target" || name == ".git" {
                continue;
            }
            found.push(entry.path().strip_prefix(root()).unwrap().to_str().expect("names are UTF-8").to_owned());
            if entry.file_type().unwrap().is_dir() {
                folders.push(entry.path());
            }
        }
    }
    found
}

/// Code in a line, and where its links go.
fn words(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split('`').skip(1).step_by(2);
    let links = line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.split('#').next().unwrap()));
    code.chain(links.filter(|link| !link.is_empty() && !link.contains("://")))
}

/// Whether a word of a document names a file or a folder, and not a type or a command.
fn is_path(word: &str) -> bool {
    const ENDS: [&str; 8] = [".rs", ".h", ".c", ".toml", ".md", ".txt", ".sh", ".cpp"];
    let letters = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte);
    let is_of_tree = !word.starts_with('/') && word.bytes().all(letters);
    is_of_tree && (word.ends_with('/') || ENDS.iter().any(|end| word.ends_with(end)) || word.contains('/'))
}

/// Whether a word is the end of a path, or the whole.
fn is_there(tree: &[String], word: &str) -> bool {
    let wanted = word.trim_end_matches('/');
    tree.iter().any(|path| path == wanted || path.strip_suffix(wanted).is_some_and(|rest| rest.ends_with('/')))
}

#[test]
fn files_that_documents_name_are_there() {
    let tree = tree();
    let mut missing = Vec::new();
    for document in DOCUMENTS {
        let text = fs::read_to_string(root().join(document)).unwrap();
        let mut named = 0;
        for (number, line) in (1..).zip(text.lines()) {
            let paths: Vec<&str> = words(line).filter(|word| is_path(word)).collect();
            named += paths.len();
            let gone = paths.into_iter().filter(|path| !is_there(&tree, path) && !BUILT.contains(path));
            missing.extend(gone.map(|path| format!("{document}:{number}: {path}")));
        }
        assert!(named > 5, "{document} names {named} files");
    }
    assert!(missing.is_empty(), "not there:\n{}", missing.join("\n"));
}

/// Made by a build.
const BUILT: [&str; 1] = ["target/"];

/// In "Where to add what" a path begins below `crates/`, at the top, or beside the one before it in its row.
#[test]
fn the_table_of_places_can_be_followed() {
    let (tree, text) = (tree(), fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap());
    let (_, table) = text.split_once("## Where to add what").unwrap();
    let (table, _) = table.split_once("\n## ").unwrap();
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    for wanted in ["| a framing |", "| an RPC program |", "| a limit |"] {
        assert!(rows.iter().any(|row| row.starts_with(wanted)), "no row {wanted}");
    }
    let mut lost = Vec::new();
    let mut before = PathBuf::new();
    for row in rows {
        for word in words(row).filter(|word| is_path(word)) {
            let beside = before.ancestors().map(|folder| folder.join(word));
            let mut places = [PathBuf::from(word), Path::new("crates").join(word)].into_iter().chain(beside);
            let is_in_tree = |place: &PathBuf| {
                let place = place.to_str().unwrap().trim_end_matches('/');
                tree.iter().any(|path| path == place)
            };
            match places.find(is_in_tree) {
                Some(place) => before = place,
                None => lost.push(format!("{word} in: {}", row.split('|').nth(1).unwrap().trim())),
            }
        }
    }
    assert!(
        lost.is_empty(),
        "neither at the top, nor below crates/, nor beside what stands before:\n{}",
        lost.join("\n")
    );
}
