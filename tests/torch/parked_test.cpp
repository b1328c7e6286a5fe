// Reuse of blocks used by several streams of a capture, over a simulated graph.
#include <map>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "../../cpp/torch/parked.hpp"

namespace {

using vmmgraph::torch::CaptureFront;
using vmmgraph::torch::Nodes;
using vmmgraph::torch::ParkedBlocks;

cudaStream_t stream(std::uintptr_t number) { return reinterpret_cast<cudaStream_t>(number << 8); }
cudaGraphNode_t node(std::uintptr_t number) {
    return reinterpret_cast<cudaGraphNode_t>(number << 12);
}
void* block(std::uintptr_t number) { return reinterpret_cast<void*>(number << 20); }

struct Graph {
    std::map<cudaStream_t, CaptureFront> fronts;
    // Empty: an edge to the node has data.
    std::map<cudaGraphNode_t, std::optional<Nodes>> dependencies;
    std::uintptr_t nodes = 0;
    unsigned long long capture = 1;
    std::size_t looks = 0;
    // Queries of a stream's capture.
    std::size_t asked = 0;

    void work(cudaStream_t on) {
        auto* const next = node(++nodes);
        auto& front = fronts[on];
        dependencies[next] = front.nodes;
        front = {capture, {next}};
    }
    // Makes `waits` wait for `other`.
    void wait(cudaStream_t waits, cudaStream_t other) {
        auto& front = fronts[waits];
        front.capture = capture;
        const auto& nodes = fronts[other].nodes;
        front.nodes.insert(front.nodes.end(), nodes.begin(), nodes.end());
    }
};

Graph* graph = nullptr;

std::optional<CaptureFront> front(cudaStream_t of) {
    ++graph->asked;
    const auto found = graph->fronts.find(of);
    return found == graph->fronts.end() ? std::nullopt : std::optional(found->second);
}
std::optional<Nodes> dependencies(cudaGraphNode_t of) {
    ++graph->looks;
    return graph->dependencies.at(of);
}

class Parked : public testing::Test {
protected:
    void SetUp() override { graph = &graph_; }

    void use(void* of) {
        graph_.work(main);
        graph_.wait(side, main);
        graph_.work(side);
        blocks.note(of, main, side);
    }

    Graph graph_;
    ParkedBlocks blocks{{&front, &dependencies}};
    const cudaStream_t main = stream(1);
    const cudaStream_t side = stream(2);
    const cudaStream_t other = stream(3);
};

using Blocks = std::vector<void*>;

TEST_F(Parked, ABlockIsJoinedOnceItsStreamWaitsForAllItsUses) {
    use(block(1));
    graph_.wait(other, side);
    graph_.work(other);
    blocks.note(block(1), main, other);
    EXPECT_EQ(blocks.joined(main), Blocks{}) << "it is alive";
    blocks.freed(block(1));
    EXPECT_EQ(blocks.joined(main), Blocks{});
    graph_.wait(main, side);
    EXPECT_EQ(blocks.joined(main), Blocks{}) << "the third stream is not waited for";
    graph_.work(side);
    graph_.wait(main, other);
    graph_.work(main);
    EXPECT_EQ(blocks.joined(side), Blocks{}) << "another stream's";
    EXPECT_EQ(blocks.joined(main), Blocks{block(1)});
    EXPECT_EQ(blocks.joined(main), Blocks{}) << "once";
}

TEST_F(Parked, WhatAStreamWasGivenBehindTheFreeIsNotWaitedFor) {
    use(block(1));
    blocks.freed(block(1));
    graph_.wait(main, side);
    use(block(2));
    blocks.freed(block(2));
    EXPECT_EQ(blocks.joined(main), Blocks{block(1)});
    graph_.wait(main, side);
    EXPECT_EQ(blocks.joined(main), Blocks{block(2)});
}

TEST_F(Parked, AnEdgeWithDataProvesNothing) {
    use(block(1));
    blocks.freed(block(1));
    graph_.wait(main, side);
    graph_.work(main);
    graph_.dependencies[node(graph_.nodes)] = std::nullopt;
    EXPECT_EQ(blocks.joined(main), Blocks{});
}

TEST_F(Parked, AStreamThatIsNotCapturedKeepsItsBlocksBusy) {
    use(block(1));
    blocks.note(block(1), main, stream(9));
    blocks.freed(block(1));
    graph_.wait(main, side);
    EXPECT_EQ(blocks.joined(main), Blocks{});
    EXPECT_EQ(blocks.end(), Blocks{});
}

TEST_F(Parked, TheEndOfTheCaptureJoinsAllAndTheNextOneKnowsNothingOfItsNodes) {
    use(block(1));
    blocks.freed(block(1));
    EXPECT_EQ(blocks.end(), Blocks{block(1)});
    use(block(2));
    blocks.freed(block(2));
    graph_.capture = 2;
    graph_.fronts.clear();
    graph_.work(main);
    graph_.wait(main, side);
    EXPECT_EQ(blocks.joined(main), Blocks{});
    use(block(3));
    blocks.freed(block(3));
    graph_.wait(main, side);
    EXPECT_EQ(blocks.joined(main), Blocks{block(3)});
    EXPECT_EQ(blocks.end(), Blocks{});
}

// The streams may be destroyed before the block.
TEST_F(Parked, StreamsOfAnEndedCaptureAreNotAsked) {
    use(block(1));
    EXPECT_EQ(blocks.end(), Blocks{});
    const auto asked = graph->asked;
    blocks.freed(block(1));
    EXPECT_EQ(graph->asked, asked);
    EXPECT_EQ(blocks.end(), Blocks{});
}

TEST_F(Parked, ALongCaptureLooksAtEachNodeOnceAStream) {
    for (std::uintptr_t step = 0; step < 500; ++step) {
        use(block(1 + step));
        blocks.freed(block(1 + step));
        graph_.wait(main, side);
        ASSERT_EQ(blocks.joined(main), Blocks{block(1 + step)});
    }
    EXPECT_LE(graph_.looks, graph_.nodes);
}

}  // namespace
