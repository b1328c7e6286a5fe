// Nodes of a captured graph.
#pragma once

#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

namespace vmmgraph::torch {

using Nodes = std::vector<cudaGraphNode_t>;

// Reads a list by `ask(to, count)`: first the count, with null, then the nodes. Empty optional on
// failure.
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

inline std::optional<Nodes> nodes_of(cudaGraph_t graph) {
    return nodes_from([graph](cudaGraphNode_t* to, std::size_t* count) {
        return cudaGraphGetNodes(graph, to, count);
    });
}

inline bool is(cudaGraphNode_t node, cudaGraphNodeType type) {
    auto found = cudaGraphNodeTypeEmpty;
    return cudaGraphNodeGetType(node, &found) == cudaSuccess && found == type;
}

// Neighbours of a node; empty optional if an edge carries data. CUDA 13 adds a parameter for edge
// data.
template <class Get>
std::optional<Nodes> neighbours(Get get, cudaGraphNode_t node) {
    return nodes_from([&](cudaGraphNode_t* to, std::size_t* count) {
        if constexpr (std::is_invocable_v<Get, cudaGraphNode_t, cudaGraphNode_t*, std::nullptr_t,
                                          std::size_t*>) {
            return get(node, to, nullptr, count);
        } else {
            return get(node, to, count);
        }
    });
}

inline std::optional<Nodes> dependencies_of(cudaGraphNode_t node) {
    return neighbours(&cudaGraphNodeGetDependencies, node);
}

// State of a stream under capture: the capture's id, and the nodes the stream's next work depends
// on.
struct CaptureFront {
    unsigned long long capture;
    Nodes nodes;
};

inline std::optional<CaptureFront> front_of(cudaStream_t stream) {
    auto status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    const cudaGraphNode_t* nodes = nullptr;
    std::size_t count = 0;
#if CUDART_VERSION >= 13000
    const auto asked =
        cudaStreamGetCaptureInfo(stream, &status, &capture, nullptr, &nodes, nullptr, &count);
#else
    const auto asked =
        cudaStreamGetCaptureInfo_v2(stream, &status, &capture, nullptr, &nodes, &count);
#endif
    if (asked != cudaSuccess || status != cudaStreamCaptureStatusActive) {
        return std::nullopt;
    }
    return CaptureFront{capture, Nodes(nodes, nodes + count)};
}

// Nodes the stream's next work depends on; empty optional outside captures.
inline std::optional<Nodes> last_of(cudaStream_t stream) {
    auto front = front_of(stream);
    return front ? std::optional(std::move(front->nodes)) : std::nullopt;
}

}  // namespace vmmgraph::torch
