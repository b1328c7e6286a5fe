//! The installed program: table, JSON and exit code.

use std::process::{Command, Output};

use vmmgraph_conformance::CASES;

fn conformance(arguments: &[&str], surroundings: &[(&str, &str)]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_conformance"));
    program.args(arguments).env_remove("VMMGRAPH_DRIVER");
    surroundings.iter().for_each(|(name, value)| {
        program.env(name, value);
    });
    program.output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_device_that_passes_gives_a_table_and_the_same_as_json() {
    let file = std::env::temp_dir().join(format!("vmmgraph-conformance-{}.json", std::process::id()));
    let arguments = ["--driver", "cuda", "--device", "1", "--json", file.to_str().unwrap()];
    let output = conformance(&arguments, &[]);
    let table = text(&output);
    assert_eq!(output.status.code(), Some(0), "{table}");
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(json["platform"], "cuda");
    assert_eq!(json["device"], 1);
    assert_eq!(json["driver_version"], "13.0");
    assert_eq!(json["failed"], 0);
    assert_eq!(json["capabilities"]["granularity"], 2 << 20);
    let cases = json["cases"].as_array().unwrap();
    assert_eq!(cases.len(), CASES.len());
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let line = table.lines().rfind(|line| line.split_whitespace().next() == Some(name));
        let line = line.unwrap_or_else(|| panic!("{name} is not in {table}"));
        assert!(line.contains(case["outcome"].as_str().unwrap()), "{line}");
        assert!(case["seconds"].as_f64().unwrap() >= 0.0);
    }
    let last = format!("{} passed, 0 failed, {} not offered", json["passed"], json["not_offered"]);
    assert!(table.contains(&last) && table.contains("driver version 13.0"), "{table}");
}

#[test]
fn a_failed_case_is_in_the_table_and_in_the_exit_code() {
    // Too little memory for most cases.
    let output = conformance(&["--driver", "cuda"], &[("STANDIN_CUDA_MEMORY", "16777216")]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("FAILED"), "{}", text(&output));
    let missing = conformance(&["--driver", "cuda"], &[("STANDIN_CUDA_DEVICES", "0")]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing).contains("has 0 device(s)"), "{}", text(&missing));
}

#[test]
fn a_version_with_a_defect_is_told_from_those_without() {
    let folder = std::env::current_exe().unwrap().parent().unwrap().join("libstandin_hip.so");
    let hip = |version| {
        let surroundings =
            [("VMMGRAPH_HIP_LIBRARY", folder.to_str().unwrap()), ("STANDIN_HIP_VERSION", version)];
        let output = conformance(&["--driver", "hip"], &surroundings);
        let table = text(&output);
        let failed = table.lines().filter(|line| line.contains(" FAILED "));
        let failed: Vec<String> =
            failed.filter_map(|line| Some(line.split_whitespace().next()?.to_owned())).collect();
        (output.status.code(), failed, table)
    };
    let (code, failed, table) = hip("60200000");
    assert_eq!((code, failed), (Some(0), Vec::new()), "{table}");
    // ROCm 7.0 to 7.13 give access only to the gapless mappings after a reservation's first
    // mapping.
    assert!(!table.contains("this version of ROCm"), "{table}");
    let (code, failed, table) = hip("70200000");
    assert_eq!((code, failed), (Some(0), Vec::new()), "{table}");
    assert!(table.contains("driver version 7.2") && table.contains("this version of ROCm"), "{table}");
    let line = table.lines().find(|line| line.starts_with("map-in-any-order ")).unwrap();
    assert!(line.contains("not offered"), "{line}");
}

#[test]
fn what_is_not_understood_is_said() {
    for wrong in [&["--driver", "gpu"][..], &[], &["--device", "one"], &["--json"], &["host"]] {
        let output = conformance(wrong, &[]);
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
        assert!(text(&output).contains("usage: conformance --driver NAME"), "{wrong:?}");
    }
    let list = conformance(&["--list"], &[]);
    assert_eq!(list.status.code(), Some(0));
    assert_eq!(text(&list).lines().count(), CASES.len());
}
