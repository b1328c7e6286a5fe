// Measurement of one cell in this process: eager references, captures, checked replays, timed
// replays.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "driver.hpp"
#include "model.hpp"
#include "row.hpp"
#include "ways.hpp"

namespace shootout {

// Sets torch's current stream in a scope. Torch's own guard would require linking the CUDA runtime.
class CurrentStream {
public:
    explicit CurrentStream(c10::cuda::CUDAStream stream)
        : before_(c10::cuda::getCurrentCUDAStream(stream.device_index())) {
        c10::cuda::setCurrentCUDAStream(stream);
    }
    CurrentStream(const CurrentStream&) = delete;
    CurrentStream& operator=(const CurrentStream&) = delete;
    ~CurrentStream() { c10::cuda::setCurrentCUDAStream(before_); }

private:
    c10::cuda::CUDAStream before_;
};

class Measurement {
public:
    Measurement(const Options& options, Row& row)
        : options_(options),
          row_(row),
          shapes_(shapes_of(options, options.cell)),
          device_(at::kCUDA, options.device) {
        if (shapes_.empty())
            throw std::invalid_argument("no shapes");
    }

    // Fills the row, and calls `done` before any teardown.
    template <class Done>
    void run(Done&& done) {
        c10::cuda::set_device(static_cast<c10::DeviceIndex>(options_.device));
        at::globalContext().lazyInitDevice(at::kCUDA);
        at::globalContext().setSDPUseCuDNN(options_.cudnn);
        const c10::InferenceMode inference;
        const c10::cuda::CUDAStream capture_stream =
            c10::cuda::getStreamFromPool(false, device_.index());
        const c10::cuda::CUDAStream other_stream =
            c10::cuda::getStreamFromPool(false, device_.index());
        const auto start = std::chrono::steady_clock::now();
        describe();
        {
            const CurrentStream current(options_.cold ? other_stream : capture_stream);
            prepare();
        }
        const CurrentStream current(capture_stream);
        const std::unique_ptr<Way> way = make_way(options_.cell.way, options_);
        capture(*way, capture_stream);
        check(*way, capture_stream);
        time(*way, capture_stream);
        row_.set("cell_s", seconds_since(start));
        driver_.synchronize();
        done();
    }

private:
    static double mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }
    static std::int64_t growth(std::uint64_t now, std::uint64_t before) {
        return static_cast<std::int64_t>(now - before);
    }

    void describe() {
        char name[128] = "";
        driver_.DeviceGetName(name, sizeof name, options_.device);
        row_.set("gpu", name);
        row_.set("torch_built_for", vmmgraph::torch::built_for());
        row_.set("vmmgraph", vmmgraph::version());
        row_.set("shapes", static_cast<std::int64_t>(shapes_.size()));
        row_.set("layers", options_.layers);
        row_.set("hidden", options_.hidden);
        row_.set("cold", options_.cold);
        row_.set("eager_between", options_.eager_between);
        row_.set("expandable_segments",
                 c10::cuda::CUDACachingAllocator::CUDAAllocatorConfig::expandable_segments());
    }

    // Makes the model and records the eager logits and peak bytes of every shape.
    void prepare() {
        std::int64_t rows = 1;
        std::int64_t tokens = 1;
        for (const Shape& shape : shapes_) {
            rows = std::max(rows, shape.rows());
            tokens = std::max(tokens, shape.tokens);
        }
        model_ = std::make_unique<Model>(options_, rows, tokens, device_);
        const auto longs = at::TensorOptions(device_).dtype(at::kLong);
        // Different tokens per shape, so logits differ too.
        ids_ = at::randint(options_.vocabulary, {static_cast<std::int64_t>(shapes_.size()), tokens},
                           longs);
        between_ = at::randn({512, 2048}, at::TensorOptions(device_).dtype(at::kBFloat16));
        for (const Shape& shape : shapes_)
            model_->forward(shape);
        between_.mm(between_.t());

        using c10::CachingAllocator::StatType;
        constexpr auto kAll = static_cast<std::size_t>(StatType::AGGREGATE);
        for (std::size_t i = 0; i < shapes_.size(); ++i) {
            load(i);
            const auto before = c10::cuda::CUDACachingAllocator::getDeviceStats(device_.index())
                                    .allocated_bytes[kAll]
                                    .current;
            c10::cuda::CUDACachingAllocator::resetPeakStats(device_.index());
            model_->forward(shapes_[i]);
            const auto peak = c10::cuda::CUDACachingAllocator::getDeviceStats(device_.index())
                                  .allocated_bytes[kAll]
                                  .peak;
            floor_ = std::max(floor_, peak - before);
            references_.push_back(result(i).clone());
        }
        driver_.synchronize();
        c10::cuda::CUDACachingAllocator::emptyCache();
        row_.set("floor_mib", mib(floor_));
    }

