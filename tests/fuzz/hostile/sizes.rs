//! Sizes, counts and offsets from both ends of 64 bits, for every C function outside arenas and
//! spaces. Each call creates and destroys its objects.

#![allow(unsafe_op_in_unsafe_fn, reason = "each function is one sequence of C calls")]

use std::ffi::c_void;
use std::mem::{size_of, zeroed};
use std::ptr::{null, null_mut};

use vmmgraph::capi::*;

use super::{MEMORY, World, message};
use crate::input::Input;

const MOST: u64 = 1 << 46;

/// Returns a number of any magnitude, often near an overflow or a limit.
pub(crate) fn any(input: &mut Input) -> u64 {
    match input.below(8) {
        0 => input.pick(&[0, MOST, MOST + 1, 1 << 63, u64::MAX, 5 << 20, 1 << 30]),
        1 => input.number(),
        2 => u64::MAX - u64::from(input.byte()),
        3 => (1 << input.below(64)) - 1 + input.below(3) as u64,
        4 => input.below(8) as u64,
        _ => input.pick(&[1, 511, 512, 700, 4096, 5000, 16384, 20_000, 70_000]),
    }
}

macro_rules! sized {
    ($name:ident) => {{
        let mut made: $name = zeroed();
        made.struct_size = size_of::<$name>();
        made
    }};
}

fn judge(status: i32) -> bool {
    let internal = [VMMGRAPH_ERROR_INTERNAL, VMMGRAPH_ERROR_CLOSED];
    assert!(!internal.contains(&status), "{}", message());
    assert!(status == VMMGRAPH_OK || message().len() > 8);
    status == VMMGRAPH_OK
}

unsafe extern "C" fn evictable(block: u64, _: *mut c_void) -> i32 {
    i32::from(!block.is_multiple_of(3))
}

unsafe extern "C" fn evict(ask: *const vmmgraph_ask_t, _: *mut c_void) {
    assert!(unsafe { (*ask).there } <= MOST);
}

unsafe fn host(input: &mut Input, device: vmmgraph_device_t) {
    let held = || {
        let mut stats = unsafe { sized!(vmmgraph_host_stats_t) };
        assert!(judge(unsafe { vmmgraph_device_host_stats(device, &raw mut stats) }));
        stats.held_bytes
    };
    // A budget, since sizes up to the machine's memory are granted.
    let budget = 4 << 20;
    judge(vmmgraph_device_set_host_budget(device, budget));
    let (before, bytes) = (held(), any(input));
    let prepared = judge(vmmgraph_device_prepare_backup(device, bytes));
    assert_eq!(prepared, bytes <= budget, "{bytes}");
    assert!(if prepared { held() >= bytes } else { held() == before });
    let (mut buffer, mut byte) = (null_mut(), 0_u8);
    if judge(vmmgraph_host_buffer_create(device, any(input), VMMGRAPH_PINNING_PREFERRED, &raw mut buffer)) {
        judge(vmmgraph_host_buffer_write(buffer, any(input), (&raw const byte).cast(), 1));
        judge(vmmgraph_host_buffer_read(buffer, any(input), (&raw mut byte).cast(), 1));
        judge(vmmgraph_host_buffer_destroy(buffer));
    }
    judge(vmmgraph_device_set_host_budget(device, any(input)));
    judge(vmmgraph_device_trim_host(device, null_mut()));
    judge(vmmgraph_device_set_host_budget(device, budget));
}

unsafe fn region(input: &mut Input, device: vmmgraph_device_t) {
    let mut options = sized!(vmmgraph_region_options_t);
    (options.budget_bytes, options.page_bytes) =
        (any(input), if input.below(2) == 0 { 0 } else { any(input) });
    let (mut region, mut block, mut byte) = (null_mut(), null_mut(), 0_u8);
    if judge(vmmgraph_region_create(device, c"sizes".as_ptr(), &raw const options, &raw mut region)) {
        judge(vmmgraph_region_set_budget(region, any(input)));
        let bytes = any(input);
        if judge(vmmgraph_region_allocate(region, bytes, VMMGRAPH_POLICY_BACKUP, null_mut(), &raw mut block))
        {
            assert!(bytes <= MEMORY);
            judge(vmmgraph_region_pause(region, null(), null_mut()));
            judge(vmmgraph_region_get_backup(region, block, any(input), (&raw mut byte).cast(), 1));
            judge(vmmgraph_region_resume(region, input.byte().into(), null_mut()));
        }
        judge(vmmgraph_region_destroy(region));
    }
}

