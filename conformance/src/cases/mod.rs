//! The cases, by subject. A case names no platform: differences are in the capabilities.

use crate::Case;

mod aliases;
mod captures;
mod memory;
mod sharing;
mod threads;
mod timeline;
mod transfer;

macro_rules! cases {
    ($($name:literal: $run:path, $relies_on:literal;)*) => {
        /// Every case, in execution order.
        pub const CASES: &[Case] = &[$(Case { name: $name, relies_on: $relies_on, run: $run }),*];
    };
}

cases! {
    "device": memory::device, "a device says what it is, in numbers that fit each other";
    "reserve-free": memory::reserve_free, "reservations do not meet, begin at multiples of the granularity and cost no memory";
    "reserve-beyond-memory": memory::reserve_beyond_memory, "more addresses can be reserved than there is memory";
    "addresses-exhausted": memory::addresses_exhausted, "no addresses left is an error of its own, without effect";
    "create-release": memory::create_release, "pages take memory when they are created and give it back when they are released";
    "release-while-mapped": memory::release_while_mapped, "a page released while it is mapped keeps its contents until it is unmapped, and its memory goes then";
    "map-several": memory::map_several, "several pages of different lengths are mapped one behind the other in one call";
    "map-in-any-order": memory::map_in_any_order, "pages are mapped into one reservation in any order of addresses";
    "unmap-several": memory::unmap_several, "several whole mappings go in one call, or one by one where the platform says so, or one between two others";
    "large-page": memory::large_page, "a page of many granules is mapped whole, at any granule";
    "out-of-memory": memory::out_of_memory, "no memory left is an error of its own, with its numbers and without effect";
    "descriptors": memory::descriptors, "a page takes as many file descriptors as the platform says";
    "peers": memory::peers, "pages can be mapped for, and granted to, the devices named as peers";
    "export-import": sharing::export_import, "a page that is exported and imported, as in another process, is the same memory, and takes no more of it";
    "export-outlives": sharing::export_outlives, "the memory of an exported page stays for who imported it, although it is released and unmapped here";
    "self-test": aliases::self_test, "the self-test that the first opening of a device makes";
    "alias-copies": aliases::copies, "what a copy writes through one address of a page shows at another once it is done";
    "alias-fills": aliases::fills, "what a fill writes through one address of a page shows at another once it is done";
    "alias-across-streams": aliases::across_streams, "it shows to another stream that waited for an event behind it";
    "alias-many": aliases::many, "a page is at 64 addresses of several reservations at once";
    "replace-page": aliases::replace_page, "another page may take a page's place at an address, and each keeps its contents";
    "fresh-map": aliases::fresh_map, "a page can be written and read as soon as it is mapped";
    "contents-stay": aliases::contents_stay, "a page that is mapped nowhere keeps its contents";
    "event-never-recorded": timeline::never_recorded, "an event that was never recorded has happened, and waiting for it does nothing";
    "event-query": timeline::query, "an event has happened once what came before it is done, and not earlier";
    "event-synchronize": timeline::synchronise, "waiting for an event waits for what came before it";
    "event-orders-streams": timeline::orders_streams, "a stream that waits for an event goes on behind what came before it";
    "event-recorded-again": timeline::recorded_again, "an event recorded again stands for its last record";
    "event-destroyed-early": timeline::destroyed_early, "an event may be destroyed while a stream waits for it";
    "stream-order": timeline::stream_order, "a stream does its work in the order in which it was given";
    "stream-destroyed-early": timeline::stream_destroyed_early, "what was given to a stream is done although the stream is destroyed";
    "default-stream": timeline::default_stream, "the default stream can be used and recorded as others";
    "unmap-waits": timeline::unmap_waits, "an unmap that is said to wait for the device does";
    "read-write": transfer::read_write, "any bytes of mapped memory are read and written, also across pages";
    "fill-bytes": transfer::fill_bytes, "a fill of four equal bytes reaches exactly what it was told";
    "fill-words": transfer::fill_words, "a fill repeats any 32-bit value";
    "copies": transfer::copies, "copies from and to ordinary host memory are in the stream's order";
    "copies-registered": transfer::copies_registered, "copies from and to registered host memory are in the stream's order, also of parts of it";
    "fresh-thread": threads::fresh_thread, "a thread that never touched the platform can make every call";
    "many-threads": threads::many_threads, "eight threads use the device at once, each with memory of its own";
    "two-devices": threads::two_devices, "calls of two devices on one thread do not disturb each other";
    "thread-state": threads::thread_state, "no call changes what is current on its thread, or its capture mode";
    "capture-seen": captures::seen, "a stream that is captured is told from others, without harm";
    "capture-memory": captures::memory, "addresses and pages come and go while a stream of the thread is captured";
    "capture-events": captures::events, "events and other streams go on while a stream of the thread is captured";
    "capture-copies": captures::copies, "bytes are read and written while a stream of the thread is captured";
    "replay-after-replace": captures::replay_after_replace, "a graph that does not run works on the page that is at its address when it runs";
    "graph-executables": captures::executables, "graphs are counted, instantiated, and destroyed beside one another";
    "graph-copies": captures::graph_copies, "a graph copies from the host late, as its executable was last told, or not at all";
}
