//! `conformance --driver NAME`: tests a device against VmmGraph's requirements. Prints a table;
//! exits with 1 if a case failed.

use std::io::Write;
use std::process::ExitCode;

use vmmgraph::driver::platform::{PLATFORMS, Platform};
use vmmgraph::driver::{DeviceOptions, Handles, SharedDriver};
use vmmgraph_conformance::captures::Captures;
use vmmgraph_conformance::{CASES, Outcome, Plug, Report, Subject};

const USAGE: &str = "\
usage: conformance --driver NAME [--device N] [--json FILE]
       conformance --list

Runs every case on device N (0 if it is not said) of a platform, and prints what became of each. The device should be idle: its memory
is used up for a moment. --json writes the same table to a file, to be sent and compared; --list says what each case is about.

0: no case failed; 1: one did, or the device cannot be opened; 2: not understood.";

struct Wanted {
    driver: String,
    device: i32,
    json: Option<String>,
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let mut wanted = Wanted { driver: String::new(), device: 0, json: None };
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_default();
        let understood = match argument.as_str() {
            "--driver" => {
                wanted.driver = value();
                !wanted.driver.is_empty()
            }
            "--device" => value().parse().map(|device| wanted.device = device).is_ok(),
            "--json" => {
                wanted.json = Some(value()).filter(|file| !file.is_empty());
                wanted.json.is_some()
            }
            "--list" => return list(),
            "--help" => return say(USAGE, ExitCode::SUCCESS),
            _ => false,
        };
        if !understood {
            eprintln!("conformance: {argument} is not understood\n\n{USAGE}");
            return ExitCode::from(2);
        }
    }
    let Some(platform) = PLATFORMS.iter().find(|platform| platform.name == wanted.driver) else {
        let names: Vec<&str> = PLATFORMS.iter().map(|platform| platform.name).collect();
        eprintln!("conformance: --driver is one of {}\n\n{USAGE}", names.join(", "));
        return ExitCode::from(2);
    };
    match test(platform, &wanted) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("conformance: {error}");
            ExitCode::FAILURE
        }
    }
}

fn say(text: &str, code: ExitCode) -> ExitCode {
    let _ = writeln!(std::io::stdout(), "{text}");
    code
}

fn list() -> ExitCode {
    let lines: Vec<String> =
        CASES.iter().map(|case| format!("{:24} {}", case.name, case.relies_on)).collect();
    say(&lines.join("\n"), ExitCode::SUCCESS)
}

fn test(platform: &Platform, wanted: &Wanted) -> Result<ExitCode, String> {
    // Without the self-test of `Device::open`, which is one of the cases.
    let open = |ordinal| {
        // With exportable pages, if supported.
        let shared = DeviceOptions { sharing: Handles::Fd, ..DeviceOptions::default() };
        (platform.open)(ordinal, shared).or_else(|_| (platform.open)(ordinal, DeviceOptions::default()))
    };
    let count = (platform.count)().map_err(|error| error.to_string())?;
    let driver: SharedDriver = open(wanted.device).map_err(|error| error.to_string())?;
    let other = (0..count).find(|ordinal| *ordinal != wanted.device).and_then(|ordinal| open(ordinal).ok());
    let captures = Captures::of(platform.name);
    let plug = captures.as_ref().map(|captures| captures as &dyn Plug);
    let subject = Subject { driver, other, plug };
    let mut report = Report::new(&subject);
    // Line by line, so the last name is a hanging case.
    say(&report.head(), ExitCode::SUCCESS);
    for case in CASES {
        let mut out = std::io::stdout();
        let _ = write!(out, "{:24} ", case.name).and_then(|()| out.flush());
        let row = case.run(&subject);
        say(&row.line(), ExitCode::SUCCESS);
        report.rows.push(row);
    }
    say(&format!("\n{}", report.sum()), ExitCode::SUCCESS);
    if let Some(file) = &wanted.json {
        std::fs::write(file, format!("{:#}\n", report.json())).map_err(|error| format!("{file}: {error}"))?;
    }
    Ok(if report.count(Outcome::Failed) == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
