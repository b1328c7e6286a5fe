//! The programs in the documentation are the examples that CMake compiles and runs.

use std::fs;
use std::path::Path;

#[test]
fn the_programs_that_are_shown_are_the_compiled_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (page, program) in [("README.md", "capture.cpp"), ("docs/integrating.md", "plan.cpp")] {
        let page = fs::read_to_string(root.join(page)).unwrap();
        let example = fs::read_to_string(root.join("examples/cpp").join(program)).unwrap();
        let shown = page.split("```cpp\n").nth(1).and_then(|rest| rest.split("```").next());
        assert_eq!(shown, Some(example.as_str()), "{program}");
    }
}