unsafe fn elastic(input: &mut Input, device: vmmgraph_device_t) {
    let mut options = sized!(vmmgraph_elastic_options_t);
    options.page_bytes = input.pick(&[0, 0, 4096, 16384]);
    if input.below(4) == 0 {
        (options.page_bytes, options.budget_bytes, options.least_bytes) =
            (any(input), any(input), any(input));
    }
    let mut buffer = null_mut();
    if judge(vmmgraph_elastic_buffer_create(device, any(input), &raw const options, &raw mut buffer)) {
        for _ in 0..3 {
            judge(vmmgraph_elastic_buffer_commit(buffer, any(input), any(input), null_mut()));
            judge(vmmgraph_elastic_buffer_decommit(buffer, any(input), any(input), null(), null_mut()));
            judge(vmmgraph_elastic_buffer_set_budget(buffer, any(input)));
        }
        judge(vmmgraph_elastic_buffer_destroy(buffer));
    }
    let planes = [any(input), any(input)];
    let mut cache_options = sized!(vmmgraph_kv_options_t);
    (cache_options.planes, cache_options.plane_count) = (planes.as_ptr(), 1 + input.below(2));
    (cache_options.blocks_most, cache_options.memory) = (any(input), &raw const options);
    cache_options.layout = input.below(2) as i32;
    let mut cache = null_mut();
    if judge(vmmgraph_kv_cache_create(device, &raw const cache_options, &raw mut cache)) {
        for _ in 0..3 {
            judge(vmmgraph_kv_cache_grow_to(cache, any(input), null_mut()));
            judge(vmmgraph_kv_cache_commit(cache, any(input), any(input), null_mut()));
            judge(vmmgraph_kv_cache_release(cache, any(input), any(input), null()));
            let busy = [vmmgraph_block_range_t { first: any(input), end: any(input) }];
            judge(vmmgraph_kv_cache_shrink_to(cache, any(input), busy.as_ptr(), 1, null(), null_mut()));
            judge(vmmgraph_kv_cache_set_limit(cache, any(input), any(input), null_mut()));
        }
        judge(vmmgraph_kv_cache_destroy(cache));
    }
}

unsafe fn block_pool(input: &mut Input) {
    let (mut blocks, mut a_page) = (any(input), any(input));
    if (1 << 18..=1 << 32).contains(&blocks) {
        // Pages cost host memory and time.
        blocks %= 1 << 18;
        a_page = a_page.max(1);
    }
    let (mut pool, mut there, mut count) = (null_mut(), 0, 0);
    if !judge(vmmgraph_block_pool_create(blocks, a_page, any(input), &raw mut pool)) {
        return;
    }
    judge(vmmgraph_block_pool_back(pool, 0, blocks));
    for _ in 0..3 {
        judge(vmmgraph_block_pool_back(pool, any(input), any(input)));
        judge(vmmgraph_block_pool_reserve(pool, any(input), &raw mut there));
        judge(vmmgraph_block_pool_unreserve(pool, any(input)));
        judge(vmmgraph_block_pool_used(pool, any(input), any(input), null_mut(), 0, &raw mut count));
        judge(vmmgraph_block_pool_surplus(pool, any(input), null_mut(), 0, &raw mut count));
        let ask = vmmgraph_block_pool_ask;
        judge(ask(pool, any(input), any(input), Some(evictable), Some(evict), null_mut(), null_mut()));
        let mut stats = sized!(vmmgraph_block_pool_stats_t);
        judge(vmmgraph_block_pool_stats(pool, &raw mut stats));
        assert!(stats.empty_bytes <= MOST && stats.available <= blocks, "{stats:?}");
        judge(vmmgraph_block_pool_unback(pool, any(input), any(input), null_mut()));
    }
    judge(vmmgraph_block_pool_destroy(pool));
}

