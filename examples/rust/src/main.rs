//! Captures three decode shapes over one set of pages, replays one, and pauses the arena.

use std::time::Duration;

use vmmgraph::pages::Fence;
use vmmgraph::{Device, DriverChoice, HostOptions, Options, Result, SharedVmmAllocator, Stream};

fn main() -> Result<()> {
    print!("{}", run()?);
    Ok(())
}

/// Captures, replays and pauses; returns the report to print.
pub(crate) fn run() -> Result<String> {
    // On a GPU: DriverChoice::CUDA.
    let device = Device::open(DriverChoice::HOST, 0, HostOptions::default())?;
    let arena = SharedVmmAllocator::new(&device, &Options::default())?;
    let stream = Stream::LEGACY;

    let mut shapes = Vec::new();
    let mut sum = 0;
    for batch in [8, 16, 32] {
        let space = arena.open_space()?;
        space.set_label(&format!("decode {batch}"))?;
        // On a GPU: the capture begins, and its kernels use these blocks.
        let hidden = space.allocate(batch << 20, stream)?;
        let _output = space.allocate_kept(batch << 10, stream)?;
        space.free(hidden)?;
        // On a GPU: the capture ends.
        sum += space.seal()?.peak_live_bytes;
        shapes.push((batch, space));
    }

    let sequences = 13;
    let (batch, space) = shapes.iter().find(|(batch, _)| *batch >= sequences).unwrap();
    // On a GPU: the closure launches the graph on the stream.
    let launched = space.replay(stream, || format!("{sequences} sequences run in the graph of {batch}\n"))?;
    let physical = arena.mapped_size();

    let paused = arena.pause(Fence::default())?;
    let refused = space.replay(stream, || ()).unwrap_err();
    arena.resume(Duration::from_secs(1))?;
    space.replay(stream, || ())?;

    Ok(format!(
        "{launched}physical {} MiB, sum of the peaks {} MiB\npaused: {} MiB freed; {refused}\n",
        physical >> 20,
        sum >> 20,
        paused.bytes >> 20,
    ))
}
