//! Dependencies between the folders of `crates/` go one way, as ARCHITECTURE.md draws them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../..");

/// Each folder of `crates/` with the folders that its crates may depend on, apart from their own.
const ALLOWED: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("kernel", &["core"]),
    ("mux", &["core", "kernel"]),
    ("services", &["core"]),
    ("accel", &["core", "kernel"]),
    ("tools", &["core", "kernel", "mux", "services", "accel"]),
    ("testing", &["core", "kernel", "mux", "services", "accel", "tools"]),
];

// Tests may use any crate below the tools: those of the kernel half run real services, for example.

/// A crate: its folder below `crates/`, what it needs to build, and what only its tests need.
struct Manifest {
    folder: String,
    needs: Vec<String>,
    tests_need: Vec<String>,
}

fn manifests() -> BTreeMap<String, Manifest> {
    let mut found = BTreeMap::new();
    for folder in fs::read_dir(Path::new(REPOSITORY).join("crates")).unwrap() {
        let folder = folder.unwrap();
        for member in fs::read_dir(folder.path()).unwrap() {
            let text = fs::read_to_string(member.unwrap().path().join("Cargo.toml")).unwrap();
            let manifest: toml::Table = text.parse().unwrap();
            let names = |sections: &[&str]| -> Vec<String> {
                let tables = sections.iter().filter_map(|section| manifest.get(*section)?.as_table());
                tables.flat_map(|table| table.keys().cloned()).collect()
            };
            let name = manifest["package"]["name"].as_str().unwrap().to_owned();
            let parsed = Manifest {
                folder: folder.file_name().into_string().unwrap(),
                needs: names(&["dependencies", "build-dependencies"]),
                tests_need: names(&["dev-dependencies"]),
            };
            found.insert(name, parsed);
        }
    }
    found
}

#[test]
fn crates_depend_on_lower_folders_only() {
    let crates = manifests();
    assert!(crates.len() > 15, "{} crates: the manifests are read wrongly", crates.len());
    let mut arrows = 0;
    for (name, manifest) in &crates {
        let folder = manifest.folder.as_str();
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| *known == folder) else {
            panic!("crates/{folder} of {name} is in no layer: add it to ALLOWED and to ARCHITECTURE.md");
        };
        for needed in &manifest.needs {
            let Some(to) = crates.get(needed) else { continue };
            arrows += 1;
            let to = to.folder.as_str();
            assert!(to == folder || allowed.contains(&to), "{folder}/{name} depends on {to}/{needed}");
        }
        for needed in &manifest.tests_need {
            let Some(to) = crates.get(needed) else { continue };
            let to = to.folder.as_str();
            let below = folder == "tools" || folder == "testing" || to != "tools";
            assert!(below, "the tests of {folder}/{name} depend on {to}/{needed}");
        }
    }
    assert!(arrows > 30, "{arrows} dependencies: the manifests are read wrongly");
}
