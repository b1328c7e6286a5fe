// Programs that query or configure torch's allocator.
#include <atomic>
#include <thread>

#include <ATen/cuda/MemPool.h>
#include <c10/core/AllocatorConfig.h>

#include "run.hpp"

namespace differential {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// Allocates on this thread from the program's pool, like Python's use_mem_pool().
class InPool {
public:
    explicit InPool(at::cuda::MemPool& pool) : pool_(pool) {
        const auto mine = std::this_thread::get_id();
        caching::beginAllocateToPool(
            0, pool_.id(), [mine](cudaStream_t) { return std::this_thread::get_id() == mine; });
    }
    InPool(const InPool&) = delete;
    InPool& operator=(const InPool&) = delete;
    ~InPool() {
        caching::endAllocateToPool(0, pool_.id());
        caching::releasePool(0, pool_.id());
    }

private:
    at::cuda::MemPool& pool_;
};

void empty_cache_before_in_and_after_a_capture(Run& run) {
    const auto x = run.ints({1 << 20});
    static_cast<void>(at::empty({64 * MiB}, run.options(at::kByte)));
    caching::emptyCache();
    at::Tensor out;
    auto graph = run.capture([&] {
        auto a = x * 2;
        run.attempt("empty_cache in the body", [] { caching::emptyCache(); });
        auto b = a + 1;
        a = at::Tensor();
        run.attempt("empty_cache in the body", [] { caching::emptyCache(); });
        out = b * x;
    });
    caching::emptyCache();
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("out", out);
        run.check("it is eager's", at::equal(out, (x * 2 + 1) * x));
        caching::emptyCache();
    }
    graph.reset();
    caching::emptyCache();
    run.note("out without its graph", out);
}

void empty_cache_by_another_thread_while_a_capture_runs(Run& run) {
    const auto x = run.ints({1 << 20});
    static_cast<void>(at::empty({64 * MiB}, run.options(at::kByte)));
    at::Tensor out;
    const auto graph = run.capture([&] {
        out = x * 2;
        run.attempt("empty_cache", [] { elsewhere([] { caching::emptyCache(); }); });
        out = out + x;
    });
    run.replay(graph);
    run.note("out", out);
}

void statistics(Run& run) {
    const auto x = run.ints({1 << 20});
    const auto start = caching::getDeviceStats(0);
    caching::resetPeakStats(0);
    at::Tensor out;
    std::int64_t inside = 0;
    const auto graph = run.capture([&] {
        const auto passing = at::empty({64 * MiB}, run.options(at::kByte)).fill_(1);
        inside = before().allocated - start.allocated_bytes[0].current;
        out = x * 2 + passing.slice(0, 0, 1);
    });
    run.replay(graph);
    run.note("out", out);
    const auto end = caching::getDeviceStats(0);
    run.note("statistics: allocated in the capture", inside);
    run.note("statistics: allocated by the output",
             end.allocated_bytes[0].current - start.allocated_bytes[0].current);
    run.note("statistics: peak", end.allocated_bytes[0].peak - start.allocated_bytes[0].current);
    run.note("statistics: reserved",
             end.reserved_bytes[0].current - start.reserved_bytes[0].current);
    const auto eager = at::empty({32 * MiB}, run.options(at::kByte));
    run.note("allocated by an eager tensor", before().allocated - end.allocated_bytes[0].current);
}

void snapshots(Run& run) {
    const auto x = run.ints({1 << 20});
    const auto in_private_pools = [] {
        std::int64_t bytes = 0;
        for (const auto& segment : caching::snapshot().segments) {
            const bool general = segment.owner_private_pool_id.first == 0 &&
                                 segment.owner_private_pool_id.second == 0;
            bytes += general ? 0 : static_cast<std::int64_t>(segment.total_size);
        }
        return bytes;
    };
    at::Tensor out;
    {
        const auto graph = run.capture([&] {
            out = x * 2;
            run.attempt("a snapshot in the capture",
                        [&] { static_cast<void>(caching::snapshot()); });
        });
        run.replay(graph);
        run.note("snapshot: bytes of private pools", in_private_pools());
        run.note("out", out);
    }
    out = at::Tensor();
    caching::emptyCache();
    run.note("bytes of private pools afterwards", in_private_pools());
}

