// What the hostile tests share.
#pragma once
#include <gtest/gtest.h>
#include <vmmgraph/vmmgraph.h>

#include <cstdint>
#include <string>

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

// This thread's last failure in words.
inline std::string last_message() {
    char text[256];
    EXPECT_EQ(vmmgraph_last_error_message(text, sizeof text, nullptr), VMMGRAPH_OK);
    return text;
}
