//! The C functions as called from C: every hostile argument returns a status and has no effect.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "passing bad arguments is what is tested; each call's contract allows them"
)]

use std::ffi::{CStr, c_char, c_void};
use std::mem::{size_of, zeroed};
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use vmmgraph::capi::*;

/// Invalid handles: null, small numbers, all ones, and an unrelated address.
fn garbage<T>() -> Vec<*mut T> {
    static SOMETHING_ELSE: u64 = 0;
    let real = (&raw const SOMETHING_ELSE).cast_mut();
    vec![null_mut(), 1 as *mut T, 2 as *mut T, (1u64 << 32) as *mut T, usize::MAX as *mut T, real.cast()]
}

fn device(ordinal: i32) -> vmmgraph_device_t {
    let mut options: vmmgraph_device_options_t = unsafe { zeroed() };
    options.struct_size = size_of::<vmmgraph_device_options_t>();
    options.driver = VMMGRAPH_DRIVER_HOST;
    options.device = ordinal;
    let mut device = null_mut();
    assert_eq!(unsafe { vmmgraph_device_open(&raw const options, &raw mut device) }, VMMGRAPH_OK);
    device
}

fn arena(device: vmmgraph_device_t) -> vmmgraph_arena_t {
    let mut arena = null_mut();
    assert_eq!(unsafe { vmmgraph_arena_create(device, null(), &raw mut arena) }, VMMGRAPH_OK);
    arena
}

fn space(arena: vmmgraph_arena_t) -> vmmgraph_space_t {
    let mut space = null_mut();
    assert_eq!(unsafe { vmmgraph_space_open(arena, &raw mut space) }, VMMGRAPH_OK);
    space
}

/// A cache with two planes of blocks of 1 MiB, 100 blocks at most, pages of 2 MiB.
fn kv_cache(device: vmmgraph_device_t) -> vmmgraph_kv_cache_t {
    let planes = [1u64 << 20; 2];
    let mut options: vmmgraph_kv_options_t = unsafe { zeroed() };
    options.struct_size = size_of::<vmmgraph_kv_options_t>();
    (options.planes, options.plane_count, options.blocks_most) = (planes.as_ptr(), 2, 100);
    let mut cache = null_mut();
    assert_eq!(unsafe { vmmgraph_kv_cache_create(device, &raw const options, &raw mut cache) }, VMMGRAPH_OK);
    cache
}

fn allocate(space: vmmgraph_space_t, bytes: u64) -> (i32, *mut c_void) {
    let mut block = null_mut();
    (unsafe { vmmgraph_space_allocate(space, bytes, null_mut(), &raw mut block) }, block)
}

fn message() -> String {
    let mut needed = 0;
    unsafe { vmmgraph_last_error_message(null_mut(), 0, &raw mut needed) };
    let mut text = vec![0u8; needed];
    unsafe { vmmgraph_last_error_message(text.as_mut_ptr().cast(), needed, null_mut()) };
    CStr::from_bytes_with_nul(&text).unwrap().to_str().unwrap().to_owned()
}

fn last() -> vmmgraph_error_info_t {
    let mut info: vmmgraph_error_info_t = unsafe { zeroed() };
    info.struct_size = size_of::<vmmgraph_error_info_t>();
    assert_eq!(unsafe { vmmgraph_last_error(&raw mut info) }, VMMGRAPH_OK);
    info
}

unsafe extern "C" fn count(user: *mut c_void) {
    unsafe { *user.cast::<u32>() += 1 };
}

#[test]
fn a_handle_that_is_none_is_refused_by_every_function() {
    let mut bytes = 0u64;
    for device in garbage::<vmmgraph_device>() {
        let mut info: vmmgraph_device_info_t = unsafe { zeroed() };
        let mut stats: vmmgraph_device_stats_t = unsafe { zeroed() };
        let mut arena = null_mut();
        for status in unsafe {
            [
                vmmgraph_device_close(device),
                vmmgraph_device_info(device, &raw mut info),
                vmmgraph_device_stats(device, &raw mut stats),
                vmmgraph_device_set_budget(device, 1),
                vmmgraph_arena_create(device, null(), &raw mut arena),
            ]
        } {
            assert_eq!(status, VMMGRAPH_ERROR_INVALID_HANDLE);
        }
        assert_eq!(last().requested, device as u64);
        assert!(arena.is_null());
    }
    for arena in garbage::<vmmgraph_arena>() {
        let mut stats: vmmgraph_arena_stats_t = unsafe { zeroed() };
        let (mut space, mut block) = (null_mut(), null_mut());
        for status in unsafe {
            [
                vmmgraph_arena_destroy(arena),
                vmmgraph_arena_trim(arena, &raw mut bytes),
                vmmgraph_arena_mark(arena),
                vmmgraph_arena_set_budget(arena, 1),
                vmmgraph_arena_stats(arena, &raw mut stats),
                vmmgraph_arena_stats_json(arena, null_mut(), 0, null_mut()),
                vmmgraph_arena_switch_to_new_virtual_space(arena),
                vmmgraph_arena_allocate(arena, 1, null_mut(), &raw mut block),
                vmmgraph_arena_deallocate(arena, null_mut()),
                vmmgraph_space_open(arena, &raw mut space),
                vmmgraph_space_open_bump(arena, &raw mut space),
            ]
        } {
            assert_eq!(status, VMMGRAPH_ERROR_INVALID_HANDLE);
        }
        if !arena.is_null() {
            assert_eq!(vmmgraph_torch_set_arena(0, arena), VMMGRAPH_ERROR_INVALID_HANDLE);
        }
    }
    for space in garbage::<vmmgraph_space>() {
        let mut stats: vmmgraph_space_stats_t = unsafe { zeroed() };
        let mut n = 0usize;
        for status in unsafe {
            [
                vmmgraph_space_destroy(space),
                allocate(space, 1).0,
                vmmgraph_space_free(space, null_mut()),
                vmmgraph_space_record_stream(space, null_mut(), null_mut()),
                vmmgraph_space_wait(space),
                vmmgraph_space_mark(space),
                vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, null_mut()),
                vmmgraph_space_replay(space, null_mut(), Some(count), null_mut()),
                vmmgraph_space_enter(space, null_mut()),
                vmmgraph_space_leave(space),
                vmmgraph_space_live_blocks(space, null_mut(), 0, &raw mut n),
                vmmgraph_space_blocks_json(space, null_mut(), 0, null_mut()),
                vmmgraph_space_stats(space, &raw mut stats),
            ]
        } {
            assert_eq!(status, VMMGRAPH_ERROR_INVALID_HANDLE);
        }
    }
}

