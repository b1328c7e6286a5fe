//! How captures are made where the platform's own library is at hand: one row a platform, found by name at run time.
//!
//! Every platform has the same few functions here, with the same arguments but for one: pointers, a mode and an out pointer; they differ in their
//! names. Whoever adds a platform adds a row, or none: then the cases about captures are not offered.

use std::ffi::{c_int, c_void};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use vmmgraph::Stream;
use vmmgraph::driver::Graph;

use crate::{Launch, Plug};

/// The names of a platform's functions.
struct Names {
    platform: &'static str,
    /// The driver has one of these loaded already.
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
    /// Where graphs are not launched as they are.
    executables: Option<Making>,
}

/// The names of the functions that make an executable of a graph, and destroy it: `int (executable)`.
enum Making {
    /// `int (executable *, graph, uint64_t flags)`
    Flags(&'static str, &'static str),
    /// `int (executable *, graph, node *, char *, size_t)`: room for what is wrong with it
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

/// What makes an executable of a graph.
#[derive(Clone, Copy, Debug)]
enum Make {
    Flags(WithFlags),
    Log(WithLog),
}

/// The mode in which a capture allows its thread the least; the same number everywhere.
const GLOBAL: c_int = 0;
/// Only calls of the capturing thread are restricted.
const THREAD_LOCAL: c_int = 1;

/// A platform's captures.
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
    /// Those of a platform by name, from the library that its driver has loaded; `None` if there is no row for it, or a function is missing.
    #[must_use]
    pub fn of(platform: &str) -> Option<Self> {
        PLATFORMS.iter().find(|names| names.platform == platform).and_then(Self::load)
    }

    fn load(names: &Names) -> Option<Self> {
        let library = names.libraries.iter().find_map(|name| {
            // SAFETY: the driver under test has loaded it before: no initialiser runs.
            unsafe { Library::open(Some(*name), RTLD_NOW | RTLD_LOCAL) }.ok()
        })?;
        // SAFETY: the signatures are those of the headers that the rows name.
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
        // It stays for as long as the process, and its functions with it.
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
        // SAFETY: a stream of the door's, which exists.
        succeeded("beginning the capture", unsafe { (self.begin)(handle(stream), GLOBAL) })
    }

    fn end(&self, stream: Stream) -> Result<Graph, String> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: a stream under capture, and a good out pointer.
        succeeded("ending the capture", unsafe { (self.end)(handle(stream), &raw mut graph) })?;
        if graph.is_null() {
            return Err("the capture ended without a graph".to_owned());
        }
        // SAFETY: the platform gave it out just now.
        Ok(unsafe { Graph::from_raw(graph as u64) })
    }

    fn destroy(&self, graph: Graph) {
        // SAFETY: a graph of `end`, destroyed once; what is refused then is lost either way.
        unsafe { (self.destroy)(graph.raw() as Pointer) };
    }

    fn launch(&self, what: Launch, stream: Stream) -> Result<(), String> {
        let launch = |what: Pointer| {
            // SAFETY: what the platform made, on a stream that exists.
            succeeded("launching", unsafe { (self.launch)(what, handle(stream)) })
        };
        match (what, self.executables) {
            (Launch::Executable(executable), _) => launch(executable.raw() as Pointer),
            (Launch::Graph(graph), None) => launch(graph.raw() as Pointer),
            (Launch::Graph(graph), Some((make, destroy))) => {
                let mut executable = std::ptr::null_mut();
                let (to, graph, null) = (&raw mut executable, graph.raw() as Pointer, std::ptr::null_mut());
                // SAFETY: a live graph and a good out pointer; nobody asks what is wrong with it.
                let code = unsafe {
                    match make {
                        Make::Flags(make) => make(to, graph, 0),
                        Make::Log(make) => make(to, graph, null, null.cast(), 0),
                    }
                };
                succeeded("instantiating", code)?;
                let launched = launch(executable);
                // SAFETY: made above; platforms destroy an executable behind its last launch.
                let code = unsafe { destroy(executable) };
                launched.and(succeeded("destroying the executable", code))
            }
        }
    }

    fn thread_state(&self) -> Result<Vec<u64>, String> {
        let (mut current, mut mode) = (0, THREAD_LOCAL);
        // SAFETY: an out pointer with room for a pointer or an int. Where there is none, that is an answer too.
        let code = unsafe { (self.current)(&raw mut current) };
        // SAFETY: the mode comes back, and the one that was there before is put back below. Where there is no context, some refuse to say.
        let asked = unsafe { (self.exchange)(&raw mut mode) };
        let before = mode;
        if asked == 0 {
            // SAFETY: as above.
            succeeded("putting the capture mode back", unsafe { (self.exchange)(&raw mut mode) })?;
        }
        Ok(vec![code as u64, current, asked as u64, before as u64])
    }
}
