//! Programs in the documentation equal the compiled examples.

use std::fs;
use std::path::Path;

#[path = "../../examples/rust/src/main.rs"]
#[allow(dead_code, reason = "the example's own main")]
mod decode;

/// Returns the code blocks of a page in a language.
fn blocks<'p>(page: &'p str, language: &str) -> Vec<&'p str> {
    let opening = format!("```{language}\n");
    page.split(opening.as_str()).skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

#[test]
fn the_programs_that_are_shown_are_the_compiled_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (page, language, program) in [
        ("README.md", "cpp", "cpp/capture.cpp"),
        ("docs/quickstart-cpp.md", "cpp", "cpp/shapes.cpp"),
        ("docs/quickstart-libtorch.md", "cmake", "libtorch/CMakeLists.txt"),
        ("docs/quickstart-libtorch.md", "cpp", "libtorch/quickstart.cpp"),
        ("docs/quickstart-rl.md", "python", "rl/rollout.py"),
        ("docs/quickstart-rust.md", "rust", "rust/src/main.rs"),
        ("docs/quickstart-rust.md", "toml", "rust/Cargo.toml"),
    ] {
        let page = fs::read_to_string(root.join(page)).unwrap();
        let example = fs::read_to_string(root.join("examples").join(program)).unwrap();
        assert!(blocks(&page, language).contains(&example.as_str()), "{program}");
    }
}

/// The quickstart for Rust shows the output of its program.
#[test]
fn the_rust_quickstart_shows_the_output_of_its_program() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/quickstart-rust.md");
    let page = fs::read_to_string(page).unwrap();
    assert_eq!(blocks(&page, "text"), [decode::run().unwrap()]);
}

/// The code blocks of `docs/xllm.md` equal the files of `examples/xllm`, compiled by
/// `tests/engine/xllm_shape_test.cpp`.
#[test]
fn the_code_for_xllm_is_the_compiled_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/xllm.md")).unwrap();
    let shown = blocks(&page, "cpp");
    let compiled: Vec<String> = fs::read_dir(root.join("examples/xllm"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cpp" || extension == "h"))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    assert_eq!(shown.len(), compiled.len());
    for shown in shown {
        assert!(compiled.iter().any(|compiled| compiled == shown), "no file of examples/xllm is\n{shown}");
    }
}

/// The output in the README equals the expected output of the example's test.
#[test]
fn the_output_that_the_readme_shows_is_the_one_that_is_compared() {
    let read = |file| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let (readme, examples) = (read("README.md"), read("examples/CMakeLists.txt"));
    let (_, rest) = readme.split_once("It prints `").unwrap();
    let (printed, _) = rest.split_once('`').unwrap();
    assert!(
        examples.contains(&format!("vmmgraph_example(capture cpp/capture.cpp \"^{printed}.$\")")),
        "{printed}"
    );
}
