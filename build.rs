//! Generates and compiles the C++ half of `src/bridge.rs`, for the libtorch component only.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "bridge")]
    {
        println!("cargo::rerun-if-changed=src/bridge.rs");
        cxx_build::bridge("src/bridge.rs").std("c++17").compile("vmmgraph-bridge");
    }
}
