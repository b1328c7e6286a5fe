#include "device_writes.hpp"

#include <cstdint>

#include <ATen/core/TensorBody.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/from_blob.h>

namespace vmmgraph::engine {
namespace {

// A range of device bytes.
struct Bytes {
    void* start;
    std::int64_t length;
};

// Returns the widest integer type which divides all addresses and lengths, since torch batches only
// tensors of one dtype.
c10::ScalarType widest(const std::vector<Bytes>& all) {
    std::uintptr_t bits = 0;
    for (const auto& bytes : all) {
        bits |= reinterpret_cast<std::uintptr_t>(bytes.start) |
                static_cast<std::uintptr_t>(bytes.length);
    }
    return bits % 8 == 0 ? at::kLong : bits % 4 == 0 ? at::kInt : at::kByte;
}

std::vector<at::Tensor> view(const std::vector<Bytes>& all, c10::ScalarType dtype,
                             c10::Device device) {
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    std::vector<at::Tensor> tensors;
    tensors.reserve(all.size());
    for (const auto& bytes : all) {
        const auto elements = bytes.length / static_cast<std::int64_t>(c10::elementSize(dtype));
        tensors.push_back(at::for_blob(bytes.start, {elements})
                              .options(options)
                              .target_device(device)
                              .make_tensor());
    }
    return tensors;
}

// Returns true if the value has an element.
bool has_data(const DeviceWrite& write) { return write.value.defined() && write.value.numel() > 0; }

// Returns true if the value is the beginning of its place, byte for byte.
bool leads(const DeviceWrite& write) {
    return write.value.is_contiguous() &&
           write.value.sizes().slice(1) == write.place.sizes().slice(1);
}

at::Tensor corner(const DeviceWrite& write) {
    auto corner = write.place;
    for (std::int64_t i = 0; i < corner.dim(); ++i) {
        corner = corner.narrow(i, 0, write.value.size(i));
    }
    return corner;
}

// Repeats the last elements along each dimension, innermost first, so every element comes from the
// nearest one of the corner.
void repeat_last(const DeviceWrite& write) {
    for (auto along = write.place.dim() - 1; along >= 0; --along) {
        auto reached = write.place;
        for (std::int64_t i = 0; i < along; ++i) {
            reached = reached.narrow(i, 0, write.value.size(i));
        }
        const auto there = write.value.size(along);
        const auto missing = reached.size(along) - there;
        if (missing > 0) {
            auto rest = reached.narrow(along, there, missing);
            rest.copy_(reached.narrow(along, there - 1, 1).expand_as(rest));
        }
    }
}

}  // namespace

void write(const std::vector<DeviceWrite>& writes) {
    if (writes.empty()) {
        return;
    }
    std::vector<Bytes> from;
    std::vector<Bytes> to;
    std::vector<Bytes> zeros;
    for (const auto& one : writes) {
        const auto whole = static_cast<std::int64_t>(one.place.nbytes());
        auto* const start = static_cast<char*>(one.place.mutable_data_ptr());
        // Leading bytes without padding.
        std::int64_t kept = 0;
        if (has_data(one) && leads(one)) {
            kept = static_cast<std::int64_t>(one.value.nbytes());
            from.push_back({const_cast<void*>(one.value.const_data_ptr()), kept});
            to.push_back({start, kept});
        } else if (has_data(one) && one.value.sizes() == one.place.sizes()) {
            kept = whole;
        }
        if (kept == whole) {
            continue;
        }
        const bool repeats = one.pad.rule == VMMGRAPH_PAD_REPEAT_LAST && has_data(one);
        if (one.pad.rule == VMMGRAPH_PAD_VALUE) {
            const auto rows = kept > 0 ? one.value.size(0) : 0;
            one.place.narrow(0, rows, one.place.size(0) - rows).fill_(one.pad.element);
        } else if (!repeats) {
            zeros.push_back({start + kept, whole - kept});
        }
    }
    // Padding first: data narrower than its place overwrites the padding.
    const auto device = writes.front().place.device();
    if (!zeros.empty()) {
        at::_foreach_zero_(view(zeros, widest(zeros), device));
    }
    if (!to.empty()) {
        auto all = to;
        all.insert(all.end(), from.begin(), from.end());
        const auto dtype = widest(all);
        at::_foreach_copy_(view(to, dtype, device), view(from, dtype, device), true);
    }
    for (const auto& one : writes) {
        if (!has_data(one)) {
            continue;
        }
        if (!leads(one)) {
            corner(one).copy_(one.value, true);
        }
        if (one.pad.rule == VMMGRAPH_PAD_REPEAT_LAST) {
            repeat_last(one);
        }
    }
}

void copy_by_kernel(void* to, const void* from, std::size_t bytes, c10::Device device) {
    if (bytes == 0) {
        return;
    }
    const auto length = static_cast<std::int64_t>(bytes);
    const std::vector<Bytes> all{{to, length}, {const_cast<void*>(from), length}};
    const auto tensors = view(all, widest(all), device);
    auto into = tensors[0];
    // Not a copy: torch copies contiguous tensors of one dtype by a copy of the runtime.
    at::bitwise_or_out(into, tensors[1], 0);
}

}  // namespace vmmgraph::engine
