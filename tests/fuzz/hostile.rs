//! Any sequence of C calls with any arguments returns known statuses, names the refused argument,
//! leaves outputs untouched, and leaks nothing. Output pointers are null or valid.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "passing bad arguments is what is tested; each call's contract allows them"
)]

mod sizes;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_void};
use std::mem::{size_of, zeroed};
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::input::Input;
use crate::platforms;
use vmmgraph::capi::*;
use vmmgraph_testkit::alone;

const ORDINAL: i32 = 1;
const MEMORY: u64 = 4 << 20;
const CANARY: u64 = 0xdead_beef;

static STATUSES: Mutex<BTreeMap<i32, u64>> = Mutex::new(BTreeMap::new());
static SETS: AtomicU32 = AtomicU32::new(0);
static DROPS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn nothing(_: *mut c_void) {}

unsafe extern "C" fn sink(_: i32, text: *const c_char, length: usize, _: *mut c_void) {
    assert!(!text.is_null() && length > 0);
}

unsafe extern "C" fn dropped(_: *mut c_void) {
    DROPS.fetch_add(1, Relaxed);
}

unsafe extern "C" fn again(space: *mut c_void) {
    let space = space.cast();
    let status = unsafe { vmmgraph_space_replay(space, null_mut(), Some(nothing), null_mut()) };
    if status != VMMGRAPH_ERROR_WRONG_STATE {
        std::process::abort();
    }
}

fn message() -> String {
    let mut text = [0 as c_char; 512];
    let status = unsafe { vmmgraph_last_error_message(text.as_mut_ptr(), text.len(), null_mut()) };
    assert_eq!(status, VMMGRAPH_OK);
    unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap().to_owned()
}

struct World {
    options: vmmgraph_device_options_t,
    watch: vmmgraph_device_t,
    handles: Vec<u64>,
    devices: BTreeSet<u64>,
    arenas: BTreeSet<u64>,
    spaces: BTreeSet<u64>,
    blocks: Vec<u64>,
}

#[repr(C)]
struct Longer {
    options: vmmgraph_arena_options_t,
    behind: [u8; 4096],
}

/// On the host any number is a stream; elsewhere streams must be valid.
fn stream(number: u64) -> *mut c_void {
    let of_device = platforms::streams(ORDINAL);
    (if platforms::platform().name == "host" { number } else { of_device[number as usize % 3] })
        as *mut c_void
}

impl World {
    fn new() -> Self {
        let mut options: vmmgraph_device_options_t = unsafe { zeroed() };
        options.struct_size = size_of::<vmmgraph_device_options_t>();
        (options.driver, options.device) = (platforms::platform().number, ORDINAL);
        if options.driver == VMMGRAPH_DRIVER_HOST {
            (options.host_granularity_bytes, options.host_memory_bytes) = (4096, MEMORY);
        }
        let mut watch = null_mut();
        assert_eq!(unsafe { vmmgraph_device_open(&raw const options, &raw mut watch) }, VMMGRAPH_OK);
        let sets = || BTreeSet::new();
        Self {
            options,
            watch,
            handles: Vec::new(),
            devices: sets(),
            arenas: sets(),
            spaces: sets(),
            blocks: Vec::new(),
        }
    }

    fn handle(&self, input: &mut Input, living: &BTreeSet<u64>) -> u64 {
        let handle = match input.below(24) {
            0 => input.pick(&[0, 1, 2, 1 << 32, u64::MAX, (&raw const *self) as u64]),
            1 if !self.handles.is_empty() => input.pick(&self.handles),
            2 if !self.handles.is_empty() => input.pick(&self.handles) ^ 1 << input.below(64),
            3 => input.number(),
            _ => living.iter().copied().nth(input.below(living.len())).unwrap_or(0),
        };
        // A flipped bit may give the handle of `watch`, which must stay untouched.
        if handle == self.watch as u64 { 0 } else { handle }
    }

