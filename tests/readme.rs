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
