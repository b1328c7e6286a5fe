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
