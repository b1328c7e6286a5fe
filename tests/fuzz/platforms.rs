//! The same inputs on every platform, on its stand-in.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use vmmgraph::driver::platform::{PLATFORMS, Platform};
use vmmgraph::driver::{DeviceOptions, SharedDriver};

const NAME: &str = "VMMGRAPH_FUZZ_DRIVER";

/// The platform under test: the host, unless this process was started for another one.
pub(crate) fn platform() -> &'static Platform {
    let name = std::env::var(NAME).unwrap_or_else(|_| "host".to_owned());
    PLATFORMS.iter().find(|platform| platform.name == name).unwrap_or_else(|| panic!("no platform {name}"))
}

/// Runs a test of this program again on each stand-in, whose devices have so many bytes: in a process each, since a library reads its
/// surroundings once.
pub(crate) fn on_stand_ins(test: &str, memory: u64) {
    if platform().name != "host" {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let seconds =
        std::env::var("VMMGRAPH_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5.0);
    for Platform { name, .. } in PLATFORMS.iter().filter(|platform| platform.name != "host") {
        let file = if *name == "cuda" { "libcuda.so".to_owned() } else { format!("libstandin_{name}.so") };
        let library = program.parent().unwrap_or(Path::new(".")).join(file);
        assert!(library.exists(), "{}", library.display());
        let variable = name.to_uppercase();
        let output = Command::new(&program)
            .args([test, "--exact", "--nocapture"])
            .env(NAME, name)
            .env(format!("VMMGRAPH_{variable}_LIBRARY"), library)
            .env(format!("STANDIN_{variable}_MEMORY"), memory.to_string())
            .env(format!("STANDIN_{variable}_GRANULARITY"), "4096")
            .env("VMMGRAPH_FUZZ_SECONDS", format!("{}", seconds / 4.0))
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(output.status.success(), "{name}: {}\n{}", said[0], said[1]);
        let inputs = said[0].lines().find(|line| line.contains("new inputs"));
        println!("{name}: {}", inputs.unwrap_or_else(|| panic!("{name} ran nothing: {}", said[0])));
    }
}

/// Handles of three streams of a device: any numbers on the host, else its own, since what a default stream may do beside captures differs.
pub(crate) fn streams(ordinal: i32) -> [u64; 3] {
    static STREAMS: OnceLock<[u64; 3]> = OnceLock::new();
    *STREAMS.get_or_init(|| {
        if platform().name == "host" {
            return [0, 2, 32];
        }
        let driver: SharedDriver = (platform().open)(ordinal, DeviceOptions::default()).unwrap();
        let made = [(); 3].map(|()| driver.stream_create().unwrap().raw());
        // The streams live as long as the process, and so does what made them.
        std::mem::forget(driver);
        made
    })
}
