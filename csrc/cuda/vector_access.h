// Shared by the copy kernels: the block list of a launch, and memory accesses of a chosen width.
#pragma once

#include "../layout/division.h"

namespace kvcache {

// Limits of one launch. Its job is passed by value, so that no device memory has to outlive the launch.
constexpr u32 ROOTS = 64, BLOCKS = 128;
constexpr u32 ARGUMENT_BYTES = 4096;  // accepted by every device

struct Block {
    u64 page;     // bytes from page 0 to this one
    u64 payload;  // address
};

template <int Width>
struct Vector;
template <>
struct alignas(16) Vector<16> {
    u64 low, high;
};
template <>
struct Vector<8> {
    u64 all;
};
template <>
struct Vector<4> {
    u32 all;
};
template <>
struct Vector<2> {
    unsigned short all;
};
template <>
struct Vector<1> {
    unsigned char all;
};

template <class Type>
KV_HD inline Type* pointer(u64 address) {
    return reinterpret_cast<Type*>(address);
}

}  // namespace kvcache
