//! Runs the demo on every platform's stand-in.

use std::process::Command;

use vmmgraph::driver::platform::PLATFORMS;

fn demo(platform: &str) {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data");
    let file = if platform == "cuda" { "libcuda.so".to_owned() } else { format!("libstandin_{platform}.so") };
    assert!(folder.join(&file).exists(), "{file}");
    let output = Command::new(env!("CARGO_BIN_EXE_vmmgraph-demo"))
        .args(["--data", data, "--only", "65 decode"])
        .env("VMMGRAPH_DRIVER", platform)
        .env(format!("VMMGRAPH_{}_LIBRARY", platform.to_uppercase()), folder.join(file))
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{platform}: {}{}", said[0], said[1]);
    assert!(said[0].starts_with(&format!("{platform} driver: ")), "{}", said[0]);
    let last = said[0].lines().find(|line| line.starts_with("in sum")).unwrap_or_default();
    println!("{platform}: {last}");
    assert!(last.starts_with("in sum: 1 sets") && last.ends_with(" 0 wrong or lost"), "{platform}: {last}");
}

#[test]
fn the_demo_runs_on_every_platform() {
    // `make demo` runs on the host platform.
    let platforms = PLATFORMS.iter().map(|platform| platform.name).filter(|name| *name != "host");
    std::thread::scope(|scope| platforms.for_each(|platform| drop(scope.spawn(move || demo(platform)))));
}