void a_recorded_history(Run& run) {
    caching::recordHistory(true, nullptr, 1000, c10::CachingDeviceAllocator::RecordContext::NEVER,
                           false, {});
    const auto x = run.ints({1 << 20});
    at::Tensor out;
    const auto graph = run.capture([&] { out = x * 2; });
    run.replay(graph);
    run.note("out", out);
    bool seen = false, eager_seen = false;
    for (const auto& trace : caching::snapshot().device_traces) {
        for (const auto& entry : trace) {
            seen = seen || entry.addr_ == reinterpret_cast<std::size_t>(out.data_ptr());
            eager_seen = eager_seen || entry.addr_ == reinterpret_cast<std::size_t>(x.data_ptr());
        }
    }
    run.note("history: an output's address is in it", seen);
    run.check("an eager tensor's is", eager_seen);
    caching::recordHistory(false, nullptr, 0, c10::CachingDeviceAllocator::RecordContext::NEVER,
                           true, {});
}

void a_trace_tracker(Run& run) {
    const auto x = run.ints({1 << 20});
    static std::atomic<std::int64_t> allocations{0};
    caching::attachAllocatorTraceTracker([](const c10::CachingDeviceAllocator::TraceEntry& entry) {
        allocations += entry.action_ == c10::CachingDeviceAllocator::TraceEntry::ALLOC;
    });
    at::Tensor out;
    const auto graph = run.capture([&] {
        const auto a = x * 2;
        const auto b = a + 1;
        out = a * b;
    });
    run.note("tracker: allocations in the capture", allocations.exchange(0));
    run.replay(graph);
    run.note("out", out);
    allocations = 0;
    static_cast<void>(x + 1);
    run.note("allocations outside", allocations.load());
}

void an_observer_of_out_of_memory(Run& run) {
    static std::atomic<int> seen{0};
    caching::attachOutOfMemoryObserver(
        [](std::int64_t, std::size_t, std::size_t, std::size_t) { ++seen; });
    run.attempt("an eager allocation", [&] {
        static_cast<void>(at::empty({std::int64_t{1} << 50}, run.options(at::kByte)));
    });
    run.note("seen by then", seen.exchange(0));
    run.attempt("a capture", [&] {
        static_cast<void>(run.capture([&] {
            static_cast<void>(at::empty({std::int64_t{1} << 50}, run.options(at::kByte)));
        }));
    });
    run.note("observer: seen in the capture", seen.exchange(0));
    run.note("statistics: out of memory", caching::getDeviceStats(0).num_ooms);
}

void a_memory_fraction(Run& run) {
    const auto x = run.ints({1 << 20});
    std::size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    // Limits this process to 1 GiB.
    caching::setMemoryFraction(
        static_cast<double>(std::size_t{1} << 30) / static_cast<double>(total), 0);
    run.attempt("an eager allocation",
                [&] { static_cast<void>(at::empty({2048 * MiB}, run.options(at::kByte))); });
    run.attempt("fraction: a capture", [&] {
        static_cast<void>(run.capture(
            [&] { static_cast<void>(at::empty({2048 * MiB}, run.options(at::kByte)).fill_(1)); }));
    });
    at::Tensor out;
    const auto graph = run.capture([&] { out = x * 2; });
    run.replay(graph);
    run.note("out", out);
    caching::setMemoryFraction(1.0, 0);
}

