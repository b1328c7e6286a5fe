//! Generates and compiles the C++ half of the bridge.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src");
    let files = ["blocks", "device", "eager", "executables", "region"].map(|file| format!("src/{file}.rs"));
    cxx_build::bridges(files).std("c++17").compile("vmmgraph-bridge");
}
