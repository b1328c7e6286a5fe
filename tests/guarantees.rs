//! `docs/guarantees.md` names files that are there and tests that are in them.

use std::path::Path;

#[test]
fn every_file_and_test_that_is_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("docs/guarantees.md")).unwrap();
    let (mut files, mut tests) = (0, 0);
    for row in text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| **")) {
        let columns: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        assert!(columns.len() <= 3, "{row}");
        for (column, text) in columns.iter().enumerate() {
            // What stands between two backticks; in the last column a file and then the tests in it.
            let mut file = None;
            for name in text.split('`').skip(1).step_by(2) {
                if name.contains('/') && !name.contains(' ') && Path::new(name).extension().is_some() {
                    let found = std::fs::read_to_string(root.join(name));
                    file = Some((name, found.unwrap_or_else(|error| panic!("{name}: {error}"))));
                    files += 1;
                } else if column == 2 && !name.contains(' ') {
                    let (path, content) = file.as_ref().unwrap_or_else(|| panic!("no file before {name}"));
                    assert!(content.contains(name), "{path} has no {name}");
                    tests += 1;
                }
            }
        }
    }
    assert!(files > 60 && tests > 50, "{files} files, {tests} tests");
}
