//! Captures through the platform's own library, looked up by name: one row per platform. A platform
//! without a row is not offered the capture cases.

use std::ffi::{c_int, c_void};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use vmmgraph::Stream;
use vmmgraph::driver::Graph;

use crate::{Launch, Plug};

struct Names {
    platform: &'static str,
    /// One of these libraries is already loaded by the driver.
    libraries: &'static [&'static str],
    /// `int (stream, int mode)`
    begin: &'static str,
    /// `int (stream, graph *)`
    end: &'static str,
    /// `int (graph)`
    destroy: &'static str,
    /// `int (executable or graph, stream)`
    launch: &'static str,
    /// `int (context or device *)`
    current: &'static str,
    /// `int (int *mode)`
    exchange: &'static str,
    /// `None` if graphs are launched without executables.
    executables: Option<Making>,
}

/// Functions for making an executable of a graph and destroying an executable: `int (executable)`.
enum Making {
    /// `int (executable *, graph, uint64_t flags)`
    Flags(&'static str, &'static str),
    /// `int (executable *, graph, node *, char *, size_t)`, with a buffer for error text
    Log(&'static str, &'static str),
}

const PLATFORMS: &[Names] = &[
    // cuda.h 13.0
    Names {
        platform: "cuda",
        libraries: &["libcuda.so.1", "libcuda.so"],
        begin: "cuStreamBeginCapture_v2",
        end: "cuStreamEndCapture",
        destroy: "cuGraphDestroy",
        launch: "cuGraphLaunch",
        current: "cuCtxGetCurrent",
        exchange: "cuThreadExchangeStreamCaptureMode",
        executables: Some(Making::Flags("cuGraphInstantiateWithFlags", "cuGraphExecDestroy")),
    },
    // hip_runtime_api.h of HIP 6.2 and 7.1
    Names {
        platform: "hip",
        libraries: &["libamdhip64.so.7", "libamdhip64.so.6"],
        begin: "hipStreamBeginCapture",
        end: "hipStreamEndCapture",
        destroy: "hipGraphDestroy",
        launch: "hipGraphLaunch",
        current: "hipGetDevice",
        exchange: "hipThreadExchangeStreamCaptureMode",
        executables: Some(Making::Flags("hipGraphInstantiateWithFlags", "hipGraphExecDestroy")),
    },
    // acl_rt.h and acl_mdl.h of CANN 8.5 and later
    Names {
        platform: "ascend",
        libraries: &["libascendcl.so", "libacl_rt.so"],
        begin: "aclmdlRICaptureBegin",
        end: "aclmdlRICaptureEnd",
        destroy: "aclmdlRIDestroy",
        launch: "aclmdlRIExecuteAsync",
        current: "aclrtGetCurrentContext",
        exchange: "aclmdlRICaptureThreadExchangeMode",
        executables: None,
    },
    // cn_api.h of CNDrv 2.15.5
    Names {
        platform: "mlu",
        libraries: &["libcndrv.so"],
        begin: "cnQueueBeginCapture",
        end: "cnQueueEndCapture",
        destroy: "cnTaskTopoDestroy",
        launch: "cnTaskTopoEntityInvoke",
        current: "cnCtxGetCurrent",
        exchange: "cnThreadExchangeQueueCaptureMode",
        executables: Some(Making::Log("cnTaskTopoInstantiate", "cnTaskTopoEntityDestroy")),
    },
];

type Pointer = *mut c_void;
type WithMode = unsafe extern "C" fn(Pointer, c_int) -> c_int;
type WithOut = unsafe extern "C" fn(Pointer, *mut Pointer) -> c_int;
type OfOne = unsafe extern "C" fn(Pointer) -> c_int;
type OfTwo = unsafe extern "C" fn(Pointer, Pointer) -> c_int;
type Current = unsafe extern "C" fn(*mut u64) -> c_int;
type Exchange = unsafe extern "C" fn(*mut c_int) -> c_int;
type WithFlags = unsafe extern "C" fn(*mut Pointer, Pointer, u64) -> c_int;
type WithLog = unsafe extern "C" fn(*mut Pointer, Pointer, *mut Pointer, Pointer, usize) -> c_int;

#[derive(Clone, Copy, Debug)]
enum Make {
    Flags(WithFlags),
    Log(WithLog),
}

/// The most restrictive capture mode; the same number on every platform.
const GLOBAL: c_int = 0;
/// Restricts only calls of the capturing thread.
const THREAD_LOCAL: c_int = 1;

/// Captures of one platform.
#[derive(Debug)]
pub struct Captures {
    begin: WithMode,
    end: WithOut,
    destroy: OfOne,
    launch: OfTwo,
    current: Current,
    exchange: Exchange,
    executables: Option<(Make, OfOne)>,
}

