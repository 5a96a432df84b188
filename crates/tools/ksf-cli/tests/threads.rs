//! Every thread of the product ends the process when it panics, as ARCHITECTURE.md promises ("A panic ends what it belongs to,
//! or the process").

use std::fs;
use std::path::Path;

/// `ksf-load` is not among them: it catches what its threads panic with, and reports it as the result of a run.
const PRODUCT: &[&str] = &["core", "kernel", "mux", "services", "accel", "tools/ksf-cli"];

/// Calls `see` with each source file below a directory, without tests.
fn sources(directory: &Path, see: &mut impl FnMut(&Path, &str)) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap();
        if path.is_dir() && !matches!(name, "tests" | "benches") {
            sources(&path, see);
        } else if name.ends_with(".rs") && !matches!(name, "tests.rs" | "build.rs") {
            let text = fs::read_to_string(&path).unwrap();
            see(&path, text.split("#[cfg(test)]\nmod ").next().unwrap_or_default());
        }
    }
}

/// The statement of each thread that its starter does not join at once.
fn unguarded(text: &str) -> impl Iterator<Item = &str> {
    let statements = ["thread::spawn(", "thread::Builder"].into_iter().flat_map(|start| text.match_indices(start));
    statements.map(|(at, _)| text[at..].split(';').next().unwrap_or_default()).filter(|it| !it.contains("spawn_scoped"))
}

#[test]
fn only_the_guarded_way_starts_a_thread() {
    let mut started = 0;
    for part in PRODUCT {
        sources(&ksf_test::repository().join("crates").join(part), &mut |path, text| {
            started += text.matches("threads::start(").count();
            if !path.ends_with("core/ksf/src/threads.rs") {
                let unguarded: Vec<_> = unguarded(text).collect();
                assert!(unguarded.is_empty(), "{}: use ksf::threads::start: {unguarded:#?}", path.display());
            }
        });
    }
    assert!(started > 15, "{started} threads: the sources are read wrongly");
}
