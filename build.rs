//! Generates and compiles the C++ half of `src/bridge`, for the libtorch component only.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "bridge")]
    {
        println!("cargo::rerun-if-changed=src/bridge");
        let files = ["blocks", "device", "eager", "executables", "region"]
            .map(|file| format!("src/bridge/{file}.rs"));
        cxx_build::bridges(files).std("c++17").compile("vmmgraph-bridge");
    }
}