unsafe fn rings(input: &mut Input, device: vmmgraph_device_t) {
    let units: [vmmgraph_ring_unit_t; 6] = std::array::from_fn(|_| vmmgraph_ring_unit_t {
        bytes: if input.below(3) == 0 { any(input) } else { 5000 },
        resident: i32::from(input.below(5) == 0),
        reserved: 0,
    });
    let (slots, remainder) = (any(input) as usize, input.below(2) as i32);
    let mut demand = sized!(vmmgraph_ring_demand_t);
    (demand.units, demand.unit_count, demand.slots, demand.remainder) = (units.as_ptr(), 6, slots, remainder);
    (demand.page_bytes, demand.budget_bytes, demand.tokens) = (any(input), any(input), any(input));
    (demand.link_gib_per_second, demand.compute_seconds) = (20.0, 0.01);
    judge(vmmgraph_ring_ceiling_text(&raw const demand, null_mut(), 0, null_mut()));
    let mut options = sized!(vmmgraph_ring_options_t);
    (options.slots, options.remainder, options.tokens) = (slots, remainder, any(input));
    (options.page_bytes, options.budget_bytes) = (input.pick(&[0, 0, 4096, u64::MAX]), any(input));
    let mut ring = null_mut();
    if judge(vmmgraph_ring_create(device, units.as_ptr(), 6, &raw const options, &raw mut ring)) {
        let (unit, mut address) = (any(input) as usize, null_mut());
        judge(vmmgraph_ring_address(ring, unit, &raw mut address));
        judge(vmmgraph_ring_destroy(ring));
    }
}

unsafe fn accounts(input: &mut Input, device: vmmgraph_device_t) {
    let mut options = sized!(vmmgraph_account_options_t);
    (options.budget_bytes, options.least_bytes) = (any(input), any(input));
    let mut account = null_mut();
    if judge(vmmgraph_account_create(device, c"sizes".as_ptr(), &raw const options, &raw mut account)) {
        judge(vmmgraph_account_set_limits(account, any(input), any(input)));
        judge(vmmgraph_account_destroy(account));
    }
    let mut options = sized!(vmmgraph_arena_options_t);
    (options.small_page_bytes, options.large_page_bytes) = (4096, 16384);
    (options.reserve_bytes, options.expected_bytes, options.least_bytes) =
        (any(input), any(input), any(input));
    let (mut arena, mut block, mut count) = (null_mut(), null_mut(), 0);
    if judge(vmmgraph_arena_create(device, &raw const options, &raw mut arena)) {
        let granularity = input.pick(&[0, 4096, 1 << 46, u64::MAX]);
        if judge(vmmgraph_arena_allocate_exclusive(arena, any(input), granularity, &raw mut block)) {
            judge(vmmgraph_arena_export(arena, block, any(input), null_mut(), 0, &raw mut count));
            judge(vmmgraph_arena_free_exclusive(arena, block));
        }
        judge(vmmgraph_arena_set_recall(arena, any(input)));
        judge(vmmgraph_arena_recall(arena, null_mut(), any(input)));
        judge(vmmgraph_arena_destroy(arena));
    }
}

unsafe fn policies(input: &mut Input) {
    let (mut grants, mut there, mut number) = (null_mut(), 0, 0);
    judge(vmmgraph_grants_create(any(input), any(input), &raw mut grants));
    for who in 0..4 {
        judge(vmmgraph_grants_ask(grants, who, any(input), any(input), &raw mut there));
        judge(vmmgraph_grants_extend(grants, any(input), &raw mut there));
        judge(vmmgraph_grants_give(grants, any(input), any(input)));
        judge(vmmgraph_grants_set_pages(grants, any(input)));
    }
    judge(vmmgraph_grants_destroy(grants));
    let mut host_kv = null_mut();
    if judge(vmmgraph_host_kv_create(any(input), &raw mut host_kv)) {
        for sequence in 0..4 {
            judge(vmmgraph_host_kv_put(host_kv, sequence, any(input), &raw mut there));
            judge(vmmgraph_host_kv_rescue(host_kv, sequence + 9, any(input), &raw mut there));
            judge(vmmgraph_host_kv_set_logical(host_kv, any(input)));
            judge(vmmgraph_host_kv_take(host_kv, sequence, &raw mut number));
        }
        judge(vmmgraph_host_kv_destroy(host_kv));
    }
    let mut ahead = null_mut();
    let create = vmmgraph_pre_commit_create;
    if judge(create(any(input), any(input), any(input), any(input), &raw mut ahead)) {
        for _ in 0..3 {
            let (step, free, coming, granted) = (any(input), any(input), any(input), any(input));
            let act = vmmgraph_pre_commit_step;
            judge(act(ahead, step, free, coming, granted, &raw mut there, &raw mut number));
        }
        judge(vmmgraph_pre_commit_destroy(ahead));
    }
    let (mut lengths, mut standing) = (null_mut(), null_mut());
    if judge(vmmgraph_lengths_create(any(input) as usize, any(input), any(input), &raw mut lengths)) {
        judge(vmmgraph_lengths_ended(lengths, any(input)));
        judge(vmmgraph_lengths_total(lengths, any(input), &raw mut number));
        judge(vmmgraph_lengths_destroy(lengths));
    }
    if judge(vmmgraph_standing_create(any(input), any(input), &raw mut standing)) {
        judge(vmmgraph_standing_used(standing, any(input), any(input)));
        judge(vmmgraph_standing_at(standing, any(input), any(input), &raw mut number, null_mut()));
        judge(vmmgraph_standing_destroy(standing));
    }
    let growing = [(); 3].map(|()| vmmgraph_growing_t { tokens: any(input), left: any(input) });
    judge(vmmgraph_admission_peak(any(input), growing.as_ptr(), 3, &raw mut number));
    let due = [(); 3].map(|()| vmmgraph_due_t { by: any(input), takes: any(input), patience: any(input) });
    let (mut order, mut timely) = ([0; 3], 0);
    judge(vmmgraph_in_turn(any(input), due.as_ptr(), 3, order.as_mut_ptr(), &raw mut timely));
    let prompt =
        vmmgraph_prompt_t { since: any(input), by: any(input), takes: any(input), patience: any(input) };
    judge(vmmgraph_prompt_to_host(any(input), &raw const prompt, &raw mut there));
    let decoding = vmmgraph_decoding_t { since: any(input), tokens: any(input), each: any(input) };
    let waits = vmmgraph_prefill_waits;
    judge(waits(any(input), any(input), &raw const prompt, 1, &raw const decoding, 1, &raw mut there));
}

