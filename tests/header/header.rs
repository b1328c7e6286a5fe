//! Checks that `include/vmmgraph/vmmgraph.h` is cbindgen's output for `src/capi`, with the crate's
//! version.
//!
//! `make header` rewrites the file.

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
    // Rust's safety section lists the requirements for C arguments.
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

/// Returns the names at file scope of a C header: macros, types, functions, without C keywords.
fn named_by(header: &str) -> Vec<&str> {
    const OF_C: [&str; 12] = [
        "typedef", "struct", "enum", "extern", "const", "void", "char", "int32_t", "uint32_t", "int64_t",
        "uint64_t", "size_t",
    ];
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut names = Vec::new();
    let (mut depth, mut comment) = (0i32, false);
    for line in header.lines() {
        let (code, _) = line.split_once("//").unwrap_or((line, ""));
        comment |= code.trim_start().starts_with("/*");
        if comment {
            comment = !code.contains("*/");
            continue;
        }
        if let Some(macros) = code.strip_prefix('#') {
            names.extend(macros.strip_prefix("define ").and_then(|rest| rest.split(|c| !is_word(c)).next()));
            continue;
        }
        if code.starts_with("extern \"C\"") {
            continue;
        }
        for (at, c) in code.char_indices() {
            let begins = is_word(c) && !code[..at].ends_with(is_word);
            if begins && (depth == 0 || code[..at].ends_with("(*")) {
                names.push(code[at..].split(|c| !is_word(c)).next().unwrap_or_default());
            }
            depth = (depth + i32::from("({".contains(c)) - i32::from(")}".contains(c))).max(0);
        }
    }
    names.retain(|name| !OF_C.contains(name));
    names
}

#[test]
fn headers_take_no_name_that_a_program_may_have() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../include/vmmgraph"));
    for (header, least) in [("vmmgraph.h", 500), ("torch_c.h", 40)] {
        let text = fs::read_to_string(folder.join(header)).unwrap();
        let names = named_by(&text);
        assert!(names.len() > least, "{header}: {} names were found", names.len());
        let ours = |name: &&str| name.starts_with("vmmgraph_") || name.starts_with("VMMGRAPH_");
        let others: Vec<_> = names.into_iter().filter(|name| !ours(name)).collect();
        assert!(others.is_empty(), "{header}: {others:?}");
    }
    assert_eq!(
        named_by(
            "#define POISON 1\n/* no */\ntypedef struct Stream {\n  int32_t x;\n} Stream_t;\ntypedef void (*Call)(int32_t y);\nint32_t run(\n  int32_t z);"
        ),
        ["POISON", "Stream", "Stream_t", "Call", "run"]
    );
}
