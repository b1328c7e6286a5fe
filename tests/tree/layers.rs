//! Enforces the layers: a module of `src` names only lower modules, and only `capi` knows C.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Lowest first. Modules of one row name each other only as listed in `EXCEPTIONS`.
const LAYERS: &[&[&str]] = &[
    &["error", "units", "sync"],
    // Policy over numbers, without a driver.
    &["dispatch"],
    &["driver"],
    &["pages"],
    &["pause"],
    &["order", "device"],
    // Siblings without mutual references.
    &["space", "region", "elastic", "executables", "ring", "workspace"],
    &["lending"],
    &["stats"],
    &["map"],
    &["arena", "torch"],
    &["capi"],
];

/// A failed `units` constructor is an `Error`, which carries an `Address` and the driver kind.
const EXCEPTIONS: &[(&str, &str)] = &[("error", "units"), ("units", "error"), ("error", "driver")];

fn rank(module: &str) -> Option<usize> {
    LAYERS.iter().position(|row| row.contains(&module))
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

fn named(text: &str, reexports: &BTreeMap<String, String>) -> Vec<String> {
    let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = code.join(" ");
    let mut modules = Vec::new();
    for after in code.split("crate::").skip(1) {
        let list = match after.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or("").to_owned(),
            None => after.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("").to_owned(),
        };
        for word in list.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()) {
            modules.push(reexports.get(word).cloned().unwrap_or_else(|| word.to_owned()));
        }
    }
    modules.retain(|module| rank(module).is_some());
    modules
}

#[test]
fn a_module_names_only_lower_layers() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let root = fs::read_to_string(src.join("lib.rs")).unwrap();
    let mut reexports = BTreeMap::new();
    for line in root.lines().filter_map(|line| line.strip_prefix("pub use ")) {
        let (module, items) = line.split_once("::").unwrap();
        for item in items.split(|c: char| !c.is_alphanumeric()).filter(|item| !item.is_empty()) {
            reexports.insert(item.to_owned(), module.to_owned());
        }
    }
    assert!(reexports.len() > 10, "lib.rs re-exports nothing: has its form changed?");

    let mut files = Vec::new();
    sources(&src, &mut files);
    let (mut checked, mut wrong) = (0, Vec::new());
    for file in files {
        let inside = file.strip_prefix(&src).unwrap();
        let first = inside.components().next().unwrap().as_os_str().to_string_lossy();
        let module = first.trim_end_matches(".rs").to_owned();
        let Some(mine) = rank(&module) else {
            assert_eq!(module, "lib", "{} belongs to no layer", file.display());
            continue;
        };
        for other in named(&fs::read_to_string(&file).unwrap(), &reexports) {
            checked += 1;
            let allowed = other == module
                || rank(&other).is_some_and(|theirs| theirs < mine)
                || EXCEPTIONS.contains(&(module.as_str(), other.as_str()));
            if !allowed {
                wrong.push(format!("{} names {other}", inside.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(checked > 50, "only {checked} names found: has the form of the imports changed?");
}

#[test]
fn policies_of_elastic_memory_know_no_driver_and_no_clock() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/elastic/policy");
    let mut files = Vec::new();
    sources(&folder, &mut files);
    assert!(files.len() > 5, "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let names =
            |what: &str| text.lines().any(|line| !line.trim_start().starts_with("//") && line.contains(what));
        for other in ["super::super", "std::time", "std::thread", "std::sync", "unsafe"] {
            assert!(!names(other), "{} names {other}", file.display());
        }
        for named in text.split("crate::").skip(1) {
            assert!(named.starts_with("error::"), "{} names crate::{:.20}", file.display(), named);
        }
    }
}

/// Names of platforms occur in `driver` and in the C enumerators.
#[test]
fn no_platform_is_named_above_the_driver() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let names = ["cuda", "hip", "ascend", "mlu"];
    let (mut read, mut inside_the_driver) = (0, 0);
    for file in files {
        let inside = file.strip_prefix(&src).unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&file).unwrap();
        let product = text.split("#[cfg(test)]").next().unwrap_or_default();
        let code = product.lines().filter(|line| !line.trim_start().starts_with("//"));
        let words = code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric())).map(str::to_lowercase);
        let named = words.filter(|word| names.contains(&word.as_str())).count();
        if inside.starts_with("driver/") || inside == "capi/device.rs" {
            inside_the_driver += named;
        } else {
            assert_eq!(named, 0, "{inside} names a platform");
            read += 1;
        }
    }
    assert!(read > 100 && inside_the_driver > 10, "{read} files, {inside_the_driver} names");
}

#[test]
fn the_plain_code_of_rings_knows_no_driver_and_no_clock() {
    for file in ["plan.rs", "runs.rs", "schedule.rs"] {
        let text =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ring").join(file)).unwrap();
        let code: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        for other in ["std::time", "std::thread", "std::sync", "unsafe", "Mutex"] {
            assert!(!code.iter().any(|line| line.contains(other)), "{file} names {other}");
        }
        for named in code.join(" ").split("crate::").skip(1) {
            let plain = ["error::", "units::"].iter().any(|module| named.starts_with(module));
            assert!(plain, "{file} names crate::{named:.20}");
        }
    }
}

#[test]
fn cudarc_is_named_in_the_cuda_driver_only_and_policy_has_no_unsafe() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    for file in files {
        let inside = file.strip_prefix(&src).unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&file).unwrap();
        if text.contains("cudarc::") {
            assert!(inside.starts_with("driver/cuda/"), "{inside} names cudarc");
        }
        if text.contains("unsafe {") {
            // The driver interface, its callers, and memory or graphs passed by callers.
            let may = [
                "driver/",
                "pages/",
                "capi/",
                "space/poison.rs",
                "executables/mod.rs",
                "ring/graph.rs",
                "ring/host.rs",
            ];
            let may = may.iter().any(|place| inside.starts_with(place));
            assert!(may, "{inside} contains unsafe code");
        }
    }
}
