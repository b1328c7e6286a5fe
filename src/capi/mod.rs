//! C ABI: cbindgen generates `include/vmmgraph/vmmgraph.h` from this folder (`make header`).
//!
//! Every C function runs its body in a `guard`: handles are looked up and never dereferenced, a
//! panic becomes a status, and the thread keeps the details of its last failure.
//!
//! The conventions of the header, in `cbindgen.toml`, are the contract of all pointers here, also
//! of the unsafe helpers; a `# Safety` section adds to them.

#![allow(non_camel_case_types, reason = "the names are C's")]

// Modules in the order of the header.
#[rustfmt::skip]
mod status;
mod account;
mod ahead;
mod arena;
mod arena_pause;
mod blocks;
mod device;
mod dispatch;
mod elastic;
mod exclusive;
mod grants;
mod host;
mod host_buffer;
mod host_kv;
mod inputs;
mod inspect;
mod kv;
mod lease;
mod log;
mod map;
mod order;
mod pace;
mod pause;
mod pause_hooks;
mod peer;
mod plan;
mod ready;
mod reclaimer;
mod region;
mod ring;
mod ring_graph;
mod ring_plan;
mod share;
mod space;
mod torch;

mod fork;
mod guard;
mod handle;
mod locked;
mod memory;
mod sized;
mod text;

pub use account::*;
pub use ahead::*;
pub use arena::*;
pub use arena_pause::*;
pub use blocks::*;
pub use device::*;
pub use dispatch::*;
pub use elastic::*;
pub use exclusive::*;
pub use grants::*;
pub use host::*;
pub use host_buffer::*;
pub use host_kv::*;
pub use inputs::*;
pub use inspect::*;
pub use kv::*;
pub use lease::*;
pub use log::*;
pub use map::*;
pub use order::*;
pub use pace::*;
pub use pause::*;
pub use pause_hooks::*;
pub use peer::*;
pub use plan::*;
pub use ready::*;
pub use reclaimer::*;
pub use region::*;
pub use ring::*;
pub use ring_graph::*;
pub use ring_plan::*;
pub use share::*;
pub use space::*;
pub use status::*;
pub use torch::*;

use std::ffi::c_char;

// For the bridge.
pub use arena::{retain_of, stream_of};
pub use guard::{GuardedDrop, guarded};
pub use handle::{arena_of, region_of, space_of};
pub use region::policy_of;

/// Version of the C ABI. Calls, structs and numbers of equal versions are compatible.
pub const VMMGRAPH_ABI_VERSION: u32 = 1;

/// Returns the ABI version of the loaded library.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_abi_version() -> u32 {
    VMMGRAPH_ABI_VERSION
}

/// Returns the library's version as "major.minor.patch".
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[cfg(test)]
mod tests;
