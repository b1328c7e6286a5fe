//! Sets the vendor's soname.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libamdhip64.so.7");
    println!("cargo::rerun-if-changed=build.rs");
}
