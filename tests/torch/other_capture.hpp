// A capture outside the library, which no library call may invalidate.
#pragma once

#include <future>
#include <thread>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace other {

// Captures on another thread in global mode, torch's default: waiting for an event or allocating on
// any thread invalidates it, unless that thread exchanged its mode
// (cudaThreadExchangeStreamCaptureMode).
class Capture {
public:
    explicit Capture(cudaStream_t stream) : thread_([this, stream] { run(stream); }) {
        begun_.get_future().wait();
    }
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    ~Capture() {
        if (thread_.joinable()) {
            static_cast<void>(end());
        }
    }

    // Returns whether the capture succeeded with both nodes.
    bool end() {
        over_.set_value();
        thread_.join();
        return ended_ == cudaSuccess && nodes_ == 2;
    }

private:
    void run(cudaStream_t stream) {
        const auto node = [stream] {
            static_cast<void>(cudaLaunchHostFunc(stream, [](void*) {}, nullptr));
        };
        ended_ = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
        node();
        begun_.set_value();
        over_.get_future().wait();
        if (ended_ != cudaSuccess) {
            return;
        }
        node();
        cudaGraph_t graph = nullptr;
        ended_ = cudaStreamEndCapture(stream, &graph);
        if (graph != nullptr) {
            static_cast<void>(cudaGraphGetNodes(graph, nullptr, &nodes_));
            static_cast<void>(cudaGraphDestroy(graph));
        }
        static_cast<void>(cudaGetLastError());
    }

    cudaError_t ended_ = cudaSuccess;
    std::size_t nodes_ = 0;
    std::promise<void> begun_;
    std::promise<void> over_;
    std::thread thread_;
};

class Stream {
public:
    explicit Stream(unsigned flags = cudaStreamNonBlocking) {
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, flags), cudaSuccess);
    }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream() { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }
    [[nodiscard]] cudaStream_t get() const { return stream_; }

private:
    cudaStream_t stream_ = nullptr;
};

// Expects the capture to survive `call`, on a blocking and on a non-blocking stream. Each begins
// with `ready`.
template <class Ready, class F>
void expect_untouched(const char* what, Ready&& ready, F&& call) {
    for (const unsigned flags : {cudaStreamDefault, cudaStreamNonBlocking}) {
        ready();
        const Stream stream(flags);
        Capture capture(stream.get());
        call();
        EXPECT_TRUE(capture.end())
            << what << (flags == cudaStreamDefault ? ", beside a stream of the default kind" : "");
    }
}
template <class F>
void expect_untouched(const char* what, F&& call) {
    expect_untouched(what, [] {}, call);
}

}  // namespace other
