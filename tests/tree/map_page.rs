//! The page map as a web page: the file's contents and its behaviour in a browser.
//!
//! A headless Chromium runs a copy with an extra script, which hovers, clicks, types, compares the
//! display with the data, and writes results into the document for `--dump-dom`. The shipped page
//! has no test code. SKIPPED without Chromium (scripts/setup.sh test installs it).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::{env, fs};

use vmmgraph::driver::HostDriver;
use vmmgraph::{Device, HostOptions, Options, RegionOptions, SharedVmmAllocator, Stream};
use vmmgraph_testkit::{MIB, Trace, capture_with};

const A: Stream = Stream::LEGACY;

const EVIL: &str = "</script><script>window.bad=1</script><!--<script>\u{2028}&amp; \"'`${1}";

fn page(name: &str, kept: bool) -> (vmmgraph::ArenaMap, String) {
    let trace = Trace::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data"), name).unwrap();
    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let region = device.region(EVIL, RegionOptions::default()).unwrap();
    region.allocate(64 * MIB, A).unwrap();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let mut captured = Vec::new();
    for (index, shape) in trace.shapes.iter().enumerate() {
        arena.trace_events(index == 2);
        captured.push(capture_with(&arena, shape, A, kept).unwrap());
        let label = if index == 1 { EVIL.to_owned() } else { shape.label() };
        captured[index].space.set_label(&label).unwrap();
        captured[index].space.set_site(if index == 2 { "engine/capture.py:77" } else { "" }).unwrap();
    }
    let mut map = arena.map();
    EVIL.clone_into(&mut map.title);
    map.executables_bytes = Some(5 * MIB);
    if kept {
        let first = map.pages.iter_mut().find(|page| page.owner.is_none()).unwrap();
        first.lease = Some(7);
    }
    let page = map.to_html();
    (map, page)
}

fn program(names: &[&str]) -> Option<PathBuf> {
    let paths = env::var_os("PATH")?;
    env::split_paths(&paths)
        .flat_map(|folder| names.iter().map(move |name| folder.join(name)))
        .find(|file| file.is_file())
}

fn script(page: &str) -> &str {
    page.rsplit_once("<script>").unwrap().1.split_once("</script>").unwrap().0
}

#[test]
fn the_file_needs_no_network_and_no_label_ends_its_data() {
    let (map, page) = page("capture-trace-vision", false);
    assert_eq!(page.matches("<script").count(), 2, "the data and the program");
    assert_eq!(page.matches("</script").count(), 2);
    assert_eq!(page.matches("<!--").count(), 0);
    let program = page.replace(&map.to_json().replace('<', "\\u003c"), "");
    for word in [
        "http",
        "://",
        "fetch(",
        "XMLHttpRequest",
        "import(",
        "import ",
        "@import",
        "url(",
        " src=",
        " href=",
        "innerHTML",
        "eval(",
    ] {
        assert!(!program.contains(word), "{word} is in the page");
    }
    let data = page
        .split_once("<script type=\"application/json\" id=\"map\">")
        .unwrap()
        .1
        .split_once("</script>")
        .unwrap()
        .0;
    assert_eq!(vmmgraph::ArenaMap::from_json(data).as_ref(), Ok(&map));
}

#[test]
fn the_script_is_a_script() {
    let Some(node) = program(&["node", "nodejs"]) else {
        println!("SKIPPED: no node");
        return;
    };
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("map_page.js");
    fs::write(&file, script(&page("capture-trace-vision", false).1)).unwrap();
    let output = Command::new(node).arg("--check").arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_browser_shows_what_the_data_says_and_hover_click_and_keys_work() {
    let Some(chromium) = program(&["chromium", "chromium-browser", "google-chrome"]) else {
        println!("SKIPPED: no Chromium");
        return;
    };
    let probe = include_str!("../data/map_page_probe.js");
    let pages = [
        ("capture-trace-65", false, "light", 1400),
        ("capture-trace-65", false, "light", 390),
        ("capture-trace-65-retained", false, "light", 1000),
        ("capture-trace-65-retained", true, "dark", 1600),
        ("capture-trace-vision", false, "dark", 1400),
    ];
    for (name, kept, mode, width) in pages {
        let (map, page) = page(name, kept);
        // Inserted before the page's own script, to catch its errors; runs afterwards.
        let with_probe = page.replacen("<main>", &format!("<script>{probe}</script><main>"), 1);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("map_page_{name}_{kept}_{width}"));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("page.html");
        fs::write(&file, with_probe).unwrap();
        let output = Command::new(&chromium)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
            ])
            .args(["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000"])
            .arg(format!("--window-size={width},1000"))
            .arg(format!("--user-data-dir={}", folder.join("profile").display()))
            .arg("--dump-dom")
            .arg(format!("file://{}#{mode}", file.display()))
            .output()
            .unwrap();
        let dom = String::from_utf8_lossy(&output.stdout);
        let found =
            dom.rsplit_once("PROBE[").and_then(|(_, rest)| rest.split_once("]PROBE")).map(|(found, _)| found);
        let Some(found) = found else {
            panic!(
                "{name}: the probe said nothing\n{}\n{}",
                dom.chars().take(2000).collect::<String>(),
                String::from_utf8_lossy(&output.stderr)
            );
        };
        println!("{name}, kept {kept}, {mode}, {width}: {found}");
        assert!(found.starts_with("ok "), "{name} {mode} {width}: {found}");
        let rows: usize = found.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert_eq!(rows, map.spaces.len());
    }
}