    fn pointer(&self, input: &mut Input) -> *mut c_void {
        let block = if self.blocks.is_empty() { 0 } else { input.pick(&self.blocks) };
        (match input.below(12) {
            0 => input.pick(&[0, 1, 4096, u64::MAX, (&raw const *self) as u64]),
            1 => block.wrapping_add(input.pick(&[1, 511, 512, 4096, 1 << 40])),
            2 => input.number(),
            _ => block,
        }) as *mut c_void
    }

    fn size(&self, input: &mut Input) -> u64 {
        sizes::any(input)
    }

    fn judge(&self, status: i32, handle: Option<(u64, bool)>, named: &[String]) {
        let name = unsafe { CStr::from_ptr(vmmgraph_status_name(status)) }.to_str().unwrap();
        assert_ne!(name, "unknown status", "{status}");
        *STATUSES.lock().unwrap().entry(status).or_default() += 1;
        if let Some((handle, living)) = handle {
            assert_eq!(status == VMMGRAPH_ERROR_INVALID_HANDLE, !living, "{name} for handle {handle:#x}");
        }
        if status == VMMGRAPH_OK {
            return;
        }
        let text = message();
        let mut info: vmmgraph_error_info_t = unsafe { zeroed() };
        info.struct_size = size_of::<vmmgraph_error_info_t>();
        assert_eq!(unsafe { vmmgraph_last_error(&raw mut info) }, VMMGRAPH_OK);
        assert_eq!(info.status, status, "{text}");
        let names = |value: &str| assert!(text.contains(value), "{name}: no {value} in: {text}");
        match status {
            VMMGRAPH_ERROR_INVALID_HANDLE => names(&handle.map_or(0, |(handle, _)| handle).to_string()),
            VMMGRAPH_ERROR_FOREIGN_POINTER | VMMGRAPH_ERROR_DOUBLE_FREE => {
                names(&format!("{:#x}", info.requested))
            }
            VMMGRAPH_ERROR_INTERNAL | VMMGRAPH_ERROR_CLOSED => panic!("{text}"),
            VMMGRAPH_ERROR_OUT_OF_MEMORY | VMMGRAPH_ERROR_OVER_BUDGET => {
                names(&info.requested.to_string());
                assert!(info.requested > info.available, "{text}");
            }
            VMMGRAPH_ERROR_NULL_ARGUMENT => names(" is 0: must be a "),
            VMMGRAPH_ERROR_OUT_OF_ADDRESSES => names(&info.requested.to_string()),
            VMMGRAPH_ERROR_INVALID_SIZE
            | VMMGRAPH_ERROR_INVALID_ARGUMENT
            | VMMGRAPH_ERROR_INVALID_DEVICE
            | VMMGRAPH_ERROR_STRUCT_SIZE => {
                assert!(
                    named.iter().any(|value| text.contains(value.as_str())),
                    "none of {named:?} in: {text}"
                );
            }
            _ => assert!(text.len() > 8, "{name}: {text}"),
        }
    }

    fn make(
        &mut self,
        input: &mut Input,
        from: Option<(u64, bool)>,
        named: &[String],
        call: impl FnOnce(*mut u64) -> i32,
    ) -> Option<u64> {
        let mut made = CANARY;
        let null = input.below(8) == 7;
        let status = call(if null { null_mut() } else { &raw mut made });
        self.judge(status, from, named);
        assert_eq!(
            made == CANARY,
            status != VMMGRAPH_OK,
            "a failed call wrote its output, or a good one did not"
        );
        assert!(!null || status != VMMGRAPH_OK);
        (status == VMMGRAPH_OK).then(|| {
            self.handles.push(made);
            made
        })
    }

