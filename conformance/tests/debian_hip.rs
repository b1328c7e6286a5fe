//! AMD's own libamdhip64 in its only packaged version, Debian 12's 5.2: too old, and refused
//! without side effects. `scripts/debian_hip.sh` fetches it and runs this file. Child processes
//! have only its folder on the library path.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint};
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use vmmgraph::driver::platform::PLATFORMS;
use vmmgraph::driver::{HipDriver, HostOptions};
use vmmgraph::{Device, DriverChoice, Error, Options, SharedVmmAllocator};

const CHILD: &str = "VMMGRAPH_TEST_CHILD";
const REAL: &str = "libamdhip64.so.5";

fn folder() -> PathBuf {
    let folder = std::env::var_os("VMMGRAPH_DEBIAN_HIP").map(PathBuf::from);
    folder.expect("VMMGRAPH_DEBIAN_HIP names the folder of scripts/debian_hip.sh")
}

/// A way of finding the library, as environment variables, and texts of the refusal.
struct Way {
    name: &'static str,
    variables: Vec<(&'static str, PathBuf)>,
    refused: &'static [&'static str],
}

fn ways(names: &Path) -> Vec<Way> {
    let library = folder().join(REAL);
    let file = library.canonicalize().unwrap();
    let named = |name: &str| names.join(name);
    symlink(&library, named("amd.so")).unwrap();
    // A hard link hides the name, like a copy in a wheel.
    if std::fs::hard_link(&file, named("vendored.so")).is_err() {
        std::fs::copy(&file, named("vendored.so")).unwrap();
    }
    // The libamdhip64-dev link in the path, by which newer versions are found.
    let development = named("development");
    std::fs::create_dir(&development).unwrap();
    symlink(&library, development.join("libamdhip64.so")).unwrap();
    let both = [folder().into_os_string(), development.into_os_string()].join(OsStr::new(":"));

    let by_name: &[&str] = &["libamdhip64.so.5.2.21153 is refused", "HIP 5 ", "6.2 is needed"];
    let by_version: &[&str] = &["HIP 5.2 (50221153)", "6.2 is needed"];
    const VARIABLE: &str = "VMMGRAPH_HIP_LIBRARY";
    vec![
        Way {
            name: "by no name: it is installed",
            variables: vec![],
            refused: &["is not there", "libamdhip64.so.7, libamdhip64.so.6"],
        },
        Way {
            name: "by its development name",
            variables: vec![("LD_LIBRARY_PATH", both.into())],
            refused: by_version,
        },
        Way {
            name: "loaded already",
            variables: vec![("LD_PRELOAD", library.clone())],
            refused: &["libamdhip64.so.5 is refused", "6.2 is needed"],
        },
        Way {
            name: "asked for",
            variables: vec![(VARIABLE, library)],
            refused: &["libamdhip64.so.5 is refused"],
        },
        Way { name: "asked for by a link", variables: vec![(VARIABLE, named("amd.so"))], refused: by_name },
        Way { name: "as a copy", variables: vec![(VARIABLE, named("vendored.so"))], refused: by_version },
    ]
}

fn run(program: &Path, arguments: &[&str], variables: &[(&str, PathBuf)]) -> Output {
    let mut command = Command::new(program);
    command.args(arguments).env_remove("VMMGRAPH_DRIVER").env("LD_LIBRARY_PATH", folder());
    command.envs(variables.iter().map(|(name, value)| (name, value))).output().unwrap()
}