void a_pool_of_the_programs_in_the_body(Run& run) {
    const auto x = run.ints({1 << 20});
    at::cuda::MemPool pool;
    at::Tensor out, pooled;
    const auto graph = run.capture([&] {
        const auto a = x * 2;
        {
            const InPool in(pool);
            pooled = a + 1;
        }
        out = pooled * a;
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("out", out);
        run.note("of the pool", pooled);
    }
    run.check("it is eager's", at::equal(out, (x * 2 + 1) * (x * 2)));
}

void a_pool_of_the_programs_around_the_capture(Run& run) {
    const auto x = run.ints({1 << 20});
    at::cuda::MemPool pool;
    at::Tensor out, input, eager;
    GraphPtr graph;
    {
        const InPool in(pool);
        input = x + 1;
        graph = run.capture([&] { out = input * 2; });
        eager = input + 1;
    }
    run.replay(graph);
    run.note("eager", eager);
    run.note("out", out);
}

void a_graph_is_dropped_while_a_pool_of_the_programs_is_used(Run& run) {
    const auto x = run.ints({1 << 20});
    at::cuda::MemPool pool;
    at::Tensor out, eager;
    auto graph = run.capture([&] { out = x * 2; });
    run.replay(graph);
    {
        const InPool in(pool);
        eager = x + 1;
        graph.reset();
        eager = eager + x;
    }
    run.note("eager", eager);
    run.note("out", out);
}

void memory_without_tensors(Run& run) {
    const auto x = run.ints({1 << 20});
    void *inside = nullptr, *on_side = nullptr;
    at::Tensor out;
    {
        const auto graph = run.capture([&] {
            inside = caching::raw_alloc(4 * MiB);
            const auto blob = at::from_blob(inside, {1 << 20}, run.options());
            blob.copy_(x);
            out = blob * 2;
            on_side = caching::raw_alloc_with_stream(MiB, Run::side(0).stream());
            caching::raw_delete(on_side);
            on_side = caching::raw_alloc_with_stream(MiB, Run::side(0).stream());
        });
        run.replay(graph);
        run.note("out", out);
        std::size_t bytes = 0;
        run.check("its base", caching::getBaseAllocation(inside, &bytes) != nullptr &&
                                  bytes >= static_cast<std::size_t>(4 * MiB));
        C10_CUDA_CHECK(cudaMemset(on_side, 0, MiB));
    }
    run.check("its bytes are there", at::equal(at::from_blob(inside, {1 << 20}, run.options()), x));
    caching::raw_delete(inside);
    caching::raw_delete(on_side);
}

void deleters_and_pointers(Run& run) {
    const auto early = run.ints({100});
    run.way.install();
    at::Tensor out;
    const auto graph = run.capture([&] { out = early * 2; });
    run.replay(graph);
    const auto deleter = caching::get()->raw_deleter();
    const auto eager = early + 1;
    run.check("an eager tensor has the allocator's deleter",
              eager.storage().data_ptr().get_deleter() == deleter);
    run.check("one made before too", early.storage().data_ptr().get_deleter() == deleter);
    run.note("an output has it", out.storage().data_ptr().get_deleter() == deleter);
    run.check("simple pointers", caching::get()->is_simple_data_ptr(eager.storage().data_ptr()));
    run.note("an output's is simple", caching::get()->is_simple_data_ptr(out.storage().data_ptr()));
    run.note("aligned to", reinterpret_cast<std::size_t>(out.data_ptr()) % 512);
    run.note("name", caching::get()->name());
    run.note("the storages' allocator is torch's", eager.storage().allocator() == caching::get());
    run.note("is resizable", out.storage().resizable());
    cudaPointerAttributes attributes{};
    C10_CUDA_CHECK(cudaPointerGetAttributes(&attributes, out.data_ptr()));
    run.note("kind of memory", attributes.type);
    run.note("device", attributes.device);
}

void expandable_segments(Run& run) {
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
    const auto x = run.ints({1 << 20});
    at::Tensor out;
    auto eager = run.ints({3 << 20});
    const auto graph = run.capture([&] {
        const auto a = x * 2;
        eager = at::Tensor();
        out = (a + 1) * x;
    });
    for (int turn = 0; turn < 2; ++turn) {
        run.replay(graph);
        run.note("out", out);
        caching::emptyCache();
    }
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:False");
}

}  // namespace

std::vector<Entry> allocator_scenarios() {
    return {
        {"empty_cache_before_in_and_after_a_capture", empty_cache_before_in_and_after_a_capture},
        {"empty_cache_by_another_thread_while_a_capture_runs",
         empty_cache_by_another_thread_while_a_capture_runs},
        {"statistics", statistics},
        {"snapshots", snapshots},
        {"a_recorded_history", a_recorded_history},
        {"a_trace_tracker", a_trace_tracker},
        {"an_observer_of_out_of_memory", an_observer_of_out_of_memory},
        {"a_memory_fraction", a_memory_fraction},
        {"a_pool_of_the_programs_in_the_body", a_pool_of_the_programs_in_the_body},
        {"a_pool_of_the_programs_around_the_capture", a_pool_of_the_programs_around_the_capture},
        {"a_graph_is_dropped_while_a_pool_of_the_programs_is_used",
         a_graph_is_dropped_while_a_pool_of_the_programs_is_used},
        {"memory_without_tensors", memory_without_tensors},
        {"deleters_and_pointers", deleters_and_pointers, true},
        {"expandable_segments", expandable_segments},
    };
}

}  // namespace differential
