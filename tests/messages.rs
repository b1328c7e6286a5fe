//! Error sentences: *cannot do something: reason; remedy*.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|end| end == "rs") {
            into.push(path);
        }
    }
}

#[test]
fn a_wrong_state_says_what_cannot_be_done_why_and_what_to_do() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let mut seen = 0;
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for call in text.split("wrong_state(").skip(1) {
            let argument = call.trim_start().trim_start_matches("format!(").trim_start();
            // Only literals are checked; constants are checked at their definition.
            let Some(literal) = argument.strip_prefix('"').and_then(|rest| rest.split('"').next()) else {
                continue;
            };
            let Some((what, rest)) = literal.split_once(": ") else { panic!("{file:?}: {literal}") };
            assert!(what.starts_with("cannot ") && rest.contains("; "), "{file:?}: {literal}");
            seen += 1;
        }
    }
    assert!(seen >= 40, "{seen}");
}
