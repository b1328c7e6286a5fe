//! The programs in the documentation are the examples that CMake compiles and runs.

use std::fs;
use std::path::Path;

#[test]
fn the_programs_that_are_shown_are_the_compiled_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (page, program) in [
        ("README.md", "capture.cpp"),
        ("docs/integrating.md", "plan.cpp"),
        ("docs/integrating.md", "ring.cpp"),
    ] {
        let page = fs::read_to_string(root.join(page)).unwrap();
        let example = fs::read_to_string(root.join("examples/cpp").join(program)).unwrap();
        let mut shown = page.split("```cpp\n").skip(1).filter_map(|rest| rest.split("```").next());
        assert!(shown.any(|shown| shown == example), "{program}");
    }
}

/// What `docs/xllm.md` says to paste is what `tests/engine/xllm_shape_test.cpp` compiles and runs.
#[test]
fn the_code_for_xllm_is_the_compiled_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/xllm.md")).unwrap();
    let shown: Vec<&str> =
        page.split("```cpp\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
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

/// The output that the README shows is the one that the example's test compares.
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
