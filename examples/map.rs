//! Page maps of recorded captures, without a GPU: a web page, JSON data and a table for each.
//!
//! `cargo run --release --example map -- FOLDER [TRACE...]` writes `TRACE.html`, `TRACE.json` and
//! `TRACE.txt` into the folder, for the named traces of `tests/data`, or all. Events are recorded
//! for the capture of the peak shape.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs};

use vmmgraph::driver::HostDriver;
use vmmgraph::{Device, ElasticOptions, HostOptions, Options, RegionOptions, SharedVmmAllocator, Stream};
use vmmgraph_testkit::{MIB, Trace, capture_with};

const STREAM: Stream = Stream::LEGACY;

/// Trace, whether retained blocks are marked as kept, and title.
const TRACES: [(&str, bool, &str); 5] = [
    ("capture-trace-65", false, "Qwen3-8B, 12 layers: 51 decode batches, 14 prefills"),
    ("capture-trace-65-retained", false, "Qwen3-8B, no warm-up, one output kept by each graph"),
    ("capture-trace-llama-70b-tp8", false, "Llama-70B, one of 8 ranks"),
    ("capture-trace-qwen3-0.6b", false, "Qwen3-0.6B, 28 layers"),
    ("capture-trace-vision", false, "Vision encoder, 256 to 16384 patches"),
];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("usage: map FOLDER [TRACE...]")?);
    let wanted: Vec<String> = arguments.collect();
    fs::create_dir_all(&folder)?;
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    for (name, kept, title) in TRACES {
        if !wanted.is_empty() && !wanted.iter().any(|one| one == name) {
            continue;
        }
        let trace = Trace::load(&data, name)?;
        let host = HostOptions { memory_bytes: 4096 * MIB, ..HostOptions::default() };
        let device = Device::with_driver(Arc::new(HostDriver::new(0, host)?));
        // Memory of an engine besides its graphs, so the map shows a whole device.
        let weights = device.region("weights", RegionOptions::default())?;
        weights.allocate(640 * MIB, STREAM)?;
        let options = ElasticOptions { name: "kv", ..ElasticOptions::default() };
        let cache = device.elastic_buffer(1024 * MIB, &options)?;
        cache.commit(0..384 * MIB)?;
        let arena = SharedVmmAllocator::new(&device, &Options::default())?;
        let largest = trace.shapes.iter().map(|shape| shape.peak_live_bytes()).max();
        let mut captured = Vec::new();
        for shape in &trace.shapes {
            arena.trace_events(Some(shape.peak_live_bytes()) == largest);
            let one = capture_with(&arena, shape, STREAM, kept)?;
            one.space.set_label(&shape.label())?;
            captured.push(one);
        }
        let mut map = arena.map();
        map.title = title.to_owned();
        for (ending, text) in [("html", map.to_html()), ("json", map.to_json()), ("txt", map.report())] {
            fs::write(folder.join(format!("{name}.{ending}")), text)?;
        }
        println!("{}", map.report());
    }
    Ok(())
}