#[test]
fn a_handle_of_another_kind_or_destroyed_is_refused() {
    let device = device(1);
    let arena = arena(device);
    let space = space(arena);
    assert_eq!(vmmgraph_arena_mark(device.cast()), VMMGRAPH_ERROR_INVALID_HANDLE);
    assert_eq!(vmmgraph_arena_mark(space.cast()), VMMGRAPH_ERROR_INVALID_HANDLE);
    assert_eq!(vmmgraph_space_destroy(arena.cast()), VMMGRAPH_ERROR_INVALID_HANDLE);
    assert_eq!(vmmgraph_device_close(arena.cast()), VMMGRAPH_ERROR_INVALID_HANDLE);

    assert_eq!(vmmgraph_device_close(device), VMMGRAPH_OK);
    assert_eq!(vmmgraph_arena_destroy(arena), VMMGRAPH_OK);
    let (status, block) = allocate(space, 3 << 20);
    assert_eq!(status, VMMGRAPH_OK);
    unsafe { block.cast::<u64>().write(1) };
    assert_eq!(vmmgraph_space_destroy(space), VMMGRAPH_OK);
    for status in [
        vmmgraph_device_close(device),
        vmmgraph_arena_destroy(arena),
        vmmgraph_space_destroy(space),
        vmmgraph_space_free(space, block),
        allocate(space, 1).0,
    ] {
        assert_eq!(status, VMMGRAPH_ERROR_INVALID_HANDLE);
    }
    assert!(message().ends_with("not a null, moved-from or destroyed one"), "{}", message());
}

