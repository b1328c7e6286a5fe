// Blocks freed during a capture after record_stream(), and the point in the graph from which their
// bytes can be reused.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "nodes.hpp"

namespace vmmgraph::torch {

// Access to the graph under capture; tests substitute their own graph.
struct CaptureView {
    std::optional<CaptureFront> (*front)(cudaStream_t) = &front_of;
    std::optional<Nodes> (*dependencies)(cudaGraphNode_t) = &dependencies_of;
};

// Parked blocks of one capture at a time. The last nodes of all streams that use a freed block are
// its markers. Once the block's own stream depends on all markers, its later work runs after every
// use. Torch does the same for its own pools with graph_capture_record_stream_reuse. Thread-safe.
class ParkedBlocks {
public:
    explicit ParkedBlocks(CaptureView view = {}) : view_(view) {}

    // Adds a stream to the users of a live block of `own`.
    void note(void* block, cudaStream_t own, cudaStream_t stream) {
        const std::lock_guard lock(mutex_);
        auto& noted = noted_[block];
        noted.own = own;
        if (std::find(noted.streams.begin(), noted.streams.end(), stream) == noted.streams.end()) {
            noted.streams.push_back(stream);
        }
        any_.store(true, std::memory_order_release);
    }

    // Parks a freed block if all its streams are in one capture; otherwise the block stays busy
    // until the seal.
    void freed(void* block) {
        if (!any_.load(std::memory_order_acquire)) {
            return;
        }
        const std::lock_guard lock(mutex_);
        const auto found = noted_.find(block);
        if (found == noted_.end()) {
            return;
        }
        auto noted = std::move(found->second);
        noted_.erase(found);
        noted.streams.push_back(noted.own);
        Parked parked{block, noted.own, {}};
        std::optional<unsigned long long> capture;
        for (auto* const stream : noted.streams) {
            const auto front = view_.front(stream);
            if (!front || (capture && *capture != front->capture)) {
                return;
            }
            capture = front->capture;
            parked.markers.insert(parked.markers.end(), front->nodes.begin(), front->nodes.end());
        }
        begin(*capture);
        parked_.push_back(std::move(parked));
    }

    // Removes and returns the stream's parked blocks with all uses ordered before the stream's next
    // work.
    std::vector<void*> joined(cudaStream_t own) {
        if (!any_.load(std::memory_order_acquire)) {
            return {};
        }
        const std::lock_guard lock(mutex_);
        const auto of_stream = [&](const Parked& one) { return one.own == own; };
        if (std::none_of(parked_.begin(), parked_.end(), of_stream)) {
            return {};
        }
        const auto front = view_.front(own);
        if (!front || front->capture != capture_) {
            return {};
        }
        const auto& behind = reach(own, front->nodes);
        return take([&](const Parked& one) {
            return of_stream(one) && std::all_of(one.markers.begin(), one.markers.end(),
                                                 [&](auto* node) { return behind.contains(node); });
        });
    }

    // Removes and returns all parked blocks after a capture, which has joined its streams. Forgets
    // the noted streams: the program may destroy them, and CUDA aborts the process on a capture
    // query of a destroyed stream.
    std::vector<void*> end() {
        const std::lock_guard lock(mutex_);
        noted_.clear();
        auto all = take([](const Parked&) { return true; });
        reached_.clear();
        return all;
    }

private:
    struct Noted {
        cudaStream_t own = nullptr;
        std::vector<cudaStream_t> streams;
    };
    struct Parked {
        void* block;
        cudaStream_t own;
        Nodes markers;
    };

    // Blocks parked in a capture that was never ended stay busy until the seal: its nodes may be
    // destroyed.
    void begin(unsigned long long capture) {
        if (capture != capture_) {
            parked_.clear();
            reached_.clear();
            capture_ = capture;
        }
    }

    // Returns all nodes the stream's next work depends on. Visits each node once per stream.
    const std::unordered_set<cudaGraphNode_t>& reach(cudaStream_t stream, Nodes waiting) {
        auto& reached = reached_[stream];
        while (!waiting.empty()) {
            auto* const node = waiting.back();
            waiting.pop_back();
            if (reached.insert(node).second) {
                // With edge data (a programmatic launch), work may begin before its dependency is
                // done.
                if (const auto before = view_.dependencies(node)) {
                    waiting.insert(waiting.end(), before->begin(), before->end());
                }
            }
        }
        return reached;
    }

    template <class Which>
    std::vector<void*> take(Which&& which) {
        std::vector<void*> taken;
        std::erase_if(parked_, [&](const Parked& one) {
            if (!which(one)) {
                return false;
            }
            taken.push_back(one.block);
            return true;
        });
        return taken;
    }

    CaptureView view_;
    std::mutex mutex_;
    std::atomic<bool> any_{false};
    std::unordered_map<void*, Noted> noted_;
    std::vector<Parked> parked_;
    std::unordered_map<cudaStream_t, std::unordered_set<cudaGraphNode_t>> reached_;
    unsigned long long capture_ = 0;
};

}  // namespace vmmgraph::torch
