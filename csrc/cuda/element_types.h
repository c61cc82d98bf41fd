// Conversion of elements to float and to eight bits, bit for bit as kvcache/codec/quantised.py.
//
// CuPy and NVRTC may compile with flushed denormals and fused products. The two operations whose result this could
// change are therefore written as instructions.
#pragma once

#include "../layout/division.h"

namespace kvcache {

using u8 = unsigned char;
using u16 = unsigned short;

#ifdef __CUDA_ARCH__
__device__ inline u32 bits_of(float value) { return __float_as_uint(value); }
__device__ inline float float_of(u32 bits) { return __uint_as_float(bits); }
__device__ inline float multiply(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}
__device__ inline float divide(float a, float b) {
    float ratio;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(ratio) : "f"(a), "f"(b));
    return ratio;
}
#else
KV_HD inline u32 bits_of(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
KV_HD inline float float_of(u32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
KV_HD inline float multiply(float a, float b) { return a * b; }
KV_HD inline float divide(float a, float b) { return a / b; }
#endif

// The bits of a float without the lowest `dropped`, rounded to the nearest, ties to even.
KV_HD inline u32 rounded(u32 bits, int dropped) {
    return (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped;
}

// A float that is small compared to `grid`, in units of the last place of `grid`, ties to even.
KV_HD inline u32 steps_of(float value, float grid) { return bits_of(value + grid) - bits_of(grid); }

// Element types. `widen` is exact. `narrow` rounds finite values within range to the nearest, ties to even.
struct Bf16 {
    using Word = u16;
    static KV_HD float widen(Word word) { return float_of(static_cast<u32>(word) << 16); }
    static KV_HD Word narrow(float value) { return static_cast<Word>(rounded(bits_of(value), 16)); }
};

struct Fp16 {
    using Word = u16;
    static KV_HD float widen(Word word) {
        const u32 sign = (word & 0x8000u) << 16, size = word & 0x7fffu;
        if (size < 0x0400) return float_of(bits_of(static_cast<float>(size) * 0x1p-24f) | sign);
        return float_of(((size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23)) | sign);
    }
    static KV_HD Word narrow(float value) {
        const u32 bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
        const u32 small = steps_of(float_of(size), 0.5f), normal = rounded(size, 13) - (112 << 10);
        return static_cast<Word>((size < 113u << 23 ? small : normal) | sign);
    }
};

struct Fp32 {
    using Word = u32;
    static KV_HD float widen(Word word) { return float_of(word); }
    static KV_HD Word narrow(float value) { return bits_of(value); }
};

// The word without its sign, ordered by magnitude; infinity and NaN are above all numbers.
template <class Word>
KV_HD inline u32 magnitude(Word word) {
    return word & (static_cast<Word>(~Word{0}) >> 1);
}

// Eight-bit formats: `code` accepts numbers up to LARGEST and half a step more; `value` decodes.
struct Fp8 {
    static constexpr float LARGEST = 448;
    static KV_HD u8 code(float value) {
        const u32 bits = bits_of(value), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
        const u32 small = steps_of(float_of(size), 0x1p14f), normal = rounded(size, 20) - (120 << 3);
        return static_cast<u8>((size < 121u << 23 ? small : normal) | sign);
    }
    static KV_HD float value(u8 code) {
        const u32 sign = (code & 0x80u) << 24, size = code & 0x7fu;
        if (size < 8) return float_of(bits_of(static_cast<float>(size) * 0x1p-9f) | sign);
        return float_of((size == 0x7f ? 0x7fc00000 : (size << 20) + (120u << 23)) | sign);
    }
};

struct Int8 {
    static constexpr float LARGEST = 127;
    static KV_HD u8 code(float value) { return static_cast<u8>(bits_of(value + 0x1.8p23f)); }
    static KV_HD float value(u8 code) { return static_cast<float>(static_cast<signed char>(code)); }
};

}  // namespace kvcache
