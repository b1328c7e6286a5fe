// What the hostile tests share.
#pragma once
#include <cstdint>

// A struct of the C interface, zeroed, with its size set.
template <class Struct>
Struct sized() {
    Struct value{};
    value.struct_size = sizeof(Struct);
    return value;
}

template <class Handle>
Handle garbage(std::uint64_t value) {
    return reinterpret_cast<Handle>(value);
}
