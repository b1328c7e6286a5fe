// Captures one model for three batch sizes in one arena, and compares each replay with eager work.
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cstdio>
#include <vector>
#include <vmmgraph/torch.hpp>

at::Tensor model(at::Tensor x, const at::Tensor& weight) {
    for (int layer = 0; layer < 8; ++layer) {
        x = at::relu(at::mm(x, weight));
    }
    return x.sum(1);
}

int main() {
    const c10::InferenceMode inference;
    vmmgraph::torch::install();  // once, before the first capture
    vmmgraph::SharedVmmAllocator arena(0);
    const auto stream = c10::cuda::getStreamFromPool();
    const c10::cuda::CUDAStreamGuard current(stream);

    const auto options = at::TensorOptions().device(at::kCUDA).dtype(at::kFloat);
    const at::Tensor weight = at::randn({4096, 4096}, options) / 64;
    std::vector<vmmgraph::torch::CapturedGraph> graphs;
    std::vector<at::Tensor> inputs, outputs;
    std::size_t sum = 0;
    for (const int batch : {1024, 2048, 4096}) {
        inputs.push_back(at::randn({batch, 4096}, options));
        stream.synchronize();  // a capture records only work of its own
        at::Tensor output;
        graphs.push_back(vmmgraph::torch::capture(arena, stream.stream(), [&] {
            const at::Tensor result = model(inputs.back(), weight);
            const vmmgraph::torch::KeptScope kept;  // the output gets bytes of its own
            output = result.clone();
        }));
        outputs.push_back(output);
        sum += graphs.back().report().peak_live_bytes;
    }
    bool equal = true;
    for (std::size_t i : {1, 2, 0}) {
        graphs[i].replay(stream.stream());
        equal = equal && at::allclose(outputs[i], model(inputs[i], weight), 1e-3, 1e-3);
    }
    std::printf("3 graphs in %zu MiB; sum of their peaks %zu MiB; equal to eager work: %s\n",
                arena.mapped_size() >> 20, sum >> 20, equal ? "yes" : "no");
    return equal ? 0 : 1;
}