    /// Ensures a live device, arena and space, so that most calls get far.
    fn furnish(&mut self) {
        if self.devices.is_empty() {
            let mut device = 0u64;
            let status = unsafe { vmmgraph_device_open(&raw const self.options, (&raw mut device).cast()) };
            assert_eq!(status, VMMGRAPH_OK);
            self.devices.insert(device);
            self.handles.push(device);
        }
        if self.arenas.is_empty() {
            let mut arena = 0u64;
            let mut options: vmmgraph_arena_options_t = unsafe { zeroed() };
            options.struct_size = size_of::<vmmgraph_arena_options_t>();
            (options.small_page_bytes, options.large_page_bytes) = (16 << 10, 64 << 10);
            let device = self.devices.iter().next().copied().unwrap_or(0);
            let out = (&raw mut arena).cast();
            assert_eq!(unsafe { vmmgraph_arena_create(device as _, &raw const options, out) }, VMMGRAPH_OK);
            self.arenas.insert(arena);
            self.handles.push(arena);
        }
        if self.spaces.is_empty() {
            let mut space = 0u64;
            let arena = self.arenas.iter().next().copied().unwrap_or(0);
            assert_eq!(unsafe { vmmgraph_space_open(arena as _, (&raw mut space).cast()) }, VMMGRAPH_OK);
            self.spaces.insert(space);
            self.handles.push(space);
        }
    }

    fn device_call(&mut self, input: &mut Input) {
        let handle = self.handle(input, &self.devices);
        let living = Some((handle, self.devices.contains(&handle)));
        let device = handle as vmmgraph_device_t;
        match input.below(6) {
            0 | 1 => {
                let mut options = self.options;
                let mut named = Vec::new();
                if input.below(3) == 2 {
                    let ordinal = match input.number() as i32 {
                        0 if platforms::platform().name != "host" => ORDINAL,
                        ordinal => ordinal,
                    };
                    let size = input.pick(&[0, 1, 40, 1 << 40, options.struct_size, options.struct_size]);
                    let other = input.number() as i32;
                    let granularity = input.pick(&[4096, 1, 3000, 1 << 63]);
                    (options.device, options.struct_size, options.driver) = (ordinal, size, other % 100);
                    options.host_granularity_bytes = granularity;
                    if (1..50).contains(&options.driver) {
                        // Always this platform, independent of the machine.
                        options.driver = self.options.driver;
                    }
                    named = [i64::from(ordinal), size as i64, i64::from(options.driver)]
                        .map(|n| n.to_string())
                        .to_vec();
                    named.push(granularity.to_string());
                }
                let open = |out: *mut u64| unsafe { vmmgraph_device_open(&raw const options, out.cast()) };
                if let Some(device) = self.make(input, None, &named, open) {
                    self.devices.insert(device);
                }
            }
            2 => {
                self.judge(vmmgraph_device_close(device), living, &[]);
                self.devices.remove(&handle);
            }
            3 => {
                let mut stats: vmmgraph_device_stats_t = unsafe { zeroed() };
                stats.struct_size = input.pick(&[size_of::<vmmgraph_device_stats_t>(), 0, 7]);
                let named = [stats.struct_size.to_string()];
                let stats = if input.below(8) == 7 { null_mut() } else { &raw mut stats };
                self.judge(unsafe { vmmgraph_device_stats(device, stats) }, living, &named);
            }
            4 => {
                let mut info: vmmgraph_device_info_t = unsafe { zeroed() };
                info.struct_size = input.pick(&[size_of::<vmmgraph_device_info_t>(), 1]);
                let named = [info.struct_size.to_string()];
                self.judge(unsafe { vmmgraph_device_info(device, &raw mut info) }, living, &named);
            }
            _ => {
                let bytes = self.size(input);
                self.judge(vmmgraph_device_set_budget(device, bytes), living, &[]);
            }
        }
    }