fn child(part: &str, variables: &[(&str, PathBuf)]) -> Output {
    let variables: Vec<_> = variables.iter().cloned().chain([(CHILD, part.into())]).collect();
    run(&std::env::current_exe().unwrap(), &["--exact", "in_a_process_of_its_own", "--nocapture"], &variables)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
#[ignore = "SKIPPED: it needs AMD's library, which scripts/debian_hip.sh fetches"]
fn however_it_is_come_by_it_is_refused_in_words_and_the_host_can_be_taken() {
    let names = std::env::temp_dir().join(format!("vmmgraph-debian-hip-{}", std::process::id()));
    std::fs::create_dir(&names).unwrap();
    let conformance = PathBuf::from(env!("CARGO_BIN_EXE_conformance"));
    let demo = std::env::var_os("VMMGRAPH_DEMO").map(PathBuf::from);
    for way in ways(&names) {
        let expect = |output: &Output, code: i32| {
            let said = text(output);
            assert_eq!(
                (output.status.code(), output.status.signal()),
                (Some(code), None),
                "{}: {said}",
                way.name
            );
            let missing = way.refused.iter().find(|words| !said.contains(**words));
            assert_eq!(missing, None, "{}: {said}", way.name);
        };
        let output = child("refusal", &way.variables);
        expect(&output, 0);
        assert!(text(&output).contains("then: host"), "{}: {}", way.name, text(&output));

        expect(&run(&conformance, &["--driver", "hip"], &way.variables), 1);
        assert_eq!(
            run(&conformance, &["--driver", "host"], &way.variables).status.code(),
            Some(0),
            "{}",
            way.name
        );
        if let Some(demo) = &demo {
            let hip = [way.variables.as_slice(), &[("VMMGRAPH_DRIVER", "hip".into())]].concat();
            expect(&run(demo, &[], &hip), 1);
        }
        println!("HIP 5.2 {}: refused", way.name);
    }
    std::fs::remove_dir_all(&names).unwrap();
    println!("the demo was {}", if demo.is_some() { "refused too" } else { "not there" });
}

#[test]
fn in_a_process_of_its_own() {
    match std::env::var(CHILD).as_deref() {
        Ok("refusal") => refusal(),
        Ok("codes") => codes(),
        _ => {}
    }
}

fn refusal() {
    let refused = HipDriver::count().unwrap_err();
    assert!(matches!(refused, Error::UnfitDriver { .. } | Error::DriverMissing { .. }), "{refused}");
    assert_eq!(HipDriver::count(), Err(refused.clone()), "the second time as the first");
    let opened = Device::open(DriverChoice::HIP, 0, HostOptions::default()).map(drop);
    assert_eq!(opened, Err(refused.clone()));
    println!("refused: {refused}");
    let unusable = Device::open(DriverChoice::Auto, 0, HostOptions::default()).map(drop).unwrap_err();
    assert!(unusable.to_string().contains(&format!("hip: {refused}")), "{unusable}");
    let device = Device::open(DriverChoice::HOST, 0, HostOptions::default()).unwrap();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let block = space.allocate(1 << 20, vmmgraph::Stream::LEGACY).unwrap();
    space.free(block).unwrap();
    println!("then: {}", device.driver().info().platform);
}

/// Without the refusal: the library has the driver's functions and constants, and returns the codes
/// for "no device" without a GPU.
#[test]
#[ignore = "SKIPPED: it needs AMD's library, which scripts/debian_hip.sh fetches"]
fn the_library_has_the_functions_and_the_codes_that_the_driver_relies_on() {
    let output = child("codes", &[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
}

fn codes() {
    let hip = PLATFORMS.iter().find(|platform| platform.name == "hip").unwrap();
    let abi = (hip.abi)();
    // SAFETY: the runtime's initialisers, which search for devices and tolerate none.
    let library = unsafe { Library::open(Some(REAL), RTLD_NOW | RTLD_LOCAL) }.unwrap();
    let library = std::mem::ManuallyDrop::new(library);
    let lacking: Vec<&str> = abi
        .functions
        .iter()
        .map(|function| function.name)
        .filter(|name| {
            // SAFETY: looked up, never called.
            unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err()
        })
        .collect();
    assert_eq!(lacking, [""; 0]);

    // SAFETY: the signatures of hip_runtime_api.h.
    let (name, version, init, count) = unsafe {
        (
            *library.get::<unsafe extern "C" fn(c_int) -> *const c_char>(b"hipGetErrorName\0").unwrap(),
            *library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"hipDriverGetVersion\0").unwrap(),
            *library.get::<unsafe extern "C" fn(c_uint) -> c_int>(b"hipInit\0").unwrap(),
            *library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"hipGetDeviceCount\0").unwrap(),
        )
    };
    let errors: Vec<_> =
        abi.constants.iter().filter(|constant| constant.name.starts_with("hipError")).collect();
    assert!(errors.len() > 5, "{errors:?}");
    for error in errors {
        // SAFETY: a static text of the library.
        let name = unsafe { CStr::from_ptr(name(error.value as c_int)) };
        assert_eq!(name.to_str(), Ok(error.name));
    }
    let (mut found, mut devices) = (0, -1);
    // SAFETY: the out pointers are valid.
    unsafe {
        assert_eq!((version(&raw mut found), found), (0, 50_221_153));
        if !Path::new("/dev/kfd").exists() {
            // hipErrorInvalidDevice, hipErrorNoDevice.
            assert_eq!((init(0), count(&raw mut devices), devices), (101, 100, 0));
        }
    }
}