#[test]
fn numbers_outside_their_domain_are_refused_with_the_limit() {
    let mut out = null_mut();
    let mut options: vmmgraph_device_options_t = unsafe { zeroed() };
    let open = |options: &vmmgraph_device_options_t, out: &mut vmmgraph_device_t| unsafe {
        vmmgraph_device_open(options, out)
    };
    for size in [
        0,
        1,
        8,
        size_of::<vmmgraph_device_options_t>() - 1,
        size_of::<vmmgraph_device_options_t>() + 1,
        4104,
        usize::MAX,
    ] {
        options.struct_size = size;
        assert_eq!(open(&options, &mut out), VMMGRAPH_ERROR_STRUCT_SIZE);
        assert_eq!(
            message(),
            format!(
                "struct_size is {size}: must be the sizeof of the struct: a multiple of 8 from 16 to 4096"
            )
        );
    }
    options.struct_size = size_of::<vmmgraph_device_options_t>();
    options.driver = VMMGRAPH_DRIVER_HOST;
    for ordinal in [-1, 99, i32::MIN, i32::MAX] {
        options.device = ordinal;
        assert_eq!(open(&options, &mut out), VMMGRAPH_ERROR_INVALID_DEVICE);
        assert_eq!(last().device, ordinal);
        assert!(vmmgraph_torch_alloc(512, ordinal, null_mut()).is_null());
    }
    options.device = 2;
    for driver in [-1, 99, i32::MAX] {
        options.driver = driver;
        assert_eq!(open(&options, &mut out), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    }
    options.driver = VMMGRAPH_DRIVER_HOST;
    for granularity in [1, 3 << 20, 1 << 63] {
        options.host_granularity_bytes = granularity;
        assert_eq!(open(&options, &mut out), VMMGRAPH_ERROR_INVALID_SIZE);
    }
    assert!(out.is_null(), "a failed call wrote its output");

    let device = device(3);
    let mut arena_options: vmmgraph_arena_options_t = unsafe { zeroed() };
    arena_options.struct_size = size_of::<vmmgraph_arena_options_t>();
    let mut made = null_mut();
    for (small, large, retain, expected) in [
        (1, 0, 0, VMMGRAPH_ERROR_INVALID_SIZE),
        (1 << 63, 0, 0, VMMGRAPH_ERROR_INVALID_SIZE),
        (0, u64::MAX, 0, VMMGRAPH_ERROR_INVALID_SIZE),
        (0, 0, 5, VMMGRAPH_ERROR_INVALID_ARGUMENT),
        (0, 0, -1, VMMGRAPH_ERROR_INVALID_ARGUMENT),
    ] {
        (arena_options.small_page_bytes, arena_options.large_page_bytes) = (small, large);
        arena_options.retain = retain;
        assert_eq!(
            unsafe { vmmgraph_arena_create(device, &raw const arena_options, &raw mut made) },
            expected
        );
    }
    arena_options.struct_size = 4;
    assert_eq!(
        unsafe { vmmgraph_arena_create(device, &raw const arena_options, &raw mut made) },
        VMMGRAPH_ERROR_STRUCT_SIZE
    );
    assert!(made.is_null());

    let arena = arena(device);
    let space = space(arena);
    for bytes in [0, 1 << 63, u64::MAX, (1 << 46) + 1] {
        assert_eq!(allocate(space, bytes), (VMMGRAPH_ERROR_INVALID_SIZE, null_mut()));
        assert_eq!((last().requested, last().available), (bytes, 1 << 46));
        assert!(message().contains(&bytes.to_string()), "{}", message());
    }
    for retain in [-1, 5, i32::MAX] {
        assert_eq!(
            unsafe { vmmgraph_space_seal(space, retain, null_mut()) },
            VMMGRAPH_ERROR_INVALID_ARGUMENT
        );
    }
    let mut report: vmmgraph_seal_report_t = unsafe { zeroed() };
    assert_eq!(unsafe { vmmgraph_space_seal(space, 0, &raw mut report) }, VMMGRAPH_ERROR_STRUCT_SIZE);
    assert_eq!(allocate(space, 1).0, VMMGRAPH_OK);
    vmmgraph_space_destroy(space);
    vmmgraph_arena_destroy(arena);
    vmmgraph_device_close(device);
}

/// Calls with structs of every valid size: writes end at the smaller of the caller's and the
/// library's size.
fn fills<T: Copy>(name: &str, call: impl Fn(*mut T) -> i32) {
    const CANARY: u64 = 0xc5c5_c5c5_c5c5_c5c5;
    let known = size_of::<T>() / 8;
    let filled = |words: usize| {
        let mut buffer = vec![CANARY; known + 4];
        buffer[0] = words as u64 * 8;
        buffer[1..3].fill(0);
        assert_eq!(call(buffer.as_mut_ptr().cast()), VMMGRAPH_OK, "{name} of {words} words");
        assert_eq!(buffer[0], words as u64 * 8, "{name}: struct_size changed");
        buffer
    };
    let all = filled(known);
    assert!(all[1..known].iter().all(|word| *word != CANARY), "{name}: not all was written");
    for words in 2..=known + 3 {
        let buffer = filled(words);
        let written = words.min(known);
        assert_eq!(buffer[1..written], all[1..written], "{name} of {words} words");
        assert!(buffer[written.max(3)..].iter().all(|word| *word == CANARY), "{name} of {words} words");
        assert!(written > 2 || buffer[2] == 0, "{name}: wrote behind the end");
    }
}

#[test]
fn structs_are_filled_as_far_as_they_go_and_the_library_knows() {
    let device = device(1);
    let arena = arena(device);
    assert_eq!(allocate(null_mut(), 1).0, VMMGRAPH_ERROR_INVALID_HANDLE);
    unsafe {
        fills::<vmmgraph_error_info_t>("error info", |out| vmmgraph_last_error(out));
        fills::<vmmgraph_device_info_t>("device info", |out| vmmgraph_device_info(device, out));
        fills::<vmmgraph_arena_stats_t>("arena stats", |out| vmmgraph_arena_stats(arena, out));
        let opened = space(arena);
        fills::<vmmgraph_space_stats_t>("space stats", |out| vmmgraph_space_stats(opened, out));
        vmmgraph_space_destroy(opened);
        fills::<vmmgraph_seal_report_t>("seal report", |out| {
            let space = space(arena);
            let sealed = vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, out);
            vmmgraph_space_destroy(space);
            if (*out.cast::<usize>()) >= std::mem::offset_of!(vmmgraph_seal_report_t, driver_ns) + 8 {
                (&raw mut (*out).driver_ns).write(0);
            }
            sealed
        });
        let (key, steps) = (vmmgraph_key_t { variant: 0, extents: [8, 0, 0, 0] }, 3);
        fills::<vmmgraph_plan_result_t>("plan result", |out| {
            vmmgraph_plan(&raw const key, &raw const steps, 1, null(), null_mut(), 0, out)
        });
        let weights = null();
        fills::<vmmgraph_waste_t>("waste", |out| {
            vmmgraph_plan_evaluate(&raw const key, 1, weights, &raw const key, &raw const steps, 1, out)
        });
        let mut dispatcher = null_mut();
        assert_eq!(vmmgraph_dispatcher_create(null(), &raw mut dispatcher), VMMGRAPH_OK);
        fills::<vmmgraph_dispatcher_stats_t>("dispatcher stats", |out| {
            vmmgraph_dispatcher_stats(dispatcher, out)
        });
        fills::<vmmgraph_decision_t>("decision", |out| {
            vmmgraph_dispatch(dispatcher, &raw const key, 0, 1, out)
        });
        vmmgraph_dispatcher_destroy(dispatcher);
        let (mut buffer, mut pool, cache) = (null_mut(), null_mut(), kv_cache(device));
        assert_eq!(vmmgraph_elastic_buffer_create(device, 64 << 20, null(), &raw mut buffer), VMMGRAPH_OK);
        assert_eq!(vmmgraph_block_pool_create(8, 2, 1, &raw mut pool), VMMGRAPH_OK);
        let commit = |out| {
            let done = vmmgraph_elastic_buffer_commit(buffer, 0, 1, out);
            vmmgraph_elastic_buffer_decommit(buffer, 0, 64 << 20, null(), null_mut());
            done
        };
        assert_eq!(commit(null_mut()), VMMGRAPH_OK);
        fills::<vmmgraph_committed_t>("committed", commit);
        fills::<vmmgraph_elastic_stats_t>("elastic stats", |out| vmmgraph_elastic_buffer_stats(buffer, out));
        fills::<vmmgraph_elastic_stats_t>("a cache's memory", |out| vmmgraph_kv_cache_memory(cache, out));
        fills::<vmmgraph_kv_stats_t>("kv stats", |out| vmmgraph_kv_cache_stats(cache, out));
        fills::<vmmgraph_kv_plane_t>("kv plane", |out| vmmgraph_kv_cache_plane(cache, 0, out));
        fills::<vmmgraph_block_pool_stats_t>("block pool stats", |out| vmmgraph_block_pool_stats(pool, out));
        vmmgraph_block_pool_destroy(pool);
        vmmgraph_kv_cache_destroy(cache);
        vmmgraph_elastic_buffer_destroy(buffer);
        let units = [vmmgraph_ring_unit_t { bytes: 1 << 20, resident: 0, reserved: 0 }; 6];
        let mut ring = null_mut();
        assert_eq!(vmmgraph_ring_create(device, units.as_ptr(), 6, null(), &raw mut ring), VMMGRAPH_OK);
        fills::<vmmgraph_ring_stats_t>("ring stats", |out| vmmgraph_ring_stats(ring, out));
        fills::<vmmgraph_ring_schedule_t>("places", |out| vmmgraph_ring_places(ring, null_mut(), 0, out));
        vmmgraph_ring_destroy(ring);
    }
    vmmgraph_arena_destroy(arena);
    vmmgraph_device_close(device);
}

