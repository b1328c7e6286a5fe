//! `docs/guarantees.md` and `docs/guarantees-tests.md` name existing files and existing tests.

use std::path::Path;

/// Declares the scenarios in the table of differences from torch.
const DIFFERENCES: &str = "tests/torch/differential/known.cpp";

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the words between two backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

fn is_file(name: &str) -> bool {
    name.contains('/') && !name.contains(' ') && Path::new(name).extension().is_some()
}

/// Returns the columns of each row of a table, without the head and the rows with a subject in
/// bold.
fn rows(page: &str) -> Vec<Vec<&str>> {
    let lines = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| **"));
    let rows = lines.map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect::<Vec<_>>());
    rows.filter(|columns| !["promise", "difference"].contains(&columns[0])).collect()
}

#[test]
fn every_file_and_test_that_is_named_exists() {
    let page = read("docs/guarantees-tests.md");
    let (mut files, mut tests) = (0, 0);
    let rows = rows(&page);
    for columns in &rows {
        let [promise, named] = columns[..] else { panic!("{columns:?}") };
        // A file, then the tests in this file.
        let mut file = None;
        for name in quoted(named) {
            assert!(!name.contains(' '), "{promise}: {name}");
            if is_file(name) {
                file = Some((name, read(name)));
                files += 1;
            } else {
                let (path, content) = file.as_ref().unwrap_or_else(|| panic!("no file before {name}"));
                assert!(content.contains(name), "{path} has no {name}");
                tests += 1;
            }
        }
        assert!(file.is_some(), "no test holds: {promise}");
    }
    assert!(
        rows.len() > 190 && files > 300 && tests > 650,
        "{} rows, {files} files, {tests} tests",
        rows.len()
    );
}

#[test]
fn every_difference_from_torch_names_its_scenarios() {
    let page = read("docs/guarantees.md");
    let known = read(DIFFERENCES);
    assert!(page.contains(DIFFERENCES));
    for name in quoted(&page).filter(|name| is_file(name)) {
        read(name);
    }
    let mut scenarios = 0;
    let rows = rows(&page);
    for columns in &rows {
        let [difference, named] = columns[..] else { panic!("{columns:?}") };
        assert!(named.contains('`'), "no scenario shows: {difference}");
        for name in quoted(named) {
            assert!(known.contains(&format!("\"{name}\"")), "{DIFFERENCES} has no {name}");
            scenarios += 1;
        }
    }
    assert!(rows.len() > 10 && scenarios > 15, "{} rows, {scenarios} scenarios", rows.len());
}