    void capture(Way& way, c10::cuda::CUDAStream stream) {
        driver_.synchronize();
        const Reserved reserved_before = reserved();
        const std::uint64_t pool_before = way.pool_bytes();
        const std::uint64_t free_before = driver_.free_bytes();
        const std::uint64_t calls_before = way.driver_calls().value_or(0);
        std::int64_t pool_peak = 0;
        std::int64_t driver_peak = 0;
        double seconds = 0;
        for (const Shape& shape : shapes_) {
            const auto start = std::chrono::steady_clock::now();
            way.capture(stream, [this, shape] { model_->forward(shape); });
            seconds += seconds_since(start);
            pool_peak = std::max(pool_peak, growth(way.pool_bytes(), pool_before));
            driver_peak = std::max(driver_peak, growth(free_before, driver_.free_bytes()));
        }
        driver_.synchronize();
        const std::int64_t pool = growth(way.pool_bytes(), pool_before);
        const std::int64_t held = growth(free_before, driver_.free_bytes());
        const std::int64_t elsewhere = growth(reserved().in_default, reserved_before.in_default);
        const auto workspace = static_cast<std::int64_t>(way.workspace_bytes());

        row_.set("physical_mib", mib(pool));
        row_.set("peak_mib", mib(pool_peak));
        row_.set("driver_mib", mib(held));
        row_.set("driver_peak_mib", mib(driver_peak));
        if (way.captures()) {
            row_.set("exec_mib", mib(held - pool - elsewhere - workspace));
            row_.set("workspace_mib", mib(workspace));
            row_.set("default_pool_mib", mib(elsewhere));
            row_.set("capture_s", seconds, 4);
        } else {
            row_.none("exec_mib");
            row_.none("default_pool_mib");
            row_.none("capture_s");
        }
        row_.set("ratio",
                 static_cast<double>(pool) / static_cast<double>(std::max<std::int64_t>(floor_, 1)),
                 4);
        if (const auto calls = way.driver_calls()) {
            row_.set("driver_calls", growth(*calls, calls_before));
        } else {
            row_.none("driver_calls");
        }
        if (const auto opened = way.open_space_us()) {
            row_.set("open_space_us", *opened, 1);
        } else {
            row_.none("open_space_us");
        }
        if (const auto* ours = dynamic_cast<const VmmGraph*>(&way)) {
            const vmmgraph::SealReport sum = ours->sum();
            row_.set("report_peak_live_mib", mib(static_cast<std::int64_t>(sum.peak_live_bytes)));
            row_.set("report_maps", static_cast<std::int64_t>(sum.maps));
            row_.set("report_driver_ms", static_cast<double>(sum.driver_ns) / 1e6, 1);
            row_.set("report_retained_mib", mib(static_cast<std::int64_t>(sum.retained_bytes)));
            row_.set("report_retained_blocks", static_cast<std::int64_t>(sum.retained_blocks));
        }
    }

    void check(Way& way, c10::cuda::CUDAStream stream) {
        std::vector<std::size_t> plan;
        for (std::size_t i = 0; i < 2 * shapes_.size(); ++i)
            plan.push_back(i % shapes_.size());
        std::mt19937_64 engine(7);
        for (std::size_t left = plan.size(); left > 1; --left)
            std::swap(plan[left - 1], plan[engine() % left]);

        std::int64_t wrong = 0;
        std::int64_t inexact = 0;
        double worst = 0;
        std::string wrong_shapes;
        for (const std::size_t i : plan) {
            load(i);
            // Logits not written by the replay stay NaN.
            model_->logits.fill_(std::numeric_limits<float>::quiet_NaN());
            way.replay(i, stream);
            if (!at::equal(result(i), references_[i])) {
                const double difference = (result(i) - references_[i]).abs().max().item<double>();
                const double limit = options_.tolerance * references_[i].abs().max().item<double>();
                // NaN fails this comparison.
                if (difference <= limit) {
                    ++inexact;
                    worst = std::max(worst, difference);
                } else {
                    ++wrong;
                    wrong_shapes += (wrong_shapes.empty() ? "" : " ") + shapes_[i].name();
                }
            }
            if (options_.eager_between)
                between_.mm(between_.t());
        }
        row_.set("replays_checked", static_cast<std::int64_t>(plan.size()));
        row_.set("wrong_replays", wrong);
        row_.set("inexact_replays", inexact);
        row_.set("worst_inexact", worst, 6);
        row_.set("compared", inexact == 0 ? "bitwise" : "tolerance");
        row_.set("wrong_shapes", wrong_shapes);
    }

    void time(Way& way, c10::cuda::CUDAStream stream) {
        for (const Shape& shape : kTimed) {
            const std::string key = "replay_ms_" + shape.name(),
                              host_key = "replay_host_us_" + shape.name();
            const auto found = std::find(shapes_.begin(), shapes_.end(), shape);
            if (found == shapes_.end()) {
                row_.none(key);
                row_.none(host_key);
                continue;
            }
            const auto index = static_cast<std::size_t>(found - shapes_.begin());
            load(index);
            for (int i = 0; i < 5; ++i)
                way.replay(index, stream);
            std::vector<Stopwatch> watches(static_cast<std::size_t>(options_.replays));
            for (Stopwatch& watch : watches) {
                watch.start(stream.stream());
                way.replay(index, stream);
                watch.stop(stream.stream());
            }
            std::vector<double> times, host;
            for (const Stopwatch& watch : watches)
                times.push_back(watch.milliseconds());
            // Host time of a replay on an idle device.
            for (int i = 0; i < options_.replays; ++i) {
                cudaStreamSynchronize(stream.stream());
                const auto start = std::chrono::steady_clock::now();
                way.replay(index, stream);
                host.push_back(1e6 * seconds_since(start));
            }
            row_.set(key, median(std::move(times)), 4);
            row_.set(host_key, median(std::move(host)), 2);
        }
    }

    static double median(std::vector<double> values) {
        std::sort(values.begin(), values.end());
        return (values[values.size() / 2] + values[(values.size() - 1) / 2]) / 2;
    }

    void load(std::size_t index) {
        model_->ids.copy_(ids_.select(0, static_cast<std::int64_t>(index)));
    }
    [[nodiscard]] at::Tensor result(std::size_t index) const {
        return model_->logits.narrow(0, 0, shapes_[index].rows());
    }

    const Options& options_;
    Row& row_;
    const Driver& driver_ = Driver::get();
    std::vector<Shape> shapes_;
    at::Device device_;
    std::unique_ptr<Model> model_;
    at::Tensor ids_, between_;
    std::vector<at::Tensor> references_;
    std::int64_t floor_ = 0;
};

}  // namespace shootout