/// Options of a newer caller: known words, then unknown ones.
#[repr(C)]
struct Grown<T> {
    known: T,
    behind: [u64; 4],
}

#[test]
fn options_may_be_shorter_or_have_fields_that_are_0() {
    let device = device(1);
    let mut grown: Grown<vmmgraph_arena_options_t> = unsafe { zeroed() };
    grown.behind = [u64::MAX; 4];
    grown.known.small_page_bytes = 4 << 20;
    grown.known.budget_bytes = 8 << 20;
    let create = |options: &Grown<vmmgraph_arena_options_t>| {
        let mut made = null_mut();
        let status = unsafe { vmmgraph_arena_create(device, (&raw const *options).cast(), &raw mut made) };
        let mut stats: vmmgraph_arena_stats_t = unsafe { zeroed() };
        stats.struct_size = size_of::<vmmgraph_arena_stats_t>();
        if status == VMMGRAPH_OK {
            assert_eq!(unsafe { vmmgraph_arena_stats(made, &raw mut stats) }, VMMGRAPH_OK);
            assert_eq!(vmmgraph_arena_destroy(made), VMMGRAPH_OK);
        }
        (status, stats.budget_bytes)
    };
    let known = size_of::<vmmgraph_arena_options_t>();
    grown.known.struct_size = known;
    assert_eq!(create(&grown), (VMMGRAPH_OK, 8 << 20));
    // An older caller: fields from the budget on are not read.
    let behind_budget = std::mem::offset_of!(vmmgraph_arena_options_t, reserve_bytes);
    grown.known.struct_size = behind_budget;
    assert_eq!(create(&grown), (VMMGRAPH_OK, 8 << 20));
    grown.known.struct_size = behind_budget - 8;
    assert_eq!(create(&grown), (VMMGRAPH_OK, 0));
    (grown.known.large_page_bytes, grown.known.retain, grown.known.flags) = (3, 77, -1);
    grown.known.struct_size = 16;
    assert_eq!(create(&grown), (VMMGRAPH_OK, 0));
    (grown.known.large_page_bytes, grown.known.retain, grown.known.flags) = (0, 0, 0);
    grown.known.struct_size = known + 24;
    grown.behind[..3].fill(0);
    assert_eq!(create(&grown), (VMMGRAPH_OK, 8 << 20));
    grown.behind[2] = 1 << 56;
    assert_eq!(create(&grown), (VMMGRAPH_ERROR_STRUCT_SIZE, 0));
    let expected = format!("unknown to this library, of {} bytes: must be between 1 and {known}", known + 24);
    assert!(message().ends_with(&expected), "{}", message());
    assert_eq!((last().requested, last().available), (known as u64 + 24, known as u64));
    vmmgraph_device_close(device);
}

