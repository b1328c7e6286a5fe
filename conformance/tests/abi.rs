//! Compiles the library's declarations against the vendors' headers, fetched by `scripts/abi.sh`.
//! Without headers (`VMMGRAPH_ABI_HEADERS`) only the checker is tested.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vmmgraph::driver::abi::{Abi, Constant, Function, Layout};
use vmmgraph::driver::platform::PLATFORMS;
use vmmgraph_conformance::abi::assertions;

/// Platform, version (the folder is `platform-version`), and optional functions missing in this
/// version.
const HEADERS: &[(&str, &str, &[&str])] = &[
    ("hip", "6.2", &[]),
    ("hip", "7.1", &[]),
    ("ascend", "2.11", &[]),
    ("ascend", "2.14", &[]),
    ("mlu", INSTALLED, &[]),
];

/// A header without a public package: the installed version is tested.
const INSTALLED: &str = "installed";

fn compile(code: &str, include: &Path, without: &[&str]) -> Result<(), String> {
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-c", "-o", "/dev/null", "-w", "-x", "c", "-", "-I"]).arg(include);
    cc.args(without.iter().map(|name| format!("-DWITHOUT_{name}")));
    let mut cc = cc.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    cc.stdin.take().unwrap().write_all(code.as_bytes()).unwrap();
    let output = cc.wait_with_output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn mentioned(folder: &Path, word: &str) -> bool {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).any(|path| {
        if path.is_dir() {
            return mentioned(&path, word);
        }
        let text = std::fs::read(&path).unwrap();
        text.windows(word.len()).any(|part| part == word.as_bytes())
    })
}

#[test]
#[ignore = "SKIPPED: it needs the vendors' headers, which scripts/abi.sh fetches"]
fn the_vendors_headers_say_what_is_called() {
    let folder = std::env::var_os("VMMGRAPH_ABI_HEADERS").map(PathBuf::from);
    let folder = folder.expect("VMMGRAPH_ABI_HEADERS names the folder of scripts/abi.sh");
    let mut passed = 0;
    for (name, version, lacking) in HEADERS {
        let include = folder.join(format!("{name}-{version}"));
        let Some(platform) = PLATFORMS.iter().find(|platform| platform.name == *name) else {
            println!("header proof {name} {version}: there is no such platform yet");
            continue;
        };
        if !include.exists() {
            println!("SKIPPED header proof {name} {version}: {} is not there", include.display());
            continue;
        }
        let abi = (platform.abi)();
        assert!(abi.functions.len() > 20 && !abi.structs.is_empty() && !abi.constants.is_empty(), "{abi:?}");
        for absent in *lacking {
            assert!(
                abi.functions.iter().any(|f| f.name == *absent && f.optional),
                "{absent} is not optional"
            );
            assert!(!mentioned(&include, absent), "{name} {version} has {absent}");
        }
        let result = compile(&assertions(&abi), &include, lacking);
        assert_eq!(result, Ok(()), "{name} {version}");
        println!(
            "header proof {name} {version}: {} functions, {} structures, {} constants",
            abi.functions.len() - lacking.len(),
            abi.structs.len(),
            abi.constants.len()
        );
        passed += 1;
    }
    println!("{passed} header proofs passed");
}

/// Every platform with a C interface has headers of two versions; MLU needs the installed one only.
#[test]
fn no_platform_declares_what_is_held_against_nothing() {
    for platform in PLATFORMS.iter().filter(|platform| !(platform.abi)().functions.is_empty()) {
        let versions = || HEADERS.iter().filter(|(name, ..)| *name == platform.name);
        let (all, installed) =
            (versions().count(), versions().filter(|(_, version, _)| *version == INSTALLED).count());
        let expected = if platform.name == "mlu" { all == 1 && installed == 1 } else { all - installed >= 2 };
        assert!(expected, "{}: {all} versions, {installed} of them whichever is installed", platform.name);
        assert_eq!((platform.abi)().platform, platform.name);
    }
}

const HEADER: &str = "\
typedef enum { thing_ok = 0, thing_bad = 7 } thing_t;
typedef struct { int type; void* end; } thing_prop;
thing_t thing_make(thing_prop* prop, size_t bytes);
";

fn thing() -> Abi {
    let function = |name, arguments: &[&str], optional| Function {
        name,
        result: "thing_t".to_owned(),
        arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        optional,
    };
    Abi {
        platform: "thing",
        preamble: HEADER,
        functions: vec![
            function("thing_make", &["thing_prop *", "size_t"], false),
            function("thing_new", &[], true),
        ],
        structs: vec![Layout { name: "thing_prop", bytes: 16, members: vec![("type", 0), ("end", 8)] }],
        constants: vec![Constant { name: "thing_bad", value: 7 }],
    }
}

#[test]
fn whatever_differs_from_a_header_is_named() {
    let check = |abi: &Abi| compile(&assertions(abi), Path::new("."), &["thing_new"]);
    assert_eq!(check(&thing()), Ok(()));
    let new = compile(&assertions(&thing()), Path::new("."), &[]).unwrap_err();
    assert!(new.contains("thing_new"), "{new}");
    let change = |expected: &str, change: &dyn Fn(&mut Abi)| {
        let mut abi = thing();
        change(&mut abi);
        let complaint = check(&abi).unwrap_err();
        assert!(complaint.contains(expected), "{expected}: {complaint}");
    };
    change("the prototype of thing_make", &|abi| abi.functions[0].arguments[1] = "unsigned".to_owned());
    change("the prototype of thing_make", &|abi| abi.functions[0].arguments.truncate(1));
    change("the prototype of thing_make", &|abi| abi.functions[0].result = "void *".to_owned());
    change("thing_make2", &|abi| abi.functions[0].name = "thing_make2");
    change("the size of thing_prop", &|abi| abi.structs[0].bytes = 24);
    change("the offset of end", &|abi| abi.structs[0].members[1].1 = 4);
    change("the value of thing_bad", &|abi| abi.constants[0].value = 2);
}
