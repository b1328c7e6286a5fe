#include "device_writes.hpp"

#include <cstdint>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/from_blob.h>

namespace vmmgraph::engine {
namespace {

// Bytes somewhere on the device.
struct Bytes {
    void* start;
    std::int64_t length;
};

// The widest integer that everything is a multiple of: torch takes many tensors in one launch only if they are of one dtype.
c10::ScalarType widest(const std::vector<Bytes>& all) {
    std::uintptr_t bits = 0;
    for (const auto& bytes : all) {
        bits |= reinterpret_cast<std::uintptr_t>(bytes.start) | static_cast<std::uintptr_t>(bytes.length);
    }
    return bits % 8 == 0 ? at::kLong : bits % 4 == 0 ? at::kInt : at::kByte;
}

std::vector<at::Tensor> view(const std::vector<Bytes>& all, c10::ScalarType dtype, c10::Device device) {
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    std::vector<at::Tensor> tensors;
    tensors.reserve(all.size());
    for (const auto& bytes : all) {
        const auto elements = bytes.length / static_cast<std::int64_t>(c10::elementSize(dtype));
        tensors.push_back(at::for_blob(bytes.start, {elements}).options(options).target_device(device).make_tensor());
    }
    return tensors;
}

}  // namespace

void write(const std::vector<DeviceWrite>& writes) {
    if (writes.empty()) {
        return;
    }
    std::vector<Bytes> from;
    std::vector<Bytes> to;
    std::vector<Bytes> zeros;
    for (const auto& [place, value, pad] : writes) {
        const auto written = value.defined() ? static_cast<std::int64_t>(value.nbytes()) : 0;
        const auto whole = static_cast<std::int64_t>(place.nbytes());
        auto* const start = static_cast<char*>(place.mutable_data_ptr());
        if (written > 0) {
            from.push_back({const_cast<void*>(value.const_data_ptr()), written});
            to.push_back({start, written});
        }
        const bool zero = pad && (pad->rule == VMMGRAPH_PAD_ZERO || (pad->rule == VMMGRAPH_PAD_REPEAT_LAST && written == 0));
        if (zero && written < whole) {
            zeros.push_back({start + written, whole - written});
        }
    }
    const auto device = writes.front().place.device();
    if (!to.empty()) {
        auto all = to;
        all.insert(all.end(), from.begin(), from.end());
        const auto dtype = widest(all);
        at::_foreach_copy_(view(to, dtype, device), view(from, dtype, device), true);
    }
    if (!zeros.empty()) {
        at::_foreach_zero_(view(zeros, widest(zeros), device));
    }
    for (const auto& [place, value, pad] : writes) {
        const auto rows = value.defined() ? value.size(0) : 0;
        const auto rest = place.size(0) - rows;
        if (!pad || rest == 0) {
            continue;
        }
        if (pad->rule == VMMGRAPH_PAD_VALUE) {
            place.narrow(0, rows, rest).fill_(pad->element);
        } else if (pad->rule == VMMGRAPH_PAD_REPEAT_LAST && rows > 0) {
            auto end = place.narrow(0, rows, rest);
            end.copy_(place.narrow(0, rows - 1, 1).expand_as(end));
        }
    }
}

}  // namespace vmmgraph::engine