#[test]
fn structs_of_an_array_are_as_far_apart_as_the_first_says() {
    fn declared() -> vmmgraph_input_t {
        let mut input: vmmgraph_input_t = unsafe { zeroed() };
        (input.name, input.dtype, input.rank) = (c"tokens".as_ptr(), VMMGRAPH_DTYPE_I32, 1);
        input.shape[0] = vmmgraph_extent_t { kind: VMMGRAPH_EXTENT_ALONG, axis: 0, times: 1, plus: 0 };
        input
    }
    let bucket = vmmgraph_key_t { variant: 0, extents: [4, 0, 0, 0] };
    let plan_of = |inputs: *const u64, count| {
        let mut plan = null_mut();
        let inputs = inputs.cast();
        (unsafe { vmmgraph_input_plan_create(inputs, count, &raw const bucket, 1, 0, &raw mut plan) }, plan)
    };
    fn array<T: Copy>(items: &[T], words: usize) -> Vec<u64> {
        let mut array = Vec::new();
        for item in items {
            let known =
                unsafe { std::slice::from_raw_parts((&raw const *item).cast::<u64>(), size_of::<T>() / 8) };
            let at = array.len();
            array.extend(known.iter().copied().chain([0; 4]).take(words));
            array[at] = words as u64 * 8;
        }
        array
    }
    let known = size_of::<vmmgraph_input_t>() / 8;
    let (mut first, mut second) = (declared(), declared());
    (first.name, second.shape[0].times) = (c"positions".as_ptr(), 3);
    for words in [7, known, known + 3] {
        let inputs = array(&[first, second], words);
        let (status, plan) = plan_of(inputs.as_ptr(), 2);
        assert_eq!(status, VMMGRAPH_OK, "{words}: {}", message());
        let mut view: vmmgraph_input_view_t = unsafe { zeroed() };
        view.struct_size = size_of::<vmmgraph_input_view_t>();
        assert_eq!(
            unsafe { vmmgraph_input_plan_view(plan, &raw const bucket, 1, &raw mut view) },
            VMMGRAPH_OK
        );
        assert_eq!((view.offset, view.bytes, view.rank), (512, 48, 1));

        let data = [[1i32, 2, 3, 4].as_slice(), &[5; 12]];
        let step: Vec<vmmgraph_step_input_t> = (0..2)
            .map(|input| {
                let mut step: vmmgraph_step_input_t = unsafe { zeroed() };
                (step.input, step.data, step.bytes) =
                    (input, data[input].as_ptr().cast(), data[input].len() * 4);
                (step.shape[0], step.rank, step.dtype) = (data[input].len() as u32, 1, VMMGRAPH_DTYPE_I32);
                step
            })
            .collect();
        let known = size_of::<vmmgraph_step_input_t>() / 8;
        let pack = |step: &[u64]| {
            let (mut staging, mut end) = (vec![0i32; 256], 0);
            let (to, bytes) = (staging.as_mut_ptr().cast(), staging.len() * 4);
            let step = step.as_ptr().cast();
            let bucket = &raw const bucket;
            let status = unsafe { vmmgraph_input_plan_pack(plan, bucket, step, 2, to, bytes, &raw mut end) };
            (status, staging[1], staging[128], end)
        };
        for words in [known, known + 1, known + 4] {
            assert_eq!(pack(&array(&step, words)), (VMMGRAPH_OK, 2, 5, 512 + 48), "{}", message());
        }
        assert_eq!(pack(&array(&step, known - 1)).0, VMMGRAPH_ERROR_INVALID_ARGUMENT);
        let mut mixed = array(&step, known);
        mixed[known] += 8;
        assert_eq!(pack(&mixed).0, VMMGRAPH_ERROR_STRUCT_SIZE);
        assert!(message().contains("the same for all"), "{}", message());
        assert_eq!(vmmgraph_input_plan_destroy(plan), VMMGRAPH_OK);
    }
    let mut inputs = array(&[first, second], known + 1);
    inputs[2 * known + 1] = 1;
    assert_eq!(plan_of(inputs.as_ptr(), 2).0, VMMGRAPH_ERROR_STRUCT_SIZE);
}

#[test]
fn null_pointers_are_refused() {
    let device = device(4);
    let arena = arena(device);
    let space = space(arena);
    for status in unsafe {
        [
            vmmgraph_device_open(null(), null_mut()),
            vmmgraph_device_info(device, null_mut()),
            vmmgraph_device_stats(device, null_mut()),
            vmmgraph_arena_create(device, null(), null_mut()),
            vmmgraph_arena_stats(arena, null_mut()),
            vmmgraph_arena_allocate(arena, 1, null_mut(), null_mut()),
            vmmgraph_space_open(arena, null_mut()),
            vmmgraph_space_open_bump(arena, null_mut()),
            vmmgraph_space_allocate(space, 1, null_mut(), null_mut()),
            vmmgraph_space_stats(space, null_mut()),
            vmmgraph_space_live_blocks(space, null_mut(), 1, null_mut()),
            vmmgraph_space_replay(space, null_mut(), None, null_mut()),
            vmmgraph_last_error(null_mut()),
        ]
    } {
        assert_eq!(status, VMMGRAPH_ERROR_NULL_ARGUMENT);
    }
    assert_eq!(unsafe { vmmgraph_space_open(arena, null_mut()) }, VMMGRAPH_ERROR_NULL_ARGUMENT);
    assert_eq!(message(), "space is 0: must be a pointer that is not null");
    for status in [
        vmmgraph_space_free(space, null_mut()),
        vmmgraph_space_free(space, 0x1000 as *mut c_void),
        unsafe { vmmgraph_space_record_stream(space, usize::MAX as *mut c_void, null_mut()) },
        vmmgraph_arena_deallocate(arena, (&raw const device).cast_mut().cast()),
    ] {
        assert_eq!(status, VMMGRAPH_ERROR_FOREIGN_POINTER);
    }
    assert_eq!(unsafe { vmmgraph_arena_trim(arena, null_mut()) }, VMMGRAPH_OK);
    assert_eq!(unsafe { vmmgraph_arena_stats_json(arena, null_mut(), 0, null_mut()) }, VMMGRAPH_OK);
    assert_eq!(unsafe { vmmgraph_last_error_message(null_mut(), 0, null_mut()) }, VMMGRAPH_OK);
    vmmgraph_torch_free(null_mut(), -1, -1, null_mut());
    vmmgraph_torch_free(0x1000 as *mut c_void, -1, 77, null_mut());
    assert_eq!(last().status, VMMGRAPH_ERROR_FOREIGN_POINTER);
    vmmgraph_space_destroy(space);
    vmmgraph_arena_destroy(arena);
    vmmgraph_device_close(device);
}