    fn arena_call(&mut self, input: &mut Input) {
        let handle = self.handle(input, &self.arenas);
        let living = Some((handle, self.arenas.contains(&handle)));
        let arena = handle as vmmgraph_arena_t;
        let op = input.byte();
        match op % 11 {
            0 | 1 => {
                let device = self.handle(input, &self.devices);
                let living = Some((device, self.devices.contains(&device)));
                let mut options: vmmgraph_arena_options_t = unsafe { zeroed() };
                options.struct_size = size_of::<vmmgraph_arena_options_t>();
                let mut values = vec![0; 3];
                if op > 127 {
                    options.budget_bytes = self.size(input);
                }
                if input.below(2) == 1 {
                    values = vec![self.size(input), self.size(input), input.below(5) as u64];
                }
                (options.small_page_bytes, options.large_page_bytes) = (values[0], values[1]);
                options.retain = values[2] as i32;
                if input.below(8) == 7 {
                    options.struct_size = input.number() as usize;
                }
                values.push(options.struct_size as u64);
                let mut named: Vec<String> = values.iter().map(u64::to_string).collect();
                named.push("33554432".to_owned());
                named.push((32u64 << 20).max(values[0]).to_string());
                // Followed by bytes, as a struct of a later version may be.
                let options = Longer { options, behind: [0; 4096] };
                let options = if input.below(3) == 0 { null() } else { &raw const options.options };
                let create =
                    |out: *mut u64| unsafe { vmmgraph_arena_create(device as _, options, out.cast()) };
                if let Some(arena) = self.make(input, living, &named, create) {
                    self.arenas.insert(arena);
                }
            }
            2 => {
                self.judge(vmmgraph_arena_destroy(arena), living, &[]);
                self.arenas.remove(&handle);
            }
            3 if op > 127 => {
                self.judge(unsafe { vmmgraph_arena_shrink_to_fit(arena, null(), null_mut()) }, living, &[]);
            }
            3 => self.judge(unsafe { vmmgraph_arena_trim(arena, null_mut()) }, living, &[]),
            4 if op > 127 => {
                let bytes = self.size(input);
                self.judge(vmmgraph_arena_set_budget(arena, bytes), living, &[]);
            }
            4 => self.judge(vmmgraph_arena_mark(arena), living, &[]),
            5 => {
                let mut stats: vmmgraph_arena_stats_t = unsafe { zeroed() };
                stats.struct_size = input.pick(&[size_of::<vmmgraph_arena_stats_t>(), 0, usize::MAX]);
                let named = [stats.struct_size.to_string()];
                self.judge(unsafe { vmmgraph_arena_stats(arena, &raw mut stats) }, living, &named);
            }
            6 => {
                let mut text = [1 as c_char; 64];
                let capacity = input.below(64);
                let status =
                    unsafe { vmmgraph_arena_stats_json(arena, text.as_mut_ptr(), capacity, null_mut()) };
                self.judge(status, living, &[]);
                assert!(text[capacity..].iter().all(|c| *c == 1), "wrote behind the buffer's end");
            }
            7 => self.judge(vmmgraph_arena_switch_to_new_virtual_space(arena), living, &[]),
            8 => {
                let (bytes, stream) = (self.size(input), stream(input.number()));
                let mut block = CANARY;
                let out = if input.below(8) == 7 { null_mut() } else { (&raw mut block).cast() };
                let status = unsafe { vmmgraph_arena_allocate(arena, bytes, stream, out) };
                self.allocated(status, living, bytes, block);
            }
            9 => {
                let pointer = self.pointer(input);
                self.judge(vmmgraph_arena_deallocate(arena, pointer), living, &[]);
            }
            _ => {
                let device = input.pick(&[ORDINAL, 0, 7, -1]);
                let status = vmmgraph_torch_set_arena(device, arena);
                self.judge(status, living.filter(|(handle, _)| *handle != 0), &[device.to_string()]);
            }
        }
    }

    fn allocated(&mut self, status: i32, living: Option<(u64, bool)>, bytes: u64, block: u64) {
        self.judge(status, living, &[bytes.to_string()]);
        assert_eq!(block == CANARY, status != VMMGRAPH_OK);
        if status == VMMGRAPH_OK {
            assert!(bytes > 0 && bytes <= 4 << 20);
            for at in [block, block + bytes - 1] {
                unsafe { (at as *mut u8).write_volatile(1) };
            }
            self.blocks.push(block);
        }
    }

