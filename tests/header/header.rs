//! `include/vmmgraph/vmmgraph.h` is what cbindgen makes of `src/capi`, with the crate's version in it.
//!
//! `make header` rewrites the file; without it a difference fails.

use std::fs;
use std::path::Path;

#[test]
fn the_checked_in_header_is_current() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let version = |name: &str, value: &str| format!("#define VMMGRAPH_VERSION_{name} {value}\n");
    let mut macros = config.after_includes.take().unwrap_or_default();
    macros.push('\n');
    macros += &version("MAJOR", env!("CARGO_PKG_VERSION_MAJOR"));
    macros += &version("MINOR", env!("CARGO_PKG_VERSION_MINOR"));
    macros += &version("PATCH", env!("CARGO_PKG_VERSION_PATCH"));
    config.after_includes = Some(macros);

    let bindings = cbindgen::Builder::new().with_crate(root).with_config(config).generate().unwrap();
    let mut text = Vec::new();
    bindings.write(&mut text);
    // What Rust readers know as the safety section is, to a C reader, what the arguments must be.
    let generated = String::from_utf8(text).unwrap().replace("// # Safety\n", "// Arguments:\n");

    let path = root.join("include/vmmgraph/vmmgraph.h");
    let current = fs::read_to_string(&path).unwrap_or_default();
    if current != generated {
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::write(&path, &generated).unwrap();
        } else {
            panic!("{} is stale: run make header", path.display());
        }
    }
}
