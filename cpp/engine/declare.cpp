#include "declare.hpp"

#include <cstring>

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

namespace vmmgraph::engine {
namespace {

template <class T>
std::uint64_t bits(T value) {
    std::uint64_t bits = 0;
    static_assert(sizeof(value) <= sizeof(bits));
    std::memcpy(&bits, &value, sizeof(value));
    return bits;
}

}  // namespace

std::int32_t to_c(c10::ScalarType dtype) {
    switch (dtype) {
        case c10::ScalarType::Bool:
            return VMMGRAPH_DTYPE_BOOL;
        case c10::ScalarType::Byte:
            return VMMGRAPH_DTYPE_U8;
        case c10::ScalarType::Char:
            return VMMGRAPH_DTYPE_I8;
        case c10::ScalarType::Short:
            return VMMGRAPH_DTYPE_I16;
        case c10::ScalarType::Int:
            return VMMGRAPH_DTYPE_I32;
        case c10::ScalarType::Long:
            return VMMGRAPH_DTYPE_I64;
        case c10::ScalarType::Half:
            return VMMGRAPH_DTYPE_F16;
        case c10::ScalarType::BFloat16:
            return VMMGRAPH_DTYPE_BF16;
        case c10::ScalarType::Float:
            return VMMGRAPH_DTYPE_F32;
        case c10::ScalarType::Double:
            return VMMGRAPH_DTYPE_F64;
        case c10::ScalarType::Float8_e4m3fn:
        case c10::ScalarType::Float8_e5m2:
            return VMMGRAPH_DTYPE_F8;
        default:
            refuse(VMMGRAPH_ERROR_INVALID_ARGUMENT,
                   std::string("cannot declare the input: dtype ") + c10::toString(dtype) +
                       " is not supported; use an integer, floating-point or bool dtype");
    }
}

std::uint64_t bits_of(const c10::Scalar& element, c10::ScalarType dtype) {
    // An element outside the dtype's range throws c10::Error, with the value in its message.
    switch (dtype) {
        case c10::ScalarType::Bool:
            return element.toBool() ? 1 : 0;
        case c10::ScalarType::Byte:
            return element.toByte();
        case c10::ScalarType::Char:
            return bits(element.toChar());
        case c10::ScalarType::Short:
            return bits(element.toShort());
        case c10::ScalarType::Int:
            return bits(element.toInt());
        case c10::ScalarType::Long:
            return bits(element.toLong());
        case c10::ScalarType::Half:
            return bits(element.toHalf());
        case c10::ScalarType::BFloat16:
            return bits(element.toBFloat16());
        case c10::ScalarType::Float:
            return bits(element.toFloat());
        case c10::ScalarType::Double:
            return bits(element.toDouble());
        case c10::ScalarType::Float8_e4m3fn:
            return bits(c10::Float8_e4m3fn(element.toFloat()));
        case c10::ScalarType::Float8_e5m2:
            return bits(c10::Float8_e5m2(element.toFloat()));
        default:
            return static_cast<std::uint64_t>(to_c(dtype));
    }
}

std::string text_of(const Key& key) {
    return std::to_string(key[Axis::tokens]) + " tokens, batch " +
           std::to_string(key[Axis::batch]) + ", pages " + std::to_string(key[Axis::pages]) +
           ", variant " + std::to_string(key.variant);
}

}  // namespace vmmgraph::engine
