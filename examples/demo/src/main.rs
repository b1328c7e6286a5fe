//! The main job on the driver at hand: a real model's 65 captures, replayed with contents, against what they would cost otherwise.
//!
//! `make demo`, or `cargo run --release -p vmmgraph-demo -- [--json FILE] [--data FOLDER]`. VMMGRAPH_DRIVER=cuda|host chooses the driver.

use std::io::{IsTerminal, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use vmmgraph::driver::open;
use vmmgraph::{Device, DriverChoice, HostOptions, Options, SharedVmmAllocator, Stream};
use vmmgraph_testkit::{
    MIB, Order, Replayed, Stamps, Trace, capture, private_pools_bytes, published_design, replay, shuffle,
};

const STREAM: Stream = Stream(0);
const ROUNDS: u32 = 2;

/// What one way of holding the captures cost. `None`: computed, not run.
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

/// What the same captures cost without this library: computed by torch's rules for sizes, segments and reuse.
fn computed(trace: &Trace, order: Order) -> [Row; 2] {
    let private = private_pools_bytes(trace);
    let (published, maps) = published_design(trace);
    [("private pools", private, None), ("published design", published, Some(maps))].map(
        |(way, physical, maps)| Row {
            trace: trace.name.clone(),
            order,
            way,
            physical,
            peak: physical,
            floor: trace.floor_bytes(),
            maps,
            calls: None,
            capture: None,
            found: None,
        },
    )
}

fn run(trace: &Trace, order: Order, bar: &ProgressBar) -> vmmgraph::Result<Row> {
    // A device of its own, so that the counts are this run's alone.
    let device = Device::with_driver(open(DriverChoice::Auto, 0, HostOptions::default())?);
    let arena = SharedVmmAllocator::new(&device, &Options::default())?;
    let start = Instant::now();
    let mut captured = Vec::new();
    for shape in &trace.shapes {
        captured.push(capture(&arena, shape, STREAM)?);
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
        floor: trace.floor_bytes(),
        maps: Some(stats.maps),
        // Each mapping is a map and a set-access call.
        calls: Some(2 * stats.maps + stats.unmaps + stats.pages_created + stats.reservations),
        capture: Some(time),
        found: Some((found, lost)),
    })
}

fn print(rows: &[Row]) {
    let or = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let line = |cells: [String; 9]| {
        let [trace, order, way, rest @ ..] = cells;
        println!("{trace:<25} {order:<10} {way:<17} {}", rest.map(|cell| format!("{cell:>10}")).join(" "));
    };
    let head = ["trace", "order", "way", "MiB", "x floor", "maps", "calls", "ms", "wrong/lost"];
    line(head.map(str::to_owned));
    for row in rows {
        line([
            row.trace.clone(),
            row.order.to_string(),
            row.way.to_owned(),
            (row.physical / MIB).to_string(),
            format!("{:.3}", row.physical as f64 / row.floor as f64),
            or(row.maps.map(|n| n.to_string())),
            or(row.calls.map(|n| n.to_string())),
            or(row.capture.map(|time| format!("{:.1}", time.as_secs_f64() * 1e3))),
            or(row.found.map(|(replayed, lost)| format!("{}/{lost}", replayed.wrong))),
        ]);
    }
}

fn demo(json: Option<PathBuf>, data: PathBuf) -> Result<bool, String> {
    let info = open(DriverChoice::Auto, 0, HostOptions::default()).map_err(|e| e.to_string())?;
    let info = info.info();
    println!(
        "{} driver: {}, {} GiB, granularity {} MiB",
        info.kind,
        info.name,
        info.total_bytes >> 30,
        info.granularity / MIB
    );
    let all = Trace::load(&data, "capture-trace-65")?;
    let retained = Trace::load(&data, "capture-trace-65-retained")?;
    let traces = [all.decode_only(), all, retained];
    let orders = [Order::Ascending, Order::Descending, Order::Random(1)];
    let steps: usize =
        traces.iter().map(|trace| trace.shapes.len() * (1 + ROUNDS as usize) * orders.len()).sum();
    let bar =
        if std::io::stderr().is_terminal() { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} captures and replays, {elapsed}") {
        bar.set_style(style);
    }
    let mut rows = Vec::new();
    for trace in &traces {
        rows.extend(computed(trace, Order::Ascending));
        for order in orders {
            rows.push(run(&trace.ordered(order), order, &bar).map_err(|e| e.to_string())?);
        }
    }
    bar.finish_and_clear();
    print(&rows);
    for trace in &traces {
        println!(
            "floor of {}: {:.1} MiB, the peak live bytes of its hungriest shape",
            trace.name,
            trace.floor_bytes() as f64 / MIB as f64
        );
    }
    let checked: u64 = rows.iter().filter_map(|row| row.found).map(|(replayed, _)| replayed.blocks).sum();
    let bad: u64 =
        rows.iter().filter_map(|row| row.found).map(|(replayed, lost)| replayed.wrong + lost).sum();
    println!(
        "{checked} blocks stamped and checked over {ROUNDS} replays of every shape in random order: {bad} wrong or lost"
    );
    println!("private pools and published design are computed by torch's rules; VmmGraph is run");
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
    let (mut json, mut data) = (None, PathBuf::from("tests/data"));
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match (word.as_str(), words.next()) {
            ("--json", Some(path)) => json = Some(PathBuf::from(path)),
            ("--data", Some(path)) => data = PathBuf::from(path),
            _ => {
                let _ = writeln!(std::io::stderr(), "usage: demo [--json FILE] [--data FOLDER]");
                return ExitCode::from(2);
            }
        }
    }
    match demo(json, data) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "demo: {error}");
            ExitCode::FAILURE
        }
    }
}
