// The same programs under torch's own capture and the library's: results, exceptions and the state
// afterwards must agree, except for known.cpp. Needs a GPU. With --cpu, graphs rerun their bodies,
// which shows the scenarios are deterministic.
//
// `VMMGRAPH_DIFFERENTIAL_JOBS`: concurrent processes. `VMMGRAPH_DIFFERENTIAL_TIMEOUT`: seconds per
// process (default 60). `VMMGRAPH_DIFFERENTIAL_SECONDS`: duration of captures next to eager traffic
// (default 10).
#include <cstdio>
#include <cstring>

#include <ATen/Context.h>

#include "known.hpp"
#include "run.hpp"

namespace {

using namespace differential;

std::vector<Entry> everything() {
    std::vector<Entry> all;
    for (const auto& some :
         {storage_scenarios(), lifetime_scenarios(), allocator_scenarios(), stream_scenarios(),
          thread_scenarios(), operator_scenarios(), library_scenarios(), autograd_scenarios(),
          random_scenarios(), failure_scenarios()}) {
        all.insert(all.end(), some.begin(), some.end());
    }
    return all;
}

void run_one(const Entry& entry, const std::string& name, Report& report) {
    const auto way = make_way(name);
    TORCH_CHECK(way != nullptr, "no way is called ", name);
    // Keeps integers exact and sums independent of order.
    at::globalContext().setAllowTF32CuBLAS(false);
    at::globalContext().setAllowTF32CuDNN(false);
    at::globalContext().setDeterministicCuDNN(true);
    Run run(*way, report);
    Before start;
    if (run.on_gpu()) {
        {
            // One-time creation of handles and random number tables.
            const auto warm = run.ints({64, 64});
            static_cast<void>(at::mm(warm, warm).sum().item<float>());
            static_cast<void>(
                at::mm(warm.to(at::kBFloat16), warm.to(at::kBFloat16)).sum().item<float>());
        }
        // Cleared, because the baseline must not hide equally large memory held by the scenario.
        at::cuda::clearCublasWorkspaces();
        c10::cuda::CUDACachingAllocator::emptyCache();
        start = before();
        c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    }
    at::manual_seed(1);
    if (!entry.early) {
        way->install();
    }
    try {
        entry.body(run);
    } catch (...) {
        report.note(Report::uncaught, describe_exception());
    }
    if (run.on_gpu()) {
        note_memory(run);
        probe(run, start);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const bool cpu = argc > 1 && std::strcmp(argv[1], "--cpu") == 0;
    argc -= cpu;
    argv += cpu;
    const auto all = everything();
    Program program;
    program.ways = cpu ? std::vector<std::string>{"eager", "again"}
                       : std::vector<std::string>{"stock", "blocks", "mempool"};
    for (const auto& entry : all) {
        if (!cpu || entry.anywhere) {
            program.scenarios.push_back({entry.name, entry.alone, entry.ends_badly});
        }
    }
    if (!cpu) {
        program.known = known_differences();
    }
    program.run = [&](const std::string& scenario, const std::string& way, Report& report) {
        for (const auto& entry : all) {
            if (entry.name == scenario) {
                return run_one(entry, way, report);
            }
        }
        TORCH_CHECK(false, "no scenario is called ", scenario);
    };
    int devices = 0;
    const bool child = argc > 1 && std::strcmp(argv[1], "--scenario") == 0;
    const bool list = argc > 1 && std::strcmp(argv[1], "--list") == 0;
    if (!cpu && !child && !list && (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)) {
        std::printf("SKIPPED: needs a GPU, scripts/gpu.sh runs it\n");
        return 77;
    }
    return program_main(program, argc, argv);
}