#[test]
fn a_life_cycle_with_its_numbers() {
    let device = device(5);
    let arena = arena(device);
    let space = space(arena);
    let (_, passing) = allocate(space, 40 << 20);
    let (_, kept) = allocate(space, 4000);
    assert_eq!(vmmgraph_space_free(space, passing), VMMGRAPH_OK);
    assert_eq!(vmmgraph_space_free(space, passing), VMMGRAPH_ERROR_DOUBLE_FREE);
    assert_eq!(last().requested, passing as u64);
    let mut report: vmmgraph_seal_report_t = unsafe { zeroed() };
    report.struct_size = size_of::<vmmgraph_seal_report_t>();
    assert_eq!(unsafe { vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, &raw mut report) }, VMMGRAPH_OK);
    assert_eq!((report.retained_blocks, report.retained_bytes), (1, 2 << 20));
    assert_eq!(report.peak_live_bytes, (40 << 20) + 4096);
    let (mut block, mut blocks) = (null_mut(), 0);
    assert_eq!(unsafe { vmmgraph_space_live_blocks(space, &raw mut block, 1, &raw mut blocks) }, VMMGRAPH_OK);
    assert_eq!((block, blocks), (kept, 1));
    let mut launched = 0u32;
    let user = (&raw mut launched).cast();
    assert_eq!(unsafe { vmmgraph_space_replay(space, null_mut(), Some(count), user) }, VMMGRAPH_OK);
    assert_eq!(launched, 1);
    assert_eq!(allocate(space, 1).0, VMMGRAPH_ERROR_WRONG_STATE);

    let mut stats: vmmgraph_arena_stats_t = unsafe { zeroed() };
    stats.struct_size = size_of::<vmmgraph_arena_stats_t>();
    assert_eq!(unsafe { vmmgraph_arena_stats(arena, &raw mut stats) }, VMMGRAPH_OK);
    assert_eq!((stats.physical_bytes, stats.retained_bytes, stats.spaces), (50 << 20, 2 << 20, 1));
    let mut needed = 0;
    unsafe { vmmgraph_arena_stats_json(arena, null_mut(), 0, &raw mut needed) };
    let mut text = vec![1 as c_char; needed];
    assert_eq!(
        unsafe { vmmgraph_arena_stats_json(arena, text.as_mut_ptr(), needed, null_mut()) },
        VMMGRAPH_OK
    );
    let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap();
    let json: serde_json::Value = serde_json::from_str(text).unwrap();
    assert_eq!(json["spaces"][0]["retained_bytes"], 2 << 20);
    assert_eq!(json["pool"]["physical_bytes"], 50 << 20);
    // The space copies the label.
    let mut label = b"decode 8\0".to_vec();
    let at = label.as_ptr().cast();
    assert_eq!(unsafe { vmmgraph_space_set_label(space, at) }, VMMGRAPH_OK);
    label.fill(b'X');
    let mut name = [1 as c_char; 16];
    assert_eq!(
        unsafe { vmmgraph_space_label(space, name.as_mut_ptr(), name.len(), &raw mut needed) },
        VMMGRAPH_OK
    );
    assert_eq!(unsafe { CStr::from_ptr(name.as_ptr()) }.to_str(), Ok("decode 8"));
    assert_eq!(needed, 9);
    assert_eq!(unsafe { vmmgraph_space_set_label(space, null_mut()) }, VMMGRAPH_ERROR_NULL_ARGUMENT);
    // It also copies the capture site, which the map shows.
    let mut site = b"model.cpp:120\0".to_vec();
    assert_eq!(unsafe { vmmgraph_space_set_site(space, site.as_ptr().cast()) }, VMMGRAPH_OK);
    site.fill(b'X');
    assert_eq!(unsafe { vmmgraph_space_set_site(space, null_mut()) }, VMMGRAPH_ERROR_NULL_ARGUMENT);
    unsafe { vmmgraph_arena_map_json(arena, null_mut(), null_mut(), 0, &raw mut needed) };
    let mut text = vec![1 as c_char; needed];
    unsafe { vmmgraph_arena_map_json(arena, null_mut(), text.as_mut_ptr(), needed, null_mut()) };
    let map = unsafe { CStr::from_ptr(text.as_ptr()) }.to_str().unwrap();
    let map: serde_json::Value = serde_json::from_str(map).unwrap();
    assert_eq!(map["spaces"][0]["site"], "model.cpp:120");
    let mut short = [1 as c_char; 8];
    unsafe { vmmgraph_arena_stats_json(arena, short.as_mut_ptr(), 8, null_mut()) };
    assert_eq!(short[7], 0);
    vmmgraph_space_destroy(space);
    vmmgraph_arena_destroy(arena);
    vmmgraph_device_close(device);
}

