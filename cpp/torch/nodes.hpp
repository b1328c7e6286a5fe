// The nodes of a graph that was captured.
#pragma once

#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

namespace vmmgraph::torch {

using Nodes = std::vector<cudaGraphNode_t>;

// What `ask(to, count)` lists: first how many with null, then themselves. Nothing if it fails.
template <class Ask>
std::optional<Nodes> nodes_from(Ask&& ask) {
    std::size_t count = 0;
    if (ask(nullptr, &count) != cudaSuccess) {
        return std::nullopt;
    }
    Nodes nodes(count);
    if (count > 0 && ask(nodes.data(), &count) != cudaSuccess) {
        return std::nullopt;
    }
    return nodes;
}

// Those of a graph; nothing if it does not tell.
inline std::optional<Nodes> nodes_of(cudaGraph_t graph) {
    return nodes_from([graph](cudaGraphNode_t* to, std::size_t* count) { return cudaGraphGetNodes(graph, to, count); });
}

inline bool is(cudaGraphNode_t node, cudaGraphNodeType type) {
    auto found = cudaGraphNodeTypeEmpty;
    return cudaGraphNodeGetType(node, &found) == cudaSuccess && found == type;
}

// The neighbours of a node, by cudaGraphNodeGetDependencies or ...GetDependentNodes; nothing if an edge carries data. From CUDA 13 on
// these have a place for that data.
template <class Get>
std::optional<Nodes> neighbours(Get get, cudaGraphNode_t node) {
    return nodes_from([&](cudaGraphNode_t* to, std::size_t* count) {
        if constexpr (std::is_invocable_v<Get, cudaGraphNode_t, cudaGraphNode_t*, std::nullptr_t, std::size_t*>) {
            return get(node, to, nullptr, count);
        } else {
            return get(node, to, count);
        }
    });
}

// The nodes that a node waits for; nothing if an edge carries data.
inline std::optional<Nodes> dependencies_of(cudaGraphNode_t node) { return neighbours(&cudaGraphNodeGetDependencies, node); }

// A stream under capture: the capture's id, and the nodes that the stream's next work will wait for.
struct CaptureFront {
    unsigned long long capture;
    Nodes nodes;
};

// Nothing for a stream that is not under capture.
inline std::optional<CaptureFront> front_of(cudaStream_t stream) {
    auto status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    const cudaGraphNode_t* nodes = nullptr;
    std::size_t count = 0;
#if CUDART_VERSION >= 13000
    const auto asked = cudaStreamGetCaptureInfo(stream, &status, &capture, nullptr, &nodes, nullptr, &count);
#else
    const auto asked = cudaStreamGetCaptureInfo_v2(stream, &status, &capture, nullptr, &nodes, &count);
#endif
    if (asked != cudaSuccess || status != cudaStreamCaptureStatusActive) {
        return std::nullopt;
    }
    return CaptureFront{capture, Nodes(nodes, nodes + count)};
}

// What the next work of a stream under capture would wait for.
inline std::optional<Nodes> last_of(cudaStream_t stream) {
    auto front = front_of(stream);
    return front ? std::optional(std::move(front->nodes)) : std::nullopt;
}

}  // namespace vmmgraph::torch
