//! Runs the same inputs on the stand-in of every platform.

use std::path::Path;
use std::ptr;
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::thread;

use cudarc::driver::sys;
use vmmgraph::driver::platform::{PLATFORMS, Platform};
use vmmgraph::driver::{DeviceOptions, SharedDriver};
use vmmgraph_testkit::child_command;

const NAME: &str = "VMMGRAPH_FUZZ_DRIVER";

/// The platform under test: the host, or the platform named in the environment.
pub(crate) fn platform() -> &'static Platform {
    let name = std::env::var(NAME).unwrap_or_else(|_| "host".to_owned());
    PLATFORMS.iter().find(|platform| platform.name == name).unwrap_or_else(|| panic!("no platform {name}"))
}

/// Runs a test of this program on each stand-in, with `memory` bytes per device, in a process each:
/// a library reads its environment once.
pub(crate) fn on_stand_ins(module: &str, test: &str, memory: u64) {
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
        let mut child = child_command(module, test);
        // scripts/asan.sh puts stand-ins on the path by vendor name; the libraries beside the
        // program contain a sanitizer and do not load.
        if std::env::var_os("VMMGRAPH_STANDINS_ON_PATH").is_none() {
            child.env(format!("VMMGRAPH_{variable}_LIBRARY"), library);
        }
        let output = child
            .env(NAME, name)
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

/// Returns three stream handles: any numbers on the host; otherwise created streams.
pub(crate) fn streams(ordinal: i32) -> [u64; 3] {
    // The streams and their driver live as long as the process.
    static STREAMS: OnceLock<([u64; 3], Option<SharedDriver>)> = OnceLock::new();
    let made = STREAMS.get_or_init(|| {
        if platform().name == "host" {
            return ([0, 2, 32], None);
        }
        let driver: SharedDriver = (platform().open)(ordinal, DeviceOptions::default()).unwrap();
        ([(); 3].map(|()| driver.stream_create().unwrap().raw()), Some(driver))
    });
    made.0
}

/// Runs a test during a GLOBAL capture on a second thread, which a wait outside the relaxed mode
/// invalidates. CUDA only, with rules measured on a GPU.
pub(crate) fn beside_a_capture(test: impl FnOnce()) {
    if platform().name != "cuda" {
        return test();
    }
    let ((begun, begins), (over, is_over)) = (channel(), channel::<()>());
    let capture = thread::spawn(move || {
        let (mut context, mut stream, mut graph) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: out pointers on this stack; the context is retained by the process and owns the
        // stream.
        let ended = unsafe {
            assert_eq!(sys::cuInit(0), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuCtxSetCurrent(context), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuStreamCreate(&raw mut stream, 1), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuStreamBeginCapture_v2(stream, mode), sys::CUresult::CUDA_SUCCESS);
            begun.send(()).unwrap();
            let _ = is_over.recv();
            sys::cuStreamEndCapture(stream, &raw mut graph)
        };
        assert_eq!(ended, sys::CUresult::CUDA_SUCCESS, "the capture is lost");
    });
    begins.recv().unwrap();
    test();
    over.send(()).unwrap();
    capture.join().unwrap();
}
