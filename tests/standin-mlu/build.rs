//! Sets the vendor's soname.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcndrv.so");
    println!("cargo::rerun-if-changed=build.rs");
}
