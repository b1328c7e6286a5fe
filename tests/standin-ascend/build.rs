//! Sets the vendor's soname.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libascendcl.so");
    println!("cargo::rerun-if-changed=build.rs");
}