#[test]
fn a_cache_grows_and_shrinks_with_its_numbers() {
    let device = device(3);
    let cache = kv_cache(device);
    let stats = || {
        let mut stats: vmmgraph_kv_stats_t = unsafe { zeroed() };
        stats.struct_size = size_of::<vmmgraph_kv_stats_t>();
        assert_eq!(unsafe { vmmgraph_kv_cache_stats(cache, &raw mut stats) }, VMMGRAPH_OK);
        stats
    };
    let mut done: vmmgraph_committed_t = unsafe { zeroed() };
    done.struct_size = size_of::<vmmgraph_committed_t>();
    assert_eq!(unsafe { vmmgraph_kv_cache_grow_to(cache, 9, &raw mut done) }, VMMGRAPH_OK);
    assert_eq!((done.pages, done.bytes, done.created, done.revived), (10, 20 << 20, 10, 0));
    let mut pending = null_mut();
    assert_eq!(unsafe { vmmgraph_kv_cache_commit_async(cache, 20, 30, &raw mut pending) }, VMMGRAPH_OK);
    assert_eq!(unsafe { vmmgraph_pending_wait(pending, &raw mut done) }, VMMGRAPH_OK);
    assert_eq!((done.pages, vmmgraph_pending_destroy(pending)), (10, VMMGRAPH_OK));
    let now = stats();
    assert_eq!((now.planes, now.blocks, now.backed_blocks, now.blocks_a_page), (2, 30, 19, 2));

    let busy = [vmmgraph_block_range_t { first: 22, end: 23 }, vmmgraph_block_range_t { first: 0, end: 1 }];
    let mut left = 0;
    assert_eq!(
        unsafe { vmmgraph_kv_cache_shrink_to(cache, 5, busy.as_ptr(), 2, null(), &raw mut left) },
        VMMGRAPH_OK
    );
    let now = stats();
    assert_eq!((left, now.blocks, now.backed_blocks, now.beyond_blocks), (1, 5, 6, 1));
    let (mut ranges, mut count) = ([vmmgraph_block_range_t { first: 7, end: 7 }; 3], 0);
    assert_eq!(
        unsafe { vmmgraph_kv_cache_backed(cache, ranges.as_mut_ptr(), 1, &raw mut count) },
        VMMGRAPH_OK
    );
    assert_eq!((count, ranges[0].first, ranges[0].end, ranges[1].first), (2, 0, 5, 7));
    assert_eq!(unsafe { vmmgraph_kv_cache_release(cache, 22, 23, null()) }, VMMGRAPH_OK);

    let mut change = -1;
    for (blocks, revision, became) in [
        (40, 2, VMMGRAPH_LIMIT_APPLIED),
        (3, 1, VMMGRAPH_LIMIT_STALE),
        (3, 2, VMMGRAPH_LIMIT_CONFLICT),
        (3, 3, VMMGRAPH_LIMIT_DEFERRED),
    ] {
        let status = unsafe { vmmgraph_kv_cache_set_limit(cache, blocks, revision, &raw mut change) };
        assert_eq!((status, change), (VMMGRAPH_OK, became));
    }
    assert_eq!(
        unsafe { vmmgraph_kv_cache_grow_to(cache, 4, null_mut()) },
        VMMGRAPH_ERROR_OVER_BUDGET,
        "{}",
        message()
    );
    assert!(message().contains("block limit"), "{}", message());
    assert_eq!(unsafe { vmmgraph_kv_cache_grow_to(cache, 101, null_mut()) }, VMMGRAPH_ERROR_INVALID_ARGUMENT);
    assert!(message().contains("101"), "{}", message());
    assert_eq!(last().requested, 101);
    assert_eq!(vmmgraph_kv_cache_destroy(cache), VMMGRAPH_OK);
    assert_eq!(vmmgraph_kv_cache_destroy(cache), VMMGRAPH_ERROR_INVALID_HANDLE);
    vmmgraph_device_close(device);
}

#[test]
fn the_torch_functions_use_the_arena_that_was_set() {
    let device = device(6);
    let arena = arena(device);
    assert_eq!(vmmgraph_torch_set_arena(7, arena), VMMGRAPH_ERROR_INVALID_ARGUMENT);
    assert_eq!(vmmgraph_torch_set_arena(6, arena), VMMGRAPH_OK);
    let block = vmmgraph_torch_alloc(20 << 20, 6, null_mut());
    assert!(!block.is_null());
    let mut stats: vmmgraph_arena_stats_t = unsafe { zeroed() };
    stats.struct_size = size_of::<vmmgraph_arena_stats_t>();
    unsafe { vmmgraph_arena_stats(arena, &raw mut stats) };
    assert_eq!(stats.current_offset_bytes, 20 << 20);
    assert!(vmmgraph_torch_alloc(-1, 6, null_mut()).is_null());
    assert_eq!(last().status, VMMGRAPH_ERROR_INVALID_SIZE);
    assert_eq!(vmmgraph_arena_switch_to_new_virtual_space(arena), VMMGRAPH_OK);
    vmmgraph_torch_free(block, 20 << 20, 6, null_mut());
    unsafe { vmmgraph_arena_stats(arena, &raw mut stats) };
    assert_eq!(stats.live_bytes, 0);
    assert_eq!(vmmgraph_torch_set_arena(6, null_mut()), VMMGRAPH_OK);
    vmmgraph_arena_destroy(arena);
    vmmgraph_device_close(device);
}

