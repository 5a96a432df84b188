//! `docs/kcm.md` says what the records say, and names tests that exist.

use super::support::{record, repository};

/// The source of a crate's tests.
fn sources() -> String {
    let folders = ["crates/mux/ksf-mux/tests/kcm", "crates/mux/ksf-kcm-preload/tests"];
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(repository().join(folder)).into_iter().flatten());
    files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect()
}

/// Rows of the table whose head begins with this word.
fn table(head: &str) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(repository().join("docs/kcm.md")).unwrap();
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split(" | ").map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
    };
    let rows = text.lines().skip_while(|line| !line.starts_with(&format!("| {head} |"))).skip(2);
    rows.take_while(|line| line.starts_with('|')).map(cells).collect()
}

#[test]
fn the_contract_table_is_the_records_and_its_tests_exist() {
    let (theirs, ours, rows) = (record("af_kcm.txt"), record("ours.txt"), table("Row"));
    assert_eq!(theirs.len(), ours.len());
    let (names, sources) =
        (|record: &[(String, String)]| record.iter().map(|(row, _)| row.clone()).collect::<Vec<_>>(), sources());
    assert_eq!(names(&theirs), names(&ours));
    assert_eq!(names(&theirs), rows.iter().map(|row| row[0].clone()).collect::<Vec<_>>());
    for ((row, theirs), ours) in rows.iter().zip(&theirs).zip(&ours) {
        assert_eq!((&row[1], &row[2]), (&theirs.1, &ours.1), "{}", row[0]);
        assert!(sources.contains(&format!("fn {}()", row[3])), "{}: no test {}", row[0], row[3]);
    }
}

#[test]
fn every_bug_has_a_test() {
    let (rows, sources) = (table("Bug"), sources());
    let names: Vec<_> = rows.iter().map(|row| row[0].clone()).collect();
    assert_eq!(names, (1..=10).map(|bug| format!("B{bug}")).collect::<Vec<_>>());
    for row in rows {
        let test = row.last().unwrap();
        assert!(test.starts_with(&format!("bug_{}_", row[0].to_lowercase())), "{row:?}");
        assert!(sources.contains(&format!("fn {test}()")), "no test {test}");
    }
}