    fn space_call(&mut self, input: &mut Input) {
        let handle = self.handle(input, &self.spaces);
        let living = Some((handle, self.spaces.contains(&handle)));
        let space = handle as vmmgraph_space_t;
        match input.below(12) {
            0 | 1 => {
                let arena = self.handle(input, &self.arenas);
                let living = Some((arena, self.arenas.contains(&arena)));
                let open = |out: *mut u64| unsafe { vmmgraph_space_open(arena as _, out.cast()) };
                if let Some(space) = self.make(input, living, &[], open) {
                    self.spaces.insert(space);
                }
            }
            2 => {
                self.judge(vmmgraph_space_destroy(space), living, &[]);
                self.spaces.remove(&handle);
            }
            3..=5 => {
                let (bytes, stream) = (self.size(input), stream(input.below(3) as u64));
                let mut block = CANARY;
                let out = if input.below(8) == 7 { null_mut() } else { (&raw mut block).cast() };
                let status = unsafe { vmmgraph_space_allocate(space, bytes, stream, out) };
                self.allocated(status, living, bytes, block);
            }
            6 | 7 => {
                let pointer = self.pointer(input);
                self.judge(vmmgraph_space_free(space, pointer), living, &[]);
            }
            8 => {
                let (pointer, stream) = (self.pointer(input), stream(input.number()));
                self.judge(unsafe { vmmgraph_space_record_stream(space, pointer, stream) }, living, &[]);
            }
            9 => {
                let retain = input.pick(&[0, 0, 0, 1, 2, 3, -1, i32::MAX]);
                let mut report: vmmgraph_seal_report_t = unsafe { zeroed() };
                report.struct_size = input.pick(&[size_of::<vmmgraph_seal_report_t>(), 0]);
                let named = [retain.to_string(), report.struct_size.to_string()];
                let report = if input.below(2) == 0 { null_mut() } else { &raw mut report };
                self.judge(unsafe { vmmgraph_space_seal(space, retain, report) }, living, &named);
            }
            10 => {
                let (launch, stream) = (input.below(3), stream(input.below(3) as u64));
                let launch: vmmgraph_launch_fn = [None, Some(nothing as _), Some(again as _)][launch];
                self.judge(
                    unsafe { vmmgraph_space_replay(space, stream, launch, space.cast()) },
                    living,
                    &[],
                );
            }
            _ => {
                let (mut blocks, mut count) = ([CANARY; 4], 0);
                let (capacity, null) = (input.below(5), input.below(4));
                let out = if null == 3 { null_mut() } else { blocks.as_mut_ptr().cast() };
                let count_out = if null == 2 { null_mut() } else { &raw mut count };
                let status = unsafe { vmmgraph_space_live_blocks(space, out, capacity, count_out) };
                self.judge(status, living, &[]);
                assert!(blocks[capacity.min(count)..].iter().all(|block| *block == CANARY));
                let mut stats: vmmgraph_space_stats_t = unsafe { zeroed() };
                stats.struct_size = size_of::<vmmgraph_space_stats_t>();
                self.judge(unsafe { vmmgraph_space_stats(space, &raw mut stats) }, living, &[]);
            }
        }
    }

    fn other_call(&mut self, input: &mut Input) {
        match input.below(4) {
            0 => {
                let bytes = self.size(input) as isize;
                let device = input.pick(&[ORDINAL, ORDINAL, -1, 99, i32::MIN]);
                let block = vmmgraph_torch_alloc(bytes, device, stream(input.number()));
                if block.is_null() {
                    assert!(!message().is_empty());
                } else {
                    self.blocks.push(block as u64);
                }
            }
            1 => {
                let pointer = self.pointer(input);
                vmmgraph_torch_free(
                    pointer,
                    input.number() as isize,
                    input.pick(&[ORDINAL, -1, 3]),
                    null_mut(),
                );
            }
            2 => {
                let level = input.pick(&[VMMGRAPH_LOG_TRACE, VMMGRAPH_LOG_OFF, -5, i32::MAX]);
                let on = input.below(2) == 1;
                SETS.fetch_add(u32::from(on), Relaxed);
                let status = unsafe {
                    vmmgraph_set_log_sink(on.then_some(sink as _), null_mut(), Some(dropped), level)
                };
                assert_eq!(status, VMMGRAPH_OK);
            }
            _ => {
                let mut needed = 0;
                let text = unsafe { CStr::from_ptr(vmmgraph_status_name(input.number() as i32)) };
                assert!(!text.is_empty() && vmmgraph_abi_version() == VMMGRAPH_ABI_VERSION);
                assert_eq!(
                    unsafe { vmmgraph_last_error_message(null_mut(), 9, &raw mut needed) },
                    VMMGRAPH_OK
                );
                assert!(needed > 0);
                assert_eq!(unsafe { vmmgraph_last_error(null_mut()) }, VMMGRAPH_ERROR_NULL_ARGUMENT);
            }
        }
    }

