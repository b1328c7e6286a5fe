//! `make elastic`, or `cargo run --release -p vmmgraph-elastic-sim -- [options] [FILE...]`: runs
//! the generated traffic, or files of public traces.
//!
//! `--seconds N` of each (180), `--seed N` (1), `--speed X` (time scale for files), `--budget GIB`
//! (12), `--by-plane` (2 MiB pages, separate addresses per plane), `--only NAME`, `--no-audit`,
//! `--json FILE`, `--svg FILE`, `--table FILE`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use vmmgraph::KvLayout;
use vmmgraph_elastic_sim::model::GIB;
use vmmgraph_elastic_sim::readers::read;
use vmmgraph_elastic_sim::report::{picture, table};
use vmmgraph_elastic_sim::run::{Kind, Setup};
use vmmgraph_elastic_sim::traffic::{GENERATORS, Request};

struct Asked {
    setup: Setup,
    seconds: f64,
    seed: u64,
    speed: f64,
    only: Option<String>,
    json: Option<PathBuf>,
    svg: Option<PathBuf>,
    table: Option<PathBuf>,
    files: Vec<PathBuf>,
}

fn asked() -> Result<Asked, String> {
    let mut asked = Asked {
        setup: Setup::default(),
        seconds: 180.0,
        seed: 1,
        speed: 1.0,
        only: None,
        json: None,
        svg: None,
        table: None,
        files: Vec::new(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if !word.starts_with("--") {
            asked.files.push(word.into());
            continue;
        }
        match word.as_str() {
            "--by-plane" => {
                asked.setup.layout = KvLayout::ByPlane;
                continue;
            }
            "--no-audit" => {
                asked.setup.audit = false;
                continue;
            }
            _ => {}
        }
        let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
        let number = || {
            value
                .parse::<f64>()
                .ok()
                .filter(|number| *number > 0.0)
                .ok_or_else(|| format!("{word}: {value} is no number above 0"))
        };
        match word.as_str() {
            "--seconds" => asked.seconds = number()?,
            "--seed" => asked.seed = number()? as u64,
            "--speed" => asked.speed = number()?,
            "--budget" => asked.setup.budget = (number()? * GIB as f64) as u64,
            "--only" => asked.only = Some(value),
            "--json" => asked.json = Some(value.into()),
            "--svg" => asked.svg = Some(value.into()),
            "--table" => asked.table = Some(value.into()),
            _ => return Err(format!("unknown option {word}")),
        }
    }
    Ok(asked)
}

/// Returns the first seconds of a file at a given speed, with prompts cut to the maximum length;
/// and the number of cut prompts.
fn traffic(asked: &Asked, file: &Path) -> Result<(Vec<Request>, usize), String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut requests = read(&text).map_err(|error| format!("{}: {error}", file.display()))?;
    let longest = asked.setup.model.longest_prompt;
    for request in &mut requests {
        request.arrival = (request.arrival as f64 / asked.speed) as u64;
    }
    requests.retain(|request| (request.arrival as f64) < asked.seconds * 1e9);
    let cut = requests.iter().filter(|request| request.prompt > longest).count();
    requests.iter_mut().for_each(|request| request.prompt = request.prompt.min(longest));
    Ok((requests, cut))
}

fn all() -> Result<(), String> {
    let asked = asked()?;
    let mut traffics = Vec::new();
    for file in &asked.files {
        let (requests, cut) = traffic(&asked, file)?;
        let name = file.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        eprintln!("{name}: {} requests, {cut} prompts cut", requests.len());
        traffics.push((name, requests));
    }
    if asked.files.is_empty() {
        for generator in GENERATORS {
            traffics.push((generator.name.to_owned(), generator.requests(asked.seconds, asked.seed)));
        }
    }
    traffics.retain(|(name, _)| asked.only.as_ref().is_none_or(|only| name.contains(only.as_str())));
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{msg:44} {wide_bar} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    let began = Instant::now();
    let mut rows = Vec::new();
    for (name, requests) in &traffics {
        bar.set_length(requests.len() as u64);
        for kind in Kind::ALL {
            bar.set_message(format!("{name}: {}", kind.name()));
            bar.set_position(0);
            let outcome = asked.setup.run(kind, requests, &mut |done| bar.set_position(done as u64));
            let outcome = outcome.map_err(|error| format!("{name}, {}: {error}", kind.name()))?;
            rows.push(outcome.row(name, kind.name()));
        }
    }
    bar.finish_and_clear();
    let text = table(&rows);
    println!("{text}");
    let checks: u64 = rows.iter().map(|row| row.checks).sum();
    println!("{:.0} s; all that must hold was looked at {checks} times", began.elapsed().as_secs_f64());
    let write = |path: &Option<PathBuf>, text: String| match path {
        Some(path) => std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display())),
        None => Ok(()),
    };
    write(&asked.table, text)?;
    write(&asked.svg, picture(&rows))?;
    let json = serde_json::to_string_pretty(&rows).map_err(|error| error.to_string())?;
    write(&asked.json, json)
}

fn main() -> ExitCode {
    match all() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
