//! The README's program is the example that CMake compiles and runs.

use std::fs;
use std::path::Path;

#[test]
fn the_program_in_the_readme_is_the_compiled_example() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let readme = fs::read_to_string(root.join("README.md")).unwrap();
    let example = fs::read_to_string(root.join("examples/cpp/capture.cpp")).unwrap();
    let shown = readme.split("```cpp\n").nth(1).and_then(|rest| rest.split("```").next());
    assert_eq!(shown, Some(example.as_str()));
}