    fn end(&self) {
        self.release();
        let mut left: vmmgraph_device_stats_t = unsafe { zeroed() };
        left.struct_size = size_of::<vmmgraph_device_stats_t>();
        // Pending destructions and copies on library streams end at a later trim.
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            assert_eq!(unsafe { vmmgraph_device_stats(self.watch, &raw mut left) }, VMMGRAPH_OK);
            if left.pending == 0 || Instant::now() > until {
                break;
            }
            assert_eq!(unsafe { vmmgraph_device_trim(self.watch, null_mut()) }, VMMGRAPH_OK);
        }
        assert_eq!((left.physical_bytes, left.pages, left.mappings, left.reservations), (0, 0, 0, 0));
        assert_eq!((left.reserved_bytes, left.pending), (0, 0));
        assert_eq!(SETS.load(Relaxed), DROPS.load(Relaxed), "sinks set and dropped");
    }

    fn release(&self) {
        for space in &self.spaces {
            vmmgraph_space_destroy(*space as _);
        }
        for arena in &self.arenas {
            vmmgraph_arena_destroy(*arena as _);
        }
        for device in &self.devices {
            vmmgraph_device_close(*device as _);
        }
        vmmgraph_torch_set_arena(ORDINAL, null_mut());
        unsafe { vmmgraph_set_log_sink(None, null_mut(), None, 0) };
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.release();
        vmmgraph_device_close(self.watch);
    }
}

fn calls(input: &mut Input) {
    let mut world = World::new();
    let mut turns = 0;
    while !input.is_empty() && turns < 300 {
        if turns % 4 == 0 {
            world.furnish();
        }
        match input.below(19) {
            0..=2 => world.device_call(input),
            3..=6 => world.arena_call(input),
            15 => world.other_call(input),
            16.. => world.sizes_call(input),
            _ => world.space_call(input),
        }
        turns += 1;
    }
    world.end();
}

#[test]
fn hostile_calls_are_refused_and_nothing_else_happens() {
    let _alone = alone();
    // The torch functions open devices: never a GPU here.
    // SAFETY: all readers in this process use the standard library, which locks the environment.
    unsafe { std::env::set_var("VMMGRAPH_DRIVER", platforms::platform().name) };
    platforms::beside_a_capture(|| crate::input::fuzz("hostile", calls));
    let met = STATUSES.lock().unwrap();
    println!("statuses met: {met:?}");
    let few = [
        VMMGRAPH_OK,
        VMMGRAPH_ERROR_NULL_ARGUMENT,
        VMMGRAPH_ERROR_INVALID_ARGUMENT,
        VMMGRAPH_ERROR_INVALID_SIZE,
        VMMGRAPH_ERROR_INVALID_HANDLE,
        VMMGRAPH_ERROR_FOREIGN_POINTER,
        VMMGRAPH_ERROR_DOUBLE_FREE,
        VMMGRAPH_ERROR_STRUCT_SIZE,
        VMMGRAPH_ERROR_WRONG_STATE,
        VMMGRAPH_ERROR_OUT_OF_MEMORY,
        VMMGRAPH_ERROR_OVER_BUDGET,
    ];
    assert!(few.iter().all(|status| met.contains_key(status)), "the calls do not get far");
    platforms::on_stand_ins(module_path!(), "hostile_calls_are_refused_and_nothing_else_happens", MEMORY);
}