#[test]
fn many_threads_calling_anything_at_all() {
    let device = device(7);
    let shared = Mutex::new((arena(device) as usize, Vec::<usize>::new()));
    std::thread::scope(|scope| {
        for thread in 0..16u64 {
            let shared = &shared;
            let device = device as usize;
            scope.spawn(move || {
                let device = device as vmmgraph_device_t;
                let mut seed = thread + 1;
                let mut next = || {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    seed
                };
                for _ in 0..400 {
                    let (arena_now, some) = {
                        let shared = shared.lock().unwrap();
                        let spaces = &shared.1;
                        let pick = next() as usize % (spaces.len() + 1);
                        (
                            shared.0 as vmmgraph_arena_t,
                            spaces.get(pick).map_or(null_mut(), |s| *s as vmmgraph_space_t),
                        )
                    };
                    let mut n = 0usize;
                    match next() % 11 {
                        0 => {
                            let mut new = null_mut();
                            if unsafe { vmmgraph_space_open(arena_now, &raw mut new) } == VMMGRAPH_OK {
                                shared.lock().unwrap().1.push(new as usize);
                            }
                        }
                        1 => drop(vmmgraph_space_destroy(some)),
                        2..=4 => {
                            let (status, block) = allocate(some, next() % (12 << 20));
                            if status == VMMGRAPH_OK && next() % 2 == 0 {
                                vmmgraph_space_free(some, block);
                            }
                        }
                        5 => drop(unsafe { vmmgraph_space_seal(some, (next() % 3) as i32, null_mut()) }),
                        6 => {
                            let mut launched = 0u32;
                            let user = (&raw mut launched).cast();
                            unsafe {
                                vmmgraph_space_replay(some, (next() % 3) as *mut c_void, Some(count), user)
                            };
                        }
                        7 => drop(unsafe { vmmgraph_arena_trim(arena_now, null_mut()) }),
                        8 => drop(unsafe { vmmgraph_arena_stats_json(arena_now, null_mut(), 0, &raw mut n) }),
                        9 => drop(vmmgraph_space_free(some, next() as *mut c_void)),
                        _ => {
                            if next() % 40 == 0 {
                                let mut shared = shared.lock().unwrap();
                                vmmgraph_arena_destroy(shared.0 as vmmgraph_arena_t);
                                shared.0 = arena(device) as usize;
                            }
                        }
                    }
                }
            });
        }
    });
    let (arena, spaces) = shared.into_inner().unwrap();
    for space in spaces {
        vmmgraph_space_destroy(space as vmmgraph_space_t);
    }
    vmmgraph_arena_destroy(arena as vmmgraph_arena_t);
    let mut stats: vmmgraph_device_stats_t = unsafe { zeroed() };
    stats.struct_size = size_of::<vmmgraph_device_stats_t>();
    assert_eq!(unsafe { vmmgraph_device_stats(device, &raw mut stats) }, VMMGRAPH_OK);
    assert_eq!((stats.physical_bytes, stats.mappings, stats.reservations, stats.pending), (0, 0, 0, 0));
    vmmgraph_device_close(device);
}

static LINES: Mutex<Vec<(i32, String)>> = Mutex::new(Vec::new());

unsafe extern "C" fn sink(level: i32, text: *const c_char, length: usize, user: *mut c_void) {
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    LINES.lock().unwrap().push((level, String::from_utf8(text.to_vec()).unwrap()));
    // Other tests log too, from their own threads.
    unsafe { &*user.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn log_lines_reach_the_sink_up_to_its_level_and_its_user_is_dropped_once() {
    static DROPPED: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn dropped(user: *mut c_void) {
        drop(unsafe { Box::from_raw(user.cast::<AtomicU32>()) });
        DROPPED.fetch_add(1, Ordering::SeqCst);
    }
    let user = || Box::into_raw(Box::new(AtomicU32::new(0))).cast::<c_void>();
    let set = |sink: vmmgraph_log_fn, user, level| unsafe {
        vmmgraph_set_log_sink(sink, user, Some(dropped), level)
    };
    assert_eq!(set(Some(sink), user(), VMMGRAPH_LOG_INFO), VMMGRAPH_OK);
    let device = device(0);
    let arena = arena(device);
    let created =
        |lines: &[(i32, String)]| lines.iter().filter(|(_, line)| line.contains("arena created")).count();
    assert!(created(&LINES.lock().unwrap()) > 0, "{:?}", LINES.lock().unwrap());
    assert!(LINES.lock().unwrap().iter().all(|(level, _)| *level <= VMMGRAPH_LOG_INFO));
    assert_eq!(set(None, null_mut(), VMMGRAPH_LOG_TRACE), VMMGRAPH_OK);
    // The last thread inside the sink drops the user data, possibly a different test's thread.
    let deadline = Instant::now() + Duration::from_secs(10);
    while DROPPED.load(Ordering::SeqCst) == 0 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(DROPPED.load(Ordering::SeqCst), 1);
    vmmgraph_arena_destroy(arena);
    vmmgraph_device_close(device);
}
