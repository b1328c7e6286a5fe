//! The name that a loaded library is found by.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcndrv.so");
    println!("cargo::rerun-if-changed=build.rs");
}
