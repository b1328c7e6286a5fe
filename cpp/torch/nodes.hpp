// The nodes of a graph that was captured.
#pragma once

#include <optional>
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

// What the next work of a stream under capture would wait for.
inline std::optional<Nodes> last_of(cudaStream_t stream) {
    auto status = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t* nodes = nullptr;
    std::size_t count = 0;
#if CUDART_VERSION >= 13000
    const auto asked = cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, nullptr, &count);
#else
    const auto asked = cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &nodes, &count);
#endif
    if (asked != cudaSuccess || status != cudaStreamCaptureStatusActive) {
        return std::nullopt;
    }
    return Nodes(nodes, nodes + count);
}

}  // namespace vmmgraph::torch
