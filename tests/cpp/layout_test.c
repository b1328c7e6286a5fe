/* Frozen structs and numbers of ABI 1: a line changes only together with VMMGRAPH_ABI_VERSION,
 * except before the first release. The test abi.coverage requires every struct and number of
 * vmmgraph.h. */
#include <vmmgraph/vmmgraph.h>

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type)
#define FIELD(type, field, offset, bytes) \
    _Static_assert(offsetof(type, field) == (offset) && sizeof(((type*)0)->field) == (bytes), #type "." #field)
#define NUMBER(name, value) _Static_assert((name) == (value), #name)

_Static_assert(sizeof(void*) == 8, "64-bit platforms only");
NUMBER(VMMGRAPH_ABI_VERSION, 1);

NUMBER(VMMGRAPH_OK, 0);
NUMBER(VMMGRAPH_ERROR_NULL_ARGUMENT, 1);
NUMBER(VMMGRAPH_ERROR_INVALID_ARGUMENT, 2);
NUMBER(VMMGRAPH_ERROR_INVALID_SIZE, 3);
NUMBER(VMMGRAPH_ERROR_INVALID_HANDLE, 4);
NUMBER(VMMGRAPH_ERROR_INVALID_DEVICE, 5);
NUMBER(VMMGRAPH_ERROR_FOREIGN_POINTER, 6);
NUMBER(VMMGRAPH_ERROR_DOUBLE_FREE, 7);
NUMBER(VMMGRAPH_ERROR_STRUCT_SIZE, 8);
NUMBER(VMMGRAPH_ERROR_ABI_MISMATCH, 9);
NUMBER(VMMGRAPH_ERROR_WRONG_STATE, 100);
NUMBER(VMMGRAPH_ERROR_CLOSED, 101);
NUMBER(VMMGRAPH_ERROR_DEVICE_IN_USE, 102);
NUMBER(VMMGRAPH_ERROR_STREAM_CAPTURING, 103);
NUMBER(VMMGRAPH_ERROR_OUT_OF_MEMORY, 200);
NUMBER(VMMGRAPH_ERROR_OVER_BUDGET, 201);
NUMBER(VMMGRAPH_ERROR_OUT_OF_ADDRESSES, 202);
NUMBER(VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS, 203);
NUMBER(VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY, 204);
NUMBER(VMMGRAPH_ERROR_DRIVER, 300);
NUMBER(VMMGRAPH_ERROR_DRIVER_MISSING, 301);
NUMBER(VMMGRAPH_ERROR_DRIVER_TOO_OLD, 302);
NUMBER(VMMGRAPH_ERROR_UNSUPPORTED, 303);
NUMBER(VMMGRAPH_ERROR_HOST_NOT_REGISTERED, 304);
NUMBER(VMMGRAPH_ERROR_INTERNAL, 900);
NUMBER(VMMGRAPH_DRIVER_AUTO, 0);
NUMBER(VMMGRAPH_DRIVER_CUDA, 1);
NUMBER(VMMGRAPH_DRIVER_HOST, 2);
NUMBER(VMMGRAPH_DRIVER_HIP, 3);
NUMBER(VMMGRAPH_DRIVER_ASCEND, 4);
NUMBER(VMMGRAPH_DRIVER_MLU, 5);
NUMBER(VMMGRAPH_SHARING_NONE, 0);
NUMBER(VMMGRAPH_SHARING_FD, 1);
NUMBER(VMMGRAPH_SHARING_FABRIC, 2);
NUMBER(VMMGRAPH_ARENA_POISON, 1);
NUMBER(VMMGRAPH_ARENA_TRACE_BLOCKS, 2);
NUMBER(VMMGRAPH_ARENA_SERIAL, 4);
NUMBER(VMMGRAPH_RETAIN_DEFAULT, 0);
NUMBER(VMMGRAPH_RETAIN_OWN_PAGES, 1);
NUMBER(VMMGRAPH_RETAIN_SHARED_PAGES, 2);
NUMBER(VMMGRAPH_RETAIN_IN_PLACE, 3);
NUMBER(VMMGRAPH_RETAIN_SHARED_REMOTE, 4);
NUMBER(VMMGRAPH_SPACE_OPEN, 0);
NUMBER(VMMGRAPH_SPACE_SEALED, 1);
NUMBER(VMMGRAPH_SPACE_BROKEN, 2);
NUMBER(VMMGRAPH_SPACE_RETIRED, 3);
NUMBER(VMMGRAPH_LOG_OFF, 0);
NUMBER(VMMGRAPH_LOG_ERROR, 1);
NUMBER(VMMGRAPH_LOG_WARN, 2);
NUMBER(VMMGRAPH_LOG_INFO, 3);
NUMBER(VMMGRAPH_LOG_DEBUG, 4);
NUMBER(VMMGRAPH_LOG_TRACE, 5);
NUMBER(VMMGRAPH_MODE_DEFAULT, 0);
NUMBER(VMMGRAPH_MODE_EAGER, 1);
NUMBER(VMMGRAPH_MODE_PIECEWISE, 2);
NUMBER(VMMGRAPH_MODE_FULL, 3);
NUMBER(VMMGRAPH_PHASE_DECODE, 0);
NUMBER(VMMGRAPH_PHASE_PREFILL, 1);
NUMBER(VMMGRAPH_PHASE_MIXED, 2);
NUMBER(VMMGRAPH_POLICY_DEFAULT, 0);
NUMBER(VMMGRAPH_POLICY_DISCARD, 1);
NUMBER(VMMGRAPH_POLICY_ZERO, 2);
NUMBER(VMMGRAPH_POLICY_BACKUP, 3);
NUMBER(VMMGRAPH_POLICY_KEEP, 4);
NUMBER(VMMGRAPH_REGION_READ_ONLY, 1);
NUMBER(VMMGRAPH_REGION_VERIFY_CLEAN, 2);
NUMBER(VMMGRAPH_COPY_NONE, 0);
NUMBER(VMMGRAPH_COPY_REGISTERED, 1);
NUMBER(VMMGRAPH_COPY_RING, 2);
NUMBER(VMMGRAPH_COPY_PAGEABLE, 3);
NUMBER(VMMGRAPH_GRANT_GRANTED, 0);
NUMBER(VMMGRAPH_GRANT_NOT_NOW, 1);
NUMBER(VMMGRAPH_GRANT_NEVER, 2);
NUMBER(VMMGRAPH_SLO_KEEP, 0);
NUMBER(VMMGRAPH_SLO_RAISED, 1);
NUMBER(VMMGRAPH_SLO_LOWERED, 2);
NUMBER(VMMGRAPH_AHEAD_NOTHING, 0);
NUMBER(VMMGRAPH_AHEAD_COMMIT, 1);
NUMBER(VMMGRAPH_AHEAD_GIVE_BACK, 2);
NUMBER(VMMGRAPH_KV_BY_PLANE, 0);
NUMBER(VMMGRAPH_KV_BY_BLOCK, 1);
NUMBER(VMMGRAPH_LIMIT_APPLIED, 0);
NUMBER(VMMGRAPH_LIMIT_DEFERRED, 1);
NUMBER(VMMGRAPH_LIMIT_STALE, 2);
NUMBER(VMMGRAPH_LIMIT_CONFLICT, 3);
NUMBER(VMMGRAPH_LIMITED_BY_NOTHING, 0);
NUMBER(VMMGRAPH_LIMITED_BY_GRAPHS, 1);
NUMBER(VMMGRAPH_LIMITED_BY_STREAMS, 2);
NUMBER(VMMGRAPH_LIMITED_BY_GRAPH_BYTES, 3);
NUMBER(VMMGRAPH_REASON_HIT, 0);
NUMBER(VMMGRAPH_REASON_PADDED, 1);
NUMBER(VMMGRAPH_REASON_CAPTURED, 2);
NUMBER(VMMGRAPH_REASON_MODE_EAGER, 3);
NUMBER(VMMGRAPH_REASON_ABOVE_THRESHOLD, 4);
NUMBER(VMMGRAPH_REASON_TOO_LARGE, 5);
NUMBER(VMMGRAPH_REASON_NOT_CAPTURABLE, 6);
NUMBER(VMMGRAPH_REASON_NOT_CAPTURED, 7);
NUMBER(VMMGRAPH_REASON_BEING_CAPTURED, 8);
NUMBER(VMMGRAPH_REASON_BUDGET, 9);
NUMBER(VMMGRAPH_REASON_CAPTURE_FAILED, 10);
NUMBER(VMMGRAPH_REASON_STAND_IN, 11);
NUMBER(VMMGRAPH_GRAPH_BEGIN, 0);
NUMBER(VMMGRAPH_GRAPH_CAPTURED, 1);
NUMBER(VMMGRAPH_GRAPH_FAILED, 2);
NUMBER(VMMGRAPH_GRAPH_EVICTED, 3);
NUMBER(VMMGRAPH_GRAPH_FORGIVEN, 4);
NUMBER(VMMGRAPH_GRAPH_ABANDONED, 5);
NUMBER(VMMGRAPH_GRAPH_IMPOSED, 6);
NUMBER(VMMGRAPH_ROLE_HOST_INPUT, 0);
NUMBER(VMMGRAPH_ROLE_DEVICE_INPUT, 1);
NUMBER(VMMGRAPH_ROLE_OUTPUT, 2);
NUMBER(VMMGRAPH_PAD_ZERO, 0);
NUMBER(VMMGRAPH_PAD_REPEAT_LAST, 1);
NUMBER(VMMGRAPH_PAD_VALUE, 2);
NUMBER(VMMGRAPH_EXTENT_FIXED, 0);
NUMBER(VMMGRAPH_EXTENT_ALONG, 1);
NUMBER(VMMGRAPH_EXTENT_UP_TO, 2);
NUMBER(VMMGRAPH_DTYPE_BOOL, 0);
NUMBER(VMMGRAPH_DTYPE_U8, 1);
NUMBER(VMMGRAPH_DTYPE_I8, 2);
NUMBER(VMMGRAPH_DTYPE_I16, 3);
NUMBER(VMMGRAPH_DTYPE_I32, 4);
NUMBER(VMMGRAPH_DTYPE_I64, 5);
NUMBER(VMMGRAPH_DTYPE_F16, 6);
NUMBER(VMMGRAPH_DTYPE_BF16, 7);
NUMBER(VMMGRAPH_DTYPE_F32, 8);
NUMBER(VMMGRAPH_DTYPE_F64, 9);
NUMBER(VMMGRAPH_DTYPE_F8, 10);
NUMBER(VMMGRAPH_SIZES_XLLM, 0);
NUMBER(VMMGRAPH_SIZES_VLLM, 1);
NUMBER(VMMGRAPH_REMAINDER_KEEP_RESIDENT, 0);
NUMBER(VMMGRAPH_REMAINDER_REFUSE, 1);
NUMBER(VMMGRAPH_BOUND_LINK, 0);
NUMBER(VMMGRAPH_BOUND_COMPUTE, 1);
NUMBER(VMMGRAPH_PINNING_REQUIRED, 0);
NUMBER(VMMGRAPH_PINNING_PREFERRED, 1);
NUMBER(VMMGRAPH_RING_WITHIN_STEP, 1);

SIZE(vmmgraph_error_info_t, 40);
FIELD(vmmgraph_error_info_t, struct_size, 0, 8);
FIELD(vmmgraph_error_info_t, status, 8, 4);
FIELD(vmmgraph_error_info_t, driver_result, 12, 4);
FIELD(vmmgraph_error_info_t, device, 16, 4);
FIELD(vmmgraph_error_info_t, reserved, 20, 4);
FIELD(vmmgraph_error_info_t, requested, 24, 8);
FIELD(vmmgraph_error_info_t, available, 32, 8);

SIZE(vmmgraph_device_options_t, 56);
FIELD(vmmgraph_device_options_t, struct_size, 0, 8);
FIELD(vmmgraph_device_options_t, driver, 8, 4);
FIELD(vmmgraph_device_options_t, device, 12, 4);
FIELD(vmmgraph_device_options_t, budget_bytes, 16, 8);
FIELD(vmmgraph_device_options_t, host_granularity_bytes, 24, 8);
FIELD(vmmgraph_device_options_t, host_memory_bytes, 32, 8);
FIELD(vmmgraph_device_options_t, sharing, 40, 4);
FIELD(vmmgraph_device_options_t, rdma, 44, 4);
FIELD(vmmgraph_device_options_t, peers, 48, 8);

SIZE(vmmgraph_device_info_t, 176);
FIELD(vmmgraph_device_info_t, struct_size, 0, 8);
FIELD(vmmgraph_device_info_t, driver, 8, 4);
FIELD(vmmgraph_device_info_t, device, 12, 4);
FIELD(vmmgraph_device_info_t, granularity_bytes, 16, 8);
FIELD(vmmgraph_device_info_t, total_bytes, 24, 8);
FIELD(vmmgraph_device_info_t, name, 32, 128);
FIELD(vmmgraph_device_info_t, sharing, 160, 4);
FIELD(vmmgraph_device_info_t, rdma, 164, 4);
FIELD(vmmgraph_device_info_t, peers, 168, 8);

SIZE(vmmgraph_device_stats_t, 136);
FIELD(vmmgraph_device_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_device_stats_t, physical_bytes, 8, 8);
FIELD(vmmgraph_device_stats_t, peak_physical_bytes, 16, 8);
FIELD(vmmgraph_device_stats_t, retained_bytes, 24, 8);
FIELD(vmmgraph_device_stats_t, free_bytes, 32, 8);
FIELD(vmmgraph_device_stats_t, budget_bytes, 40, 8);
FIELD(vmmgraph_device_stats_t, pages, 48, 8);
FIELD(vmmgraph_device_stats_t, pages_created, 56, 8);
FIELD(vmmgraph_device_stats_t, pages_released, 64, 8);
FIELD(vmmgraph_device_stats_t, mappings, 72, 8);
FIELD(vmmgraph_device_stats_t, maps, 80, 8);
FIELD(vmmgraph_device_stats_t, unmaps, 88, 8);
FIELD(vmmgraph_device_stats_t, reserved_bytes, 96, 8);
FIELD(vmmgraph_device_stats_t, reservations, 104, 8);
FIELD(vmmgraph_device_stats_t, pending, 112, 8);
FIELD(vmmgraph_device_stats_t, pages_reused, 120, 8);
FIELD(vmmgraph_device_stats_t, exported_bytes, 128, 8);

SIZE(vmmgraph_page_extent_t, 40);
FIELD(vmmgraph_page_extent_t, page, 0, 8);
FIELD(vmmgraph_page_extent_t, offset, 8, 8);
FIELD(vmmgraph_page_extent_t, bytes, 16, 8);
FIELD(vmmgraph_page_extent_t, address, 24, 8);
FIELD(vmmgraph_page_extent_t, page_bytes, 32, 8);

SIZE(vmmgraph_fabric_handle_t, 64);
FIELD(vmmgraph_fabric_handle_t, data, 0, 64);

SIZE(vmmgraph_peer_extent_t, 24);
FIELD(vmmgraph_peer_extent_t, page, 0, 8);
FIELD(vmmgraph_peer_extent_t, offset, 8, 8);
FIELD(vmmgraph_peer_extent_t, bytes, 16, 8);

SIZE(vmmgraph_arena_options_t, 96);
FIELD(vmmgraph_arena_options_t, struct_size, 0, 8);
FIELD(vmmgraph_arena_options_t, small_page_bytes, 8, 8);
FIELD(vmmgraph_arena_options_t, large_page_bytes, 16, 8);
FIELD(vmmgraph_arena_options_t, retain, 24, 4);
FIELD(vmmgraph_arena_options_t, flags, 28, 4);
FIELD(vmmgraph_arena_options_t, budget_bytes, 32, 8);
FIELD(vmmgraph_arena_options_t, reserve_bytes, 40, 8);
FIELD(vmmgraph_arena_options_t, expected_bytes, 48, 8);
FIELD(vmmgraph_arena_options_t, peers, 56, 8);
FIELD(vmmgraph_arena_options_t, tag, 64, 8);
FIELD(vmmgraph_arena_options_t, least_bytes, 72, 8);
FIELD(vmmgraph_arena_options_t, remote_peers, 80, 8);
FIELD(vmmgraph_arena_options_t, account, 88, 8);

SIZE(vmmgraph_arena_stats_t, 168);
FIELD(vmmgraph_arena_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_arena_stats_t, physical_bytes, 8, 8);
FIELD(vmmgraph_arena_stats_t, shared_bytes, 16, 8);
FIELD(vmmgraph_arena_stats_t, free_bytes, 24, 8);
FIELD(vmmgraph_arena_stats_t, retained_bytes, 32, 8);
FIELD(vmmgraph_arena_stats_t, reserved_bytes, 40, 8);
FIELD(vmmgraph_arena_stats_t, mapped_bytes, 48, 8);
FIELD(vmmgraph_arena_stats_t, live_bytes, 56, 8);
FIELD(vmmgraph_arena_stats_t, high_water_bytes, 64, 8);
FIELD(vmmgraph_arena_stats_t, current_offset_bytes, 72, 8);
FIELD(vmmgraph_arena_stats_t, blocks, 80, 8);
FIELD(vmmgraph_arena_stats_t, spaces, 88, 8);
FIELD(vmmgraph_arena_stats_t, shared_pages, 96, 8);
FIELD(vmmgraph_arena_stats_t, kept_bytes, 104, 8);
FIELD(vmmgraph_arena_stats_t, closed, 112, 8);
FIELD(vmmgraph_arena_stats_t, charged_bytes, 120, 8);
FIELD(vmmgraph_arena_stats_t, budget_bytes, 128, 8);
FIELD(vmmgraph_arena_stats_t, replays, 136, 8);
FIELD(vmmgraph_arena_stats_t, paused, 144, 8);
FIELD(vmmgraph_arena_stats_t, exclusive_bytes, 152, 8);
FIELD(vmmgraph_arena_stats_t, lent_bytes, 160, 8);

SIZE(vmmgraph_seal_report_t, 112);
FIELD(vmmgraph_seal_report_t, struct_size, 0, 8);
FIELD(vmmgraph_seal_report_t, peak_live_bytes, 8, 8);
FIELD(vmmgraph_seal_report_t, small_pages, 16, 8);
FIELD(vmmgraph_seal_report_t, large_pages, 24, 8);
FIELD(vmmgraph_seal_report_t, maps, 32, 8);
FIELD(vmmgraph_seal_report_t, retained_bytes, 40, 8);
FIELD(vmmgraph_seal_report_t, retained_blocks, 48, 8);
FIELD(vmmgraph_seal_report_t, driver_calls, 56, 8);
FIELD(vmmgraph_seal_report_t, driver_ns, 64, 8);
FIELD(vmmgraph_seal_report_t, allocations, 72, 8);
FIELD(vmmgraph_seal_report_t, layout_hash, 80, 8);
FIELD(vmmgraph_seal_report_t, remote_blocks, 88, 8);
FIELD(vmmgraph_seal_report_t, remote_bytes, 96, 8);
FIELD(vmmgraph_seal_report_t, executable_bytes, 104, 8);

SIZE(vmmgraph_output_t, 16);
FIELD(vmmgraph_output_t, address, 0, 8);
FIELD(vmmgraph_output_t, bytes, 8, 8);

SIZE(vmmgraph_difference_t, 40);
FIELD(vmmgraph_difference_t, struct_size, 0, 8);
FIELD(vmmgraph_difference_t, found, 8, 8);
FIELD(vmmgraph_difference_t, space, 16, 8);
FIELD(vmmgraph_difference_t, output, 24, 8);
FIELD(vmmgraph_difference_t, offset, 32, 8);

SIZE(vmmgraph_space_stats_t, 80);
FIELD(vmmgraph_space_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_space_stats_t, id, 8, 8);
FIELD(vmmgraph_space_stats_t, phase, 16, 4);
FIELD(vmmgraph_space_stats_t, retain, 20, 4);
FIELD(vmmgraph_space_stats_t, blocks, 24, 8);
FIELD(vmmgraph_space_stats_t, live_bytes, 32, 8);
FIELD(vmmgraph_space_stats_t, peak_live_bytes, 40, 8);
FIELD(vmmgraph_space_stats_t, reserved_bytes, 48, 8);
FIELD(vmmgraph_space_stats_t, mapped_bytes, 56, 8);
FIELD(vmmgraph_space_stats_t, retained_bytes, 64, 8);
FIELD(vmmgraph_space_stats_t, maps, 72, 8);

SIZE(vmmgraph_key_t, 20);
FIELD(vmmgraph_key_t, variant, 0, 4);
FIELD(vmmgraph_key_t, extents, 4, 16);

SIZE(vmmgraph_acl_graph_streams_t, 48);
FIELD(vmmgraph_acl_graph_streams_t, struct_size, 0, 8);
FIELD(vmmgraph_acl_graph_streams_t, streams, 8, 4);
FIELD(vmmgraph_acl_graph_streams_t, layers, 12, 4);
FIELD(vmmgraph_acl_graph_streams_t, draft_layers, 16, 4);
FIELD(vmmgraph_acl_graph_streams_t, data_parallel, 20, 4);
FIELD(vmmgraph_acl_graph_streams_t, tensor_parallel, 24, 4);
FIELD(vmmgraph_acl_graph_streams_t, aiv, 28, 4);
FIELD(vmmgraph_acl_graph_streams_t, extra, 32, 4);
FIELD(vmmgraph_acl_graph_streams_t, reserve_one, 36, 4);
FIELD(vmmgraph_acl_graph_streams_t, context_groups, 40, 4);
FIELD(vmmgraph_acl_graph_streams_t, reserved, 44, 4);

SIZE(vmmgraph_plan_options_t, 80);
FIELD(vmmgraph_plan_options_t, struct_size, 0, 8);
FIELD(vmmgraph_plan_options_t, weights, 8, 8);
FIELD(vmmgraph_plan_options_t, most_graphs, 16, 4);
FIELD(vmmgraph_plan_options_t, reserved, 20, 4);
FIELD(vmmgraph_plan_options_t, most_graph_bytes, 24, 8);
FIELD(vmmgraph_plan_options_t, graph_bytes, 32, 8);
FIELD(vmmgraph_plan_options_t, most_pool_bytes, 40, 8);
FIELD(vmmgraph_plan_options_t, pool_base_bytes, 48, 8);
FIELD(vmmgraph_plan_options_t, pool_unit_bytes, 56, 8);
FIELD(vmmgraph_plan_options_t, eager_step, 64, 8);
FIELD(vmmgraph_plan_options_t, streams, 72, 8);

SIZE(vmmgraph_waste_t, 32);
FIELD(vmmgraph_waste_t, struct_size, 0, 8);
FIELD(vmmgraph_waste_t, padding, 8, 8);
FIELD(vmmgraph_waste_t, graph_steps, 16, 8);
FIELD(vmmgraph_waste_t, eager_steps, 24, 8);

SIZE(vmmgraph_planned_bucket_t, 48);
FIELD(vmmgraph_planned_bucket_t, key, 0, 20);
FIELD(vmmgraph_planned_bucket_t, reserved, 20, 4);
FIELD(vmmgraph_planned_bucket_t, steps, 24, 8);
FIELD(vmmgraph_planned_bucket_t, padding, 32, 8);
FIELD(vmmgraph_planned_bucket_t, saves, 40, 8);

SIZE(vmmgraph_plan_result_t, 88);
FIELD(vmmgraph_plan_result_t, struct_size, 0, 8);
FIELD(vmmgraph_plan_result_t, curve, 8, 8);
FIELD(vmmgraph_plan_result_t, curve_capacity, 16, 8);
FIELD(vmmgraph_plan_result_t, curve_count, 24, 8);
FIELD(vmmgraph_plan_result_t, buckets, 32, 8);
FIELD(vmmgraph_plan_result_t, most_graphs, 40, 4);
FIELD(vmmgraph_plan_result_t, limited_by, 44, 4);
FIELD(vmmgraph_plan_result_t, heaviest, 48, 8);
FIELD(vmmgraph_plan_result_t, waste, 56, 32);

SIZE(vmmgraph_dispatcher_options_t, 96);
FIELD(vmmgraph_dispatcher_options_t, struct_size, 0, 8);
FIELD(vmmgraph_dispatcher_options_t, full, 8, 8);
FIELD(vmmgraph_dispatcher_options_t, full_count, 16, 8);
FIELD(vmmgraph_dispatcher_options_t, piecewise, 24, 8);
FIELD(vmmgraph_dispatcher_options_t, piecewise_count, 32, 8);
FIELD(vmmgraph_dispatcher_options_t, weights, 40, 8);
FIELD(vmmgraph_dispatcher_options_t, piecewise_ignores, 48, 4);
FIELD(vmmgraph_dispatcher_options_t, most_tokens, 52, 4);
FIELD(vmmgraph_dispatcher_options_t, most_graphs, 56, 4);
FIELD(vmmgraph_dispatcher_options_t, ahead_only, 60, 4);
FIELD(vmmgraph_dispatcher_options_t, modes, 64, 24);
FIELD(vmmgraph_dispatcher_options_t, stand_in, 88, 4);
FIELD(vmmgraph_dispatcher_options_t, reserved, 92, 4);

SIZE(vmmgraph_dispatcher_stats_t, 72);
FIELD(vmmgraph_dispatcher_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_dispatcher_stats_t, graphs, 8, 8);
FIELD(vmmgraph_dispatcher_stats_t, captures, 16, 8);
FIELD(vmmgraph_dispatcher_stats_t, failures, 24, 8);
FIELD(vmmgraph_dispatcher_stats_t, evictions, 32, 8);
FIELD(vmmgraph_dispatcher_stats_t, requested, 40, 8);
FIELD(vmmgraph_dispatcher_stats_t, padding, 48, 8);
FIELD(vmmgraph_dispatcher_stats_t, imposed, 56, 8);
FIELD(vmmgraph_dispatcher_stats_t, imposed_eager, 64, 8);

SIZE(vmmgraph_decision_t, 48);
FIELD(vmmgraph_decision_t, struct_size, 0, 8);
FIELD(vmmgraph_decision_t, mode, 8, 4);
FIELD(vmmgraph_decision_t, reason, 12, 4);
FIELD(vmmgraph_decision_t, capture, 16, 4);
FIELD(vmmgraph_decision_t, slot, 20, 4);
FIELD(vmmgraph_decision_t, bucket, 24, 20);
FIELD(vmmgraph_decision_t, reserved, 44, 4);

SIZE(vmmgraph_extent_t, 16);
FIELD(vmmgraph_extent_t, kind, 0, 4);
FIELD(vmmgraph_extent_t, axis, 4, 4);
FIELD(vmmgraph_extent_t, times, 8, 4);
FIELD(vmmgraph_extent_t, plus, 12, 4);

SIZE(vmmgraph_input_t, 104);
FIELD(vmmgraph_input_t, struct_size, 0, 8);
FIELD(vmmgraph_input_t, name, 8, 8);
FIELD(vmmgraph_input_t, dtype, 16, 4);
FIELD(vmmgraph_input_t, role, 20, 4);
FIELD(vmmgraph_input_t, pad, 24, 4);
FIELD(vmmgraph_input_t, rank, 28, 4);
FIELD(vmmgraph_input_t, pad_bits, 32, 8);
FIELD(vmmgraph_input_t, shape, 40, 64);

SIZE(vmmgraph_input_plan_info_t, 32);
FIELD(vmmgraph_input_plan_info_t, struct_size, 0, 8);
FIELD(vmmgraph_input_plan_info_t, arena_bytes, 8, 8);
FIELD(vmmgraph_input_plan_info_t, staging_bytes, 16, 8);
FIELD(vmmgraph_input_plan_info_t, outputs_offset, 24, 8);

SIZE(vmmgraph_input_view_t, 48);
FIELD(vmmgraph_input_view_t, struct_size, 0, 8);
FIELD(vmmgraph_input_view_t, offset, 8, 8);
FIELD(vmmgraph_input_view_t, bytes, 16, 8);
FIELD(vmmgraph_input_view_t, shape, 24, 16);
FIELD(vmmgraph_input_view_t, rank, 40, 4);
FIELD(vmmgraph_input_view_t, reserved, 44, 4);

SIZE(vmmgraph_step_input_t, 56);
FIELD(vmmgraph_step_input_t, struct_size, 0, 8);
FIELD(vmmgraph_step_input_t, input, 8, 8);
FIELD(vmmgraph_step_input_t, data, 16, 8);
FIELD(vmmgraph_step_input_t, bytes, 24, 8);
FIELD(vmmgraph_step_input_t, shape, 32, 16);
FIELD(vmmgraph_step_input_t, rank, 48, 4);
FIELD(vmmgraph_step_input_t, dtype, 52, 4);

SIZE(vmmgraph_region_options_t, 40);
FIELD(vmmgraph_region_options_t, struct_size, 0, 8);
FIELD(vmmgraph_region_options_t, policy, 8, 4);
FIELD(vmmgraph_region_options_t, flags, 12, 4);
FIELD(vmmgraph_region_options_t, budget_bytes, 16, 8);
FIELD(vmmgraph_region_options_t, page_bytes, 24, 8);
FIELD(vmmgraph_region_options_t, account, 32, 8);

SIZE(vmmgraph_region_stats_t, 104);
FIELD(vmmgraph_region_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_region_stats_t, resident_bytes, 8, 8);
FIELD(vmmgraph_region_stats_t, paused_bytes, 16, 8);
FIELD(vmmgraph_region_stats_t, host_bytes, 24, 8);
FIELD(vmmgraph_region_stats_t, live_bytes, 32, 8);
FIELD(vmmgraph_region_stats_t, free_bytes, 40, 8);
FIELD(vmmgraph_region_stats_t, reserved_bytes, 48, 8);
FIELD(vmmgraph_region_stats_t, blocks, 56, 8);
FIELD(vmmgraph_region_stats_t, pages, 64, 8);
FIELD(vmmgraph_region_stats_t, generation, 72, 8);
FIELD(vmmgraph_region_stats_t, paused, 80, 8);
FIELD(vmmgraph_region_stats_t, charged_bytes, 88, 8);
FIELD(vmmgraph_region_stats_t, budget_bytes, 96, 8);

SIZE(vmmgraph_fence_t, 40);
FIELD(vmmgraph_fence_t, struct_size, 0, 8);
FIELD(vmmgraph_fence_t, streams, 8, 8);
FIELD(vmmgraph_fence_t, stream_count, 16, 8);
FIELD(vmmgraph_fence_t, events, 24, 8);
FIELD(vmmgraph_fence_t, event_count, 32, 8);

SIZE(vmmgraph_pause_report_t, 120);
FIELD(vmmgraph_pause_report_t, struct_size, 0, 8);
FIELD(vmmgraph_pause_report_t, regions, 8, 8);
FIELD(vmmgraph_pause_report_t, pages, 16, 8);
FIELD(vmmgraph_pause_report_t, bytes, 24, 8);
FIELD(vmmgraph_pause_report_t, copied_bytes, 32, 8);
FIELD(vmmgraph_pause_report_t, clean_bytes, 40, 8);
FIELD(vmmgraph_pause_report_t, kept_bytes, 48, 8);
FIELD(vmmgraph_pause_report_t, left_bytes, 56, 8);
FIELD(vmmgraph_pause_report_t, stale_pages, 64, 8);
FIELD(vmmgraph_pause_report_t, calls, 72, 8);
FIELD(vmmgraph_pause_report_t, failures, 80, 8);
FIELD(vmmgraph_pause_report_t, micros, 88, 8);
FIELD(vmmgraph_pause_report_t, copy_micros, 96, 8);
FIELD(vmmgraph_pause_report_t, copy_gib_per_second, 104, 8);
FIELD(vmmgraph_pause_report_t, path, 112, 4);
FIELD(vmmgraph_pause_report_t, reserved, 116, 4);

SIZE(vmmgraph_resume_report_t, 96);
FIELD(vmmgraph_resume_report_t, struct_size, 0, 8);
FIELD(vmmgraph_resume_report_t, regions, 8, 8);
FIELD(vmmgraph_resume_report_t, pages, 16, 8);
FIELD(vmmgraph_resume_report_t, bytes, 24, 8);
FIELD(vmmgraph_resume_report_t, copied_bytes, 32, 8);
FIELD(vmmgraph_resume_report_t, zeroed_bytes, 40, 8);
FIELD(vmmgraph_resume_report_t, calls, 48, 8);
FIELD(vmmgraph_resume_report_t, micros, 56, 8);
FIELD(vmmgraph_resume_report_t, waited_micros, 64, 8);
FIELD(vmmgraph_resume_report_t, copy_micros, 72, 8);
FIELD(vmmgraph_resume_report_t, copy_gib_per_second, 80, 8);
FIELD(vmmgraph_resume_report_t, path, 88, 4);
FIELD(vmmgraph_resume_report_t, reserved, 92, 4);

SIZE(vmmgraph_host_stats_t, 40);
FIELD(vmmgraph_host_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_host_stats_t, held_bytes, 8, 8);
FIELD(vmmgraph_host_stats_t, registered_bytes, 16, 8);
FIELD(vmmgraph_host_stats_t, free_bytes, 24, 8);
FIELD(vmmgraph_host_stats_t, limit_bytes, 32, 8);

SIZE(vmmgraph_range_t, 16);
FIELD(vmmgraph_range_t, address, 0, 8);
FIELD(vmmgraph_range_t, bytes, 8, 8);

SIZE(vmmgraph_moved_t, 48);
FIELD(vmmgraph_moved_t, struct_size, 0, 8);
FIELD(vmmgraph_moved_t, tag, 8, 8);
FIELD(vmmgraph_moved_t, region, 16, 8);
FIELD(vmmgraph_moved_t, generation, 24, 8);
FIELD(vmmgraph_moved_t, ranges, 32, 8);
FIELD(vmmgraph_moved_t, range_count, 40, 8);

SIZE(vmmgraph_block_range_t, 16);
FIELD(vmmgraph_block_range_t, first, 0, 8);
FIELD(vmmgraph_block_range_t, end, 8, 8);

SIZE(vmmgraph_candidate_t, 24);
FIELD(vmmgraph_candidate_t, page, 0, 8);
FIELD(vmmgraph_candidate_t, blocks, 8, 8);
FIELD(vmmgraph_candidate_t, block_count, 16, 8);

SIZE(vmmgraph_ask_t, 48);
FIELD(vmmgraph_ask_t, struct_size, 0, 8);
FIELD(vmmgraph_ask_t, pages, 8, 8);
FIELD(vmmgraph_ask_t, page_count, 16, 8);
FIELD(vmmgraph_ask_t, bytes, 24, 8);
FIELD(vmmgraph_ask_t, there, 32, 8);
FIELD(vmmgraph_ask_t, by, 40, 8);

SIZE(vmmgraph_grants_stats_t, 48);
FIELD(vmmgraph_grants_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_grants_stats_t, pages, 8, 8);
FIELD(vmmgraph_grants_stats_t, free, 16, 8);
FIELD(vmmgraph_grants_stats_t, kv, 24, 8);
FIELD(vmmgraph_grants_stats_t, activations, 32, 8);
FIELD(vmmgraph_grants_stats_t, waiting, 40, 8);

SIZE(vmmgraph_growing_t, 16);
FIELD(vmmgraph_growing_t, tokens, 0, 8);
FIELD(vmmgraph_growing_t, left, 8, 8);

SIZE(vmmgraph_due_t, 24);
FIELD(vmmgraph_due_t, by, 0, 8);
FIELD(vmmgraph_due_t, takes, 8, 8);
FIELD(vmmgraph_due_t, patience, 16, 8);

SIZE(vmmgraph_prompt_t, 32);
FIELD(vmmgraph_prompt_t, since, 0, 8);
FIELD(vmmgraph_prompt_t, by, 8, 8);
FIELD(vmmgraph_prompt_t, takes, 16, 8);
FIELD(vmmgraph_prompt_t, patience, 24, 8);

SIZE(vmmgraph_decoding_t, 24);
FIELD(vmmgraph_decoding_t, since, 0, 8);
FIELD(vmmgraph_decoding_t, tokens, 8, 8);
FIELD(vmmgraph_decoding_t, each, 16, 8);

SIZE(vmmgraph_host_kv_stats_t, 40);
FIELD(vmmgraph_host_kv_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_host_kv_stats_t, physical_bytes, 8, 8);
FIELD(vmmgraph_host_kv_stats_t, logical_bytes, 16, 8);
FIELD(vmmgraph_host_kv_stats_t, held_bytes, 24, 8);
FIELD(vmmgraph_host_kv_stats_t, sequences, 32, 8);

SIZE(vmmgraph_block_pool_stats_t, 56);
FIELD(vmmgraph_block_pool_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_block_pool_stats_t, blocks, 8, 8);
FIELD(vmmgraph_block_pool_stats_t, limit_blocks, 16, 8);
FIELD(vmmgraph_block_pool_stats_t, in_use, 24, 8);
FIELD(vmmgraph_block_pool_stats_t, available, 32, 8);
FIELD(vmmgraph_block_pool_stats_t, reserved, 40, 8);
FIELD(vmmgraph_block_pool_stats_t, empty_bytes, 48, 8);

SIZE(vmmgraph_elastic_options_t, 48);
FIELD(vmmgraph_elastic_options_t, struct_size, 0, 8);
FIELD(vmmgraph_elastic_options_t, name, 8, 8);
FIELD(vmmgraph_elastic_options_t, page_bytes, 16, 8);
FIELD(vmmgraph_elastic_options_t, budget_bytes, 24, 8);
FIELD(vmmgraph_elastic_options_t, least_bytes, 32, 8);
FIELD(vmmgraph_elastic_options_t, account, 40, 8);

SIZE(vmmgraph_committed_t, 40);
FIELD(vmmgraph_committed_t, struct_size, 0, 8);
FIELD(vmmgraph_committed_t, bytes, 8, 8);
FIELD(vmmgraph_committed_t, pages, 16, 8);
FIELD(vmmgraph_committed_t, created, 24, 8);
FIELD(vmmgraph_committed_t, revived, 32, 8);

SIZE(vmmgraph_elastic_stats_t, 136);
FIELD(vmmgraph_elastic_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_elastic_stats_t, id, 8, 8);
FIELD(vmmgraph_elastic_stats_t, page_bytes, 16, 8);
FIELD(vmmgraph_elastic_stats_t, reserved_bytes, 24, 8);
FIELD(vmmgraph_elastic_stats_t, committed_bytes, 32, 8);
FIELD(vmmgraph_elastic_stats_t, peak_committed_bytes, 40, 8);
FIELD(vmmgraph_elastic_stats_t, coming_bytes, 48, 8);
FIELD(vmmgraph_elastic_stats_t, leaving_bytes, 56, 8);
FIELD(vmmgraph_elastic_stats_t, commits, 64, 8);
FIELD(vmmgraph_elastic_stats_t, refused, 72, 8);
FIELD(vmmgraph_elastic_stats_t, decommits, 80, 8);
FIELD(vmmgraph_elastic_stats_t, pages_mapped, 88, 8);
FIELD(vmmgraph_elastic_stats_t, pages_created, 96, 8);
FIELD(vmmgraph_elastic_stats_t, pages_revived, 104, 8);
FIELD(vmmgraph_elastic_stats_t, pages_unmapped, 112, 8);
FIELD(vmmgraph_elastic_stats_t, charged_bytes, 120, 8);
FIELD(vmmgraph_elastic_stats_t, budget_bytes, 128, 8);

SIZE(vmmgraph_shown_t, 40);
FIELD(vmmgraph_shown_t, struct_size, 0, 8);
FIELD(vmmgraph_shown_t, name, 8, 8);
FIELD(vmmgraph_shown_t, buffer, 16, 8);
FIELD(vmmgraph_shown_t, ranges, 24, 8);
FIELD(vmmgraph_shown_t, range_count, 32, 8);

SIZE(vmmgraph_vacate_t, 64);
FIELD(vmmgraph_vacate_t, struct_size, 0, 8);
FIELD(vmmgraph_vacate_t, lease, 8, 8);
FIELD(vmmgraph_vacate_t, ranges, 16, 8);
FIELD(vmmgraph_vacate_t, range_count, 24, 8);
FIELD(vmmgraph_vacate_t, instead, 32, 8);
FIELD(vmmgraph_vacate_t, instead_count, 40, 8);
FIELD(vmmgraph_vacate_t, bytes, 48, 8);
FIELD(vmmgraph_vacate_t, micros, 56, 8);

SIZE(vmmgraph_kv_options_t, 48);
FIELD(vmmgraph_kv_options_t, struct_size, 0, 8);
FIELD(vmmgraph_kv_options_t, planes, 8, 8);
FIELD(vmmgraph_kv_options_t, plane_count, 16, 8);
FIELD(vmmgraph_kv_options_t, blocks_most, 24, 8);
FIELD(vmmgraph_kv_options_t, memory, 32, 8);
FIELD(vmmgraph_kv_options_t, layout, 40, 4);
FIELD(vmmgraph_kv_options_t, reserved, 44, 4);

SIZE(vmmgraph_kv_plane_t, 32);
FIELD(vmmgraph_kv_plane_t, struct_size, 0, 8);
FIELD(vmmgraph_kv_plane_t, address, 8, 8);
FIELD(vmmgraph_kv_plane_t, stride_bytes, 16, 8);
FIELD(vmmgraph_kv_plane_t, block_bytes, 24, 8);

SIZE(vmmgraph_kv_stats_t, 88);
FIELD(vmmgraph_kv_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_kv_stats_t, planes, 8, 8);
FIELD(vmmgraph_kv_stats_t, blocks, 16, 8);
FIELD(vmmgraph_kv_stats_t, limit_blocks, 24, 8);
FIELD(vmmgraph_kv_stats_t, revision, 32, 8);
FIELD(vmmgraph_kv_stats_t, limited, 40, 8);
FIELD(vmmgraph_kv_stats_t, most_blocks, 48, 8);
FIELD(vmmgraph_kv_stats_t, backed_blocks, 56, 8);
FIELD(vmmgraph_kv_stats_t, beyond_blocks, 64, 8);
FIELD(vmmgraph_kv_stats_t, block_bytes, 72, 8);
FIELD(vmmgraph_kv_stats_t, blocks_a_page, 80, 8);
SIZE(vmmgraph_map_options_t, 24);
FIELD(vmmgraph_map_options_t, struct_size, 0, 8);
FIELD(vmmgraph_map_options_t, executables_bytes, 8, 8);
FIELD(vmmgraph_map_options_t, title, 16, 8);

SIZE(vmmgraph_status_t, 4);
SIZE(vmmgraph_device_t, 8);
SIZE(vmmgraph_arena_t, 8);
SIZE(vmmgraph_space_t, 8);
SIZE(vmmgraph_region_t, 8);
SIZE(vmmgraph_pause_hooks_t, 8);
SIZE(vmmgraph_elastic_buffer_t, 8);
SIZE(vmmgraph_kv_cache_t, 8);
SIZE(vmmgraph_pending_t, 8);
SIZE(vmmgraph_elastic_observer_t, 8);
SIZE(vmmgraph_reclaimer_t, 8);
SIZE(vmmgraph_account_t, 8);
SIZE(vmmgraph_account_options_t, 32);
FIELD(vmmgraph_account_options_t, struct_size, 0, 8);
FIELD(vmmgraph_account_options_t, above, 8, 8);
FIELD(vmmgraph_account_options_t, budget_bytes, 16, 8);
FIELD(vmmgraph_account_options_t, least_bytes, 24, 8);
SIZE(vmmgraph_account_stats_t, 32);
FIELD(vmmgraph_account_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_account_stats_t, charged_bytes, 8, 8);
FIELD(vmmgraph_account_stats_t, budget_bytes, 16, 8);
FIELD(vmmgraph_account_stats_t, least_bytes, 24, 8);
SIZE(vmmgraph_block_pool_t, 8);
SIZE(vmmgraph_pre_commit_t, 8);
SIZE(vmmgraph_standing_t, 8);
SIZE(vmmgraph_grants_t, 8);
SIZE(vmmgraph_lengths_t, 8);
SIZE(vmmgraph_host_kv_t, 8);
SIZE(vmmgraph_slo_control_t, 8);
SIZE(vmmgraph_ring_t, 8);
SIZE(vmmgraph_ring_graph_t, 8);
SIZE(vmmgraph_host_buffer_t, 8);
SIZE(vmmgraph_dispatcher_t, 8);
SIZE(vmmgraph_input_plan_t, 8);
_Static_assert(_Generic((vmmgraph_status_t)0, int32_t: 1, default: 0), "statuses are int32_t");

SIZE(vmmgraph_ring_unit_t, 16);
FIELD(vmmgraph_ring_unit_t, bytes, 0, 8);
FIELD(vmmgraph_ring_unit_t, resident, 8, 4);
FIELD(vmmgraph_ring_unit_t, reserved, 12, 4);

SIZE(vmmgraph_ring_place_t, 16);
FIELD(vmmgraph_ring_place_t, place, 0, 8);
FIELD(vmmgraph_ring_place_t, turn, 8, 8);

SIZE(vmmgraph_ring_schedule_t, 48);
FIELD(vmmgraph_ring_schedule_t, struct_size, 0, 8);
FIELD(vmmgraph_ring_schedule_t, units, 8, 8);
FIELD(vmmgraph_ring_schedule_t, streamed, 16, 8);
FIELD(vmmgraph_ring_schedule_t, slots, 24, 8);
FIELD(vmmgraph_ring_schedule_t, places, 32, 8);
FIELD(vmmgraph_ring_schedule_t, kept_resident, 40, 8);

SIZE(vmmgraph_ring_demand_t, 80);
FIELD(vmmgraph_ring_demand_t, struct_size, 0, 8);
FIELD(vmmgraph_ring_demand_t, units, 8, 8);
FIELD(vmmgraph_ring_demand_t, unit_count, 16, 8);
FIELD(vmmgraph_ring_demand_t, slots, 24, 8);
FIELD(vmmgraph_ring_demand_t, remainder, 32, 4);
FIELD(vmmgraph_ring_demand_t, reserved, 36, 4);
FIELD(vmmgraph_ring_demand_t, page_bytes, 40, 8);
FIELD(vmmgraph_ring_demand_t, budget_bytes, 48, 8);
FIELD(vmmgraph_ring_demand_t, tokens, 56, 8);
FIELD(vmmgraph_ring_demand_t, link_gib_per_second, 64, 8);
FIELD(vmmgraph_ring_demand_t, compute_seconds, 72, 8);

SIZE(vmmgraph_ring_residency_t, 48);
FIELD(vmmgraph_ring_residency_t, resident, 0, 8);
FIELD(vmmgraph_ring_residency_t, device_bytes, 8, 8);
FIELD(vmmgraph_ring_residency_t, link_bytes, 16, 8);
FIELD(vmmgraph_ring_residency_t, step_seconds, 24, 8);
FIELD(vmmgraph_ring_residency_t, tokens_per_second, 32, 8);
FIELD(vmmgraph_ring_residency_t, bound, 40, 4);
FIELD(vmmgraph_ring_residency_t, reserved, 44, 4);

SIZE(vmmgraph_ring_ceiling_t, 120);
FIELD(vmmgraph_ring_ceiling_t, struct_size, 0, 8);
FIELD(vmmgraph_ring_ceiling_t, asked, 8, 48);
FIELD(vmmgraph_ring_ceiling_t, link_seconds, 56, 8);
FIELD(vmmgraph_ring_ceiling_t, compute_seconds, 64, 8);
FIELD(vmmgraph_ring_ceiling_t, all_resident_bytes, 72, 8);
FIELD(vmmgraph_ring_ceiling_t, units, 80, 8);
FIELD(vmmgraph_ring_ceiling_t, streamed, 88, 8);
FIELD(vmmgraph_ring_ceiling_t, slots, 96, 8);
FIELD(vmmgraph_ring_ceiling_t, kept_resident, 104, 8);
FIELD(vmmgraph_ring_ceiling_t, residency_count, 112, 8);

SIZE(vmmgraph_ring_options_t, 80);
FIELD(vmmgraph_ring_options_t, struct_size, 0, 8);
FIELD(vmmgraph_ring_options_t, name, 8, 8);
FIELD(vmmgraph_ring_options_t, slots, 16, 8);
FIELD(vmmgraph_ring_options_t, remainder, 24, 4);
FIELD(vmmgraph_ring_options_t, flags, 28, 4);
FIELD(vmmgraph_ring_options_t, page_bytes, 32, 8);
FIELD(vmmgraph_ring_options_t, budget_bytes, 40, 8);
FIELD(vmmgraph_ring_options_t, link_gib_per_second, 48, 8);
FIELD(vmmgraph_ring_options_t, compute_seconds, 56, 8);
FIELD(vmmgraph_ring_options_t, tokens, 64, 8);
FIELD(vmmgraph_ring_options_t, account, 72, 8);

SIZE(vmmgraph_host_run_t, 32);
FIELD(vmmgraph_host_run_t, source, 0, 8);
FIELD(vmmgraph_host_run_t, from, 8, 8);
FIELD(vmmgraph_host_run_t, to, 16, 8);
FIELD(vmmgraph_host_run_t, bytes, 24, 8);

SIZE(vmmgraph_ring_capture_options_t, 24);
FIELD(vmmgraph_ring_capture_options_t, struct_size, 0, 8);
FIELD(vmmgraph_ring_capture_options_t, tail, 8, 8);
FIELD(vmmgraph_ring_capture_options_t, most_runs, 16, 8);

SIZE(vmmgraph_ring_stats_t, 152);
FIELD(vmmgraph_ring_stats_t, struct_size, 0, 8);
FIELD(vmmgraph_ring_stats_t, id, 8, 8);
FIELD(vmmgraph_ring_stats_t, units, 16, 8);
FIELD(vmmgraph_ring_stats_t, streamed, 24, 8);
FIELD(vmmgraph_ring_stats_t, slots, 32, 8);
FIELD(vmmgraph_ring_stats_t, page_bytes, 40, 8);
FIELD(vmmgraph_ring_stats_t, reserved_bytes, 48, 8);
FIELD(vmmgraph_ring_stats_t, device_bytes, 56, 8);
FIELD(vmmgraph_ring_stats_t, acquired, 64, 8);
FIELD(vmmgraph_ring_stats_t, copies, 72, 8);
FIELD(vmmgraph_ring_stats_t, copied_bytes, 80, 8);
FIELD(vmmgraph_ring_stats_t, acquires, 88, 8);
FIELD(vmmgraph_ring_stats_t, filled_ahead, 96, 8);
FIELD(vmmgraph_ring_stats_t, filled_late, 104, 8);
FIELD(vmmgraph_ring_stats_t, ahead_failed, 112, 8);
FIELD(vmmgraph_ring_stats_t, aborts, 120, 8);
FIELD(vmmgraph_ring_stats_t, charged_bytes, 128, 8);
FIELD(vmmgraph_ring_stats_t, budget_bytes, 136, 8);
FIELD(vmmgraph_ring_stats_t, launches, 144, 8);

/* The linked library has the same ABI. */
int main(void) { return vmmgraph_abi_version() == VMMGRAPH_ABI_VERSION ? 0 : 1; }