unsafe fn plans(input: &mut Input) {
    let mut keys: [vmmgraph_key_t; 3] = zeroed();
    for key in &mut keys {
        key.extents[0] = any(input) as u32;
    }
    let steps = [any(input), any(input), any(input)];
    let mut options = sized!(vmmgraph_plan_options_t);
    (options.most_graphs, options.weights[0]) = (input.byte().into(), any(input) as u16);
    (options.most_graph_bytes, options.graph_bytes) = (any(input), any(input));
    (options.most_pool_bytes, options.pool_base_bytes) = (any(input), any(input));
    (options.pool_unit_bytes, options.eager_step) = (any(input), any(input));
    let mut result = sized!(vmmgraph_plan_result_t);
    result.waste.struct_size = size_of::<vmmgraph_waste_t>();
    let plan = vmmgraph_plan;
    judge(plan(keys.as_ptr(), steps.as_ptr(), 3, &raw const options, null_mut(), 0, &raw mut result));
    let mut count = 0;
    judge(vmmgraph_sizes(input.below(3) as i32, any(input) as u32, null_mut(), 0, &raw mut count));
    let mut inputs: [vmmgraph_input_t; 2] = zeroed();
    for (given, name) in inputs.iter_mut().zip([c"a", c"b"]) {
        (given.struct_size, given.name) = (size_of::<vmmgraph_input_t>(), name.as_ptr());
        (given.dtype, given.rank) = (VMMGRAPH_DTYPE_F64, 1 + input.below(4) as i32);
        for extent in &mut given.shape {
            (extent.kind, extent.times, extent.plus) =
                (input.below(3) as i32, any(input) as u32, any(input) as u32);
        }
    }
    let (mut made, alignment) = (null_mut(), input.pick(&[0, 256, 1, 1 << 63, u64::MAX]));
    if judge(vmmgraph_input_plan_create(inputs.as_ptr(), 2, keys.as_ptr(), 3, alignment, &raw mut made)) {
        let mut info = sized!(vmmgraph_input_plan_info_t);
        judge(vmmgraph_input_plan_info(made, &raw mut info));
        assert!(info.arena_bytes <= MOST);
        judge(vmmgraph_input_plan_destroy(made));
    }
}

impl World {
    pub(crate) fn sizes_call(&mut self, input: &mut Input) {
        let device = self.watch;
        match input.below(9) {
            0 => unsafe { host(input, device) },
            1 => unsafe { region(input, device) },
            2 | 3 => unsafe { elastic(input, device) },
            4 => unsafe { block_pool(input) },
            5 => unsafe { rings(input, device) },
            6 => unsafe { accounts(input, device) },
            7 => unsafe { policies(input) },
            _ => unsafe { plans(input) },
        }
        // Free pages of regions and elastic memory stay with the device until a trim.
        judge(unsafe { vmmgraph_device_trim(device, null_mut()) });
    }
}
