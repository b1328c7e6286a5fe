//! Error sentences: *cannot do something: reason; remedy*.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, ends: &[&str], into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, ends, into);
        } else if path.extension().is_some_and(|end| ends.iter().any(|one| end == *one)) {
            into.push(path);
        }
    }
}

/// The string literals of a C++ call's arguments, joined by VALUE. Empty without a literal.
fn literals(arguments: &str) -> String {
    let (mut depth, mut quoted, mut escaped, mut parts) = (1, false, false, Vec::new());
    for letter in arguments.chars() {
        match letter {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => {
                quoted = !quoted;
                if quoted {
                    parts.push(String::new());
                }
            }
            _ if quoted => parts.last_mut().unwrap().push(letter),
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    parts.join("VALUE")
}

#[test]
fn a_wrong_state_says_what_cannot_be_done_why_and_what_to_do() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &["rs"], &mut files);
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

#[test]
fn a_refusal_in_cpp_says_what_cannot_be_done_why_and_what_to_do() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("cpp"), &["cpp", "hpp"], &mut files);
    let (mut seen, mut wrong) = (0, Vec::new());
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for call in ["refuse(VMMGRAPH", "fail(", "fail_aloud("] {
            for arguments in text.split(call).skip(1) {
                let message = literals(arguments);
                // Messages of other functions, and torch's wording, which programs search for.
                if !message.contains(' ')
                    || message == "CUDA graphs must be captured on a non-default stream."
                {
                    continue;
                }
                seen += 1;
                let reason = message.strip_prefix("cannot ").and_then(|rest| rest.split_once(": "));
                // Reason and remedy may be an argument.
                if !reason.is_some_and(|(_, why)| why.contains("; ") || why.is_empty() || why == "%s") {
                    wrong.push(format!("{}: {message}", file.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen >= 100, "{seen}");
}