impl Captures {
    /// Loads the platform's functions. Returns `None` without a row, or if a function is missing.
    #[must_use]
    pub fn of(platform: &str) -> Option<Self> {
        PLATFORMS.iter().find(|names| names.platform == platform).and_then(Self::load)
    }

    fn load(names: &Names) -> Option<Self> {
        let library = names.libraries.iter().find_map(|name| {
            // SAFETY: already loaded by the driver under test, so no initialiser runs.
            unsafe { Library::open(Some(*name), RTLD_NOW | RTLD_LOCAL) }.ok()
        })?;
        // SAFETY: the signatures are from the headers named in the rows.
        let captures = unsafe {
            Self {
                begin: *library.get(names.begin.as_bytes()).ok()?,
                end: *library.get(names.end.as_bytes()).ok()?,
                destroy: *library.get(names.destroy.as_bytes()).ok()?,
                launch: *library.get(names.launch.as_bytes()).ok()?,
                current: *library.get(names.current.as_bytes()).ok()?,
                exchange: *library.get(names.exchange.as_bytes()).ok()?,
                executables: match names.executables {
                    Some(Making::Flags(make, destroy)) => Some((
                        Make::Flags(*library.get(make.as_bytes()).ok()?),
                        *library.get(destroy.as_bytes()).ok()?,
                    )),
                    Some(Making::Log(make, destroy)) => Some((
                        Make::Log(*library.get(make.as_bytes()).ok()?),
                        *library.get(destroy.as_bytes()).ok()?,
                    )),
                    None => None,
                },
            }
        };
        std::mem::forget(library);
        Some(captures)
    }
}

fn succeeded(what: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{what} returned {code}")) }
}

fn handle(stream: Stream) -> Pointer {
    stream.raw() as Pointer
}

impl Plug for Captures {
    fn begin(&self, stream: Stream) -> Result<(), String> {
        // SAFETY: a live stream of the driver interface.
        succeeded("beginning the capture", unsafe { (self.begin)(handle(stream), GLOBAL) })
    }

    fn end(&self, stream: Stream) -> Result<Graph, String> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: a stream under capture, and a valid out pointer.
        succeeded("ending the capture", unsafe { (self.end)(handle(stream), &raw mut graph) })?;
        if graph.is_null() {
            return Err("the capture ended without a graph".to_owned());
        }
        // SAFETY: the platform just returned this graph.
        Ok(unsafe { Graph::from_raw(graph as u64) })
    }

    fn destroy(&self, graph: Graph) {
        // SAFETY: a graph of `end`, destroyed once. An error is ignored: the graph is lost either
        // way.
        unsafe { (self.destroy)(graph.raw() as Pointer) };
    }

    fn launch(&self, what: Launch, stream: Stream) -> Result<(), String> {
        let launch = |what: Pointer| {
            // SAFETY: made by the platform, and the stream is live.
            succeeded("launching", unsafe { (self.launch)(what, handle(stream)) })
        };
        match (what, self.executables) {
            (Launch::Executable(executable), _) => launch(executable.raw() as Pointer),
            (Launch::Graph(graph), None) => launch(graph.raw() as Pointer),
            (Launch::Graph(graph), Some((make, destroy))) => {
                let mut executable = std::ptr::null_mut();
                let (to, graph, null) = (&raw mut executable, graph.raw() as Pointer, std::ptr::null_mut());
                // SAFETY: a live graph and a valid out pointer; the error text is not requested.
                let code = unsafe {
                    match make {
                        Make::Flags(make) => make(to, graph, 0),
                        Make::Log(make) => make(to, graph, null, null.cast(), 0),
                    }
                };
                succeeded("instantiating", code)?;
                let launched = launch(executable);
                // SAFETY: made above; platforms destroy an executable after its last launch.
                let code = unsafe { destroy(executable) };
                launched.and(succeeded("destroying the executable", code))
            }
        }
    }

    fn thread_state(&self) -> Result<Vec<u64>, String> {
        let (mut current, mut mode) = (0, THREAD_LOCAL);
        // SAFETY: an out pointer with room for a pointer or an int. An error code is part of the
        // state.
        let code = unsafe { (self.current)(&raw mut current) };
        // SAFETY: a valid in-out pointer; the previous mode is restored below.
        let asked = unsafe { (self.exchange)(&raw mut mode) };
        let before = mode;
        if asked == 0 {
            // SAFETY: as above.
            succeeded("putting the capture mode back", unsafe { (self.exchange)(&raw mut mode) })?;
        }
        Ok(vec![code as u64, current, asked as u64, before as u64])
    }
}
