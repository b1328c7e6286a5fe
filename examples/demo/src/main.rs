//! Main demonstration on the available driver: replays captures of real models with contents, and
//! compares the memory with other designs.
//!
//! `make demo`, or `cargo run --release -p vmmgraph-demo -- [--json FILE] [--data FOLDER] [--only
//! PART_OF_A_TRACE]`. VMMGRAPH_DRIVER selects the driver: cuda, hip, ascend, mlu or host. Without
//! the variable and without a usable device, the demo runs on host memory and says so.

use std::io::{IsTerminal, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use vmmgraph::driver::{SharedDriver, open};
use vmmgraph::{Device, DriverChoice, Error, HostOptions, Options, SharedVmmAllocator, Stream};
use vmmgraph_testkit::{
    MIB, Order, Replayed, Stamps, Trace, capture_with, private_pools_bytes, published_design, replay, shuffle,
};

const STREAM: Stream = Stream::LEGACY;
const ROUNDS: u32 = 2;

/// Trace, description, and whether its outputs are marked as kept.
const MODELS: [(&str, &str, bool); 7] = [
    ("capture-trace-65", "Qwen3-8B, 12 layers, 51 decode batches and 14 prefills", false),
    ("capture-trace-65 decode", "the same, 51 decode batches alone", false),
    ("capture-trace-65-retained", "the same 65 without a warm-up, one output kept each", false),
    ("capture-trace-65-retained", "the same, with the outputs marked as kept", true),
    ("capture-trace-llama-70b-tp8", "Llama-70B, 16 layers, one of 8 ranks, up to 16384 tokens", false),
    ("capture-trace-qwen3-0.6b", "Qwen3-0.6B, 28 layers", false),
    ("capture-trace-vision", "vision encoder, 24 layers of 1280, 256 to 16384 patches", false),
];

/// Costs of one design. `None`: computed, not run.
#[derive(Clone)]
struct Row {
    trace: String,
    order: Order,
    way: &'static str,
    physical: u64,
    peak: u64,
    floor: u64,
    maps: Option<u64>,
    calls: Option<u64>,
    capture: Option<Duration>,
    found: Option<(Replayed, u64)>,
}

impl Row {
    fn json(&self) -> Value {
        json!({
            "trace": self.trace,
            "order": self.order.to_string(),
            "way": self.way,
            "physical_bytes": self.physical,
            "peak_physical_bytes": self.peak,
            "floor_bytes": self.floor,
            "map_calls": self.maps,
            "wrong_blocks": self.found.map(|(replayed, _)| replayed.wrong),
            "lost_retained_blocks": self.found.map(|(_, lost)| lost),
            "checked_blocks": self.found.map(|(replayed, _)| replayed.blocks),
            "driver_calls": self.calls,
            "capture_ms": self.capture.map(|time| time.as_secs_f64() * 1e3),
        })
    }
}

/// Computes the same captures without this library, by torch's rules for sizes, segments and reuse.
fn computed(trace: &Trace, order: Order, floor: u64) -> [Row; 2] {
    let private = private_pools_bytes(trace);
    let (published, maps) = published_design(trace);
    [("private pools", private, None), ("published design", published, Some(maps))].map(
        |(way, physical, maps)| Row {
            trace: trace.name.clone(),
            order,
            way,
            physical,
            peak: physical,
            floor,
            maps,
            calls: None,
            capture: None,
            found: None,
        },
    )
}

fn run(
    driver: DriverChoice,
    trace: &Trace,
    order: Order,
    mark: bool,
    floor: u64,
    bar: &ProgressBar,
) -> vmmgraph::Result<Row> {
    let device = Device::with_driver(open(driver, 0, HostOptions::default())?);
    let arena = SharedVmmAllocator::new(&device, &Options::default())?;
    let start = Instant::now();
    let mut captured = Vec::new();
    for shape in &trace.shapes {
        captured.push(capture_with(&arena, shape, STREAM, mark)?);
        bar.inc(1);
    }
    let time = start.elapsed();
    let stats = device.stats();

    let stamps = Stamps::new(device.driver(), STREAM);
    let (mut found, mut lost) = (Replayed::default(), 0);
    for round in 0..ROUNDS {
        let mut shuffled: Vec<usize> = (0..trace.shapes.len()).collect();
        shuffle(&mut shuffled, u64::from(round) + 1);
        for index in shuffled {
            let one = replay(&captured[index], &trace.shapes[index], &stamps, round)?;
            found.blocks += one.blocks;
            found.wrong += one.wrong;
            bar.inc(1);
        }
        for captured in &captured {
            lost += captured.lost_retained(&stamps, round)?;
        }
    }
    let replayed = device.stats();
    assert_eq!((replayed.maps, replayed.unmaps), (stats.maps, stats.unmaps), "a replay made driver calls");
    Ok(Row {
        trace: trace.name.clone(),
        order,
        way: "VmmGraph",
        physical: stats.physical_bytes,
        peak: stats.peak_physical_bytes,
        floor,
        maps: Some(stats.maps),
        calls: Some(2 * stats.maps + stats.unmaps + stats.pages_created + stats.reservations),
        capture: Some(time),
        found: Some((found, lost)),
    })
}

fn print(rows: &[Row]) {
    let or = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    for row in rows {
        let order = row.order.to_string();
        let cells = [
            (row.physical / MIB).to_string(),
            format!("{:.3}", row.physical as f64 / row.floor as f64),
            or(row.maps.map(|n| n.to_string())),
            or(row.calls.map(|n| n.to_string())),
            or(row.capture.map(|time| format!("{:.1}", time.as_secs_f64() * 1e3))),
            or(row.found.map(|(replayed, lost)| format!("{}/{lost}", replayed.wrong))),
        ];
        let cells = cells.map(|cell| format!("{cell:>10}")).join(" ");
        println!("  {order:<10} {:<17} {cells}", row.way);
    }
}

/// Opens the driver at hand: a device, or else host memory.
fn choose() -> vmmgraph::Result<(DriverChoice<'static>, SharedDriver)> {
    let choice = match open(DriverChoice::Auto, 0, HostOptions::default()) {
        Ok(driver) => return Ok((DriverChoice::Auto, driver)),
        Err(Error::NoUsableDevice { reasons, .. }) => {
            println!("no platform has a usable device ({reasons}): the demo runs on host memory");
            DriverChoice::HOST
        }
        Err(error) => return Err(error),
    };
    Ok((choice, open(choice, 0, HostOptions::default())?))
}

fn demo(json: Option<PathBuf>, data: PathBuf, only: Option<String>) -> Result<bool, String> {
    let (choice, driver) = choose().map_err(|e| e.to_string())?;
    let info = driver.info();
    println!(
        "{} driver: {}, {} GiB, granularity {} MiB",
        info.platform,
        info.name,
        info.total_bytes >> 30,
        driver.capabilities().granularity / MIB
    );
    let load = |(name, model, mark): (&str, &'static str, bool)| {
        let trace = match name.strip_suffix(" decode") {
            Some(all) => Trace::load(&data, all)?.decode_only(),
            None => Trace::load(&data, name)?,
        };
        let kept = name.ends_with("retained");
        let floor = if kept { trace.floor_with_kept_bytes() } else { trace.floor_bytes() };
        Ok::<_, String>((trace, model, mark, floor))
    };
    let wanted =
        |(name, ..): &(&str, &str, bool)| only.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let traces = MODELS.into_iter().filter(wanted).map(load).collect::<Result<Vec<_>, _>>()?;
    if traces.is_empty() {
        return Err("there is no such trace".to_owned());
    }
    let orders = [Order::Ascending, Order::Descending, Order::Random(1)];
    let steps: usize =
        traces.iter().map(|(trace, ..)| trace.shapes.len() * (1 + ROUNDS as usize) * orders.len()).sum();
    let bar =
        if std::io::stderr().is_terminal() { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} captures and replays, {elapsed}") {
        bar.set_style(style);
    }
    let head = ["MiB", "x floor", "maps", "calls", "ms", "wrong/lost"].map(|cell| format!("{cell:>10}"));
    println!("  {:<10} {:<17} {}", "order", "way", head.join(" "));
    let (mut rows, mut left_out) = (Vec::new(), 0);
    for (trace, model, mark, floor) in &traces {
        let mut of_model = computed(trace, Order::Ascending, *floor).to_vec();
        let mut not_offered = None;
        for order in orders {
            match run(choice, &trace.ordered(order), order, *mark, *floor, &bar) {
                Ok(row) => of_model.push(row),
                // A platform that cannot replace pages under a graph needs marked outputs.
                Err(error @ Error::NotOffered { .. }) => not_offered = Some(error),
                Err(error) => return Err(error.to_string()),
            }
        }
        bar.suspend(|| {
            println!("{model}: floor {:.0} MiB ({})", *floor as f64 / MIB as f64, trace.name);
            print(&of_model);
            if let Some(error) = &not_offered {
                println!("  not run: {error}");
            }
        });
        left_out += usize::from(not_offered.is_some());
        rows.extend(of_model);
    }
    bar.finish_and_clear();
    println!("floor: the peak live bytes of the largest shape, and what is kept of all shapes");
    let checked: u64 = rows.iter().filter_map(|row| row.found).map(|(replayed, _)| replayed.blocks).sum();
    let bad: u64 =
        rows.iter().filter_map(|row| row.found).map(|(replayed, lost)| replayed.wrong + lost).sum();
    let ratios =
        rows.iter().filter(|row| row.found.is_some()).map(|row| row.physical as f64 / row.floor as f64);
    let (least, most) =
        ratios.fold((f64::MAX, 0f64), |(least, most), ratio| (least.min(ratio), most.max(ratio)));
    println!(
        "{checked} blocks stamped and checked over {ROUNDS} replays of every shape in random order: {bad} wrong or lost"
    );
    println!("private pools and published design are computed by torch's rules; VmmGraph is run");
    println!(
        "in sum: {} sets of captures in {} orders, {least:.3} to {most:.3} x floor, {bad} wrong or lost",
        traces.len() - left_out,
        orders.len()
    );
    if let Some(path) = json {
        let rows: Vec<Value> = rows.iter().map(Row::json).collect();
        let text = serde_json::to_string_pretty(&rows).map_err(|e| e.to_string())?;
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(|e| e.to_string())?;
        }
        std::fs::write(&path, text + "\n").map_err(|e| format!("{}: {e}", path.display()))?;
        println!("written: {}", path.display());
    }
    Ok(bad == 0)
}

fn main() -> ExitCode {
    let (mut json, mut data, mut only) = (None, PathBuf::from("tests/data"), None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match (word.as_str(), words.next()) {
            ("--json", Some(path)) => json = Some(PathBuf::from(path)),
            ("--data", Some(path)) => data = PathBuf::from(path),
            ("--only", Some(part)) => only = Some(part),
            _ => {
                let _ = writeln!(
                    std::io::stderr(),
                    "usage: demo [--json FILE] [--data FOLDER] [--only PART_OF_A_TRACE]"
                );
                return ExitCode::from(2);
            }
        }
    }
    match demo(json, data, only) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "demo: {error}");
            ExitCode::FAILURE
        }
    }
}
