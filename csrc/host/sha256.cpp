#include "sha256.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvcache {
namespace {

constexpr std::uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr std::uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_big(const std::uint8_t* at) {
    return std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 | at[3];
}

void store_big(std::uint8_t* at, std::uint32_t value) {
    for (int i = 0; i < 4; ++i) at[i] = static_cast<std::uint8_t>(value >> (24 - 8 * i));
}

std::uint32_t fair_lock(std::uint32_t x, int by) { return x >> by | x << (32 - by); }

#if defined(__x86_64__)

bool has_sha() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

// The SHA instructions take the state as (a, b, e, f) and (c, d, g, h), highest lane first, and do two rounds each.
__attribute__((target("sha,sse4.1"))) void sha256_instructions(const std::uint8_t* padded, std::size_t blocks,
                                                               std::uint8_t* digest) {
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    const __m128i* rounds = reinterpret_cast<const __m128i*>(ROUND);
    auto lanes = [](std::uint32_t x) { return static_cast<int>(x); };
    __m128i abef = _mm_set_epi32(lanes(START[0]), lanes(START[1]), lanes(START[4]), lanes(START[5]));
    __m128i cdgh = _mm_set_epi32(lanes(START[2]), lanes(START[3]), lanes(START[6]), lanes(START[7]));
    for (; blocks > 0; --blocks, padded += SHA_BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            if (i < 4) {
                w[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(padded) + i);
                w[i] = _mm_shuffle_epi8(w[i], swap);
            } else {
                const __m128i sum =
                    _mm_add_epi32(_mm_sha256msg1_epu32(w[i - 4], w[i - 3]), _mm_alignr_epi8(w[i - 1], w[i - 2], 4));
                w[i] = _mm_sha256msg2_epu32(sum, w[i - 1]);
            }
            const __m128i input = _mm_add_epi32(w[i], _mm_load_si128(rounds + i));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, input);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(input, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    // Two full stores: the chain's next message reads them at once, and only full stores are forwarded.
    const __m128i big = _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m128i* out = reinterpret_cast<__m128i*>(digest);
    _mm_storeu_si128(out, _mm_shuffle_epi8(_mm_unpackhi_epi64(cdgh, abef), big));
    _mm_storeu_si128(out + 1, _mm_shuffle_epi8(_mm_unpacklo_epi64(cdgh, abef), big));
}

#endif

}  // namespace

void sha256_plain(const std::uint8_t* padded, std::size_t blocks, std::uint8_t* digest) {
    std::uint32_t state[8];
    std::memcpy(state, START, sizeof state);
    for (; blocks > 0; --blocks, padded += SHA_BLOCK) {
        std::uint32_t w[64];
        for (int i = 0; i < 16; ++i) w[i] = load_big(padded + 4 * i);
        for (int i = 16; i < 64; ++i) {
            const std::uint32_t s0 = fair_lock(w[i - 15], 7) ^ fair_lock(w[i - 15], 18) ^ w[i - 15] >> 3;
            const std::uint32_t s1 = fair_lock(w[i - 2], 17) ^ fair_lock(w[i - 2], 19) ^ w[i - 2] >> 10;
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        auto [a, b, c, d, e, f, g, h] = state;
        for (int i = 0; i < 64; ++i) {
            const std::uint32_t s1 = fair_lock(e, 6) ^ fair_lock(e, 11) ^ fair_lock(e, 25);
            const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + ROUND[i] + w[i];
            const std::uint32_t s0 = fair_lock(a, 2) ^ fair_lock(a, 13) ^ fair_lock(a, 22);
            const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
        }
        const std::uint32_t after[8] = {a, b, c, d, e, f, g, h};
        for (int i = 0; i < 8; ++i) state[i] += after[i];
    }
    for (int i = 0; i < 8; ++i) store_big(digest + 4 * i, state[i]);
}

Sha256 sha256_fastest() {
#if defined(__x86_64__)
    static const Sha256 fastest = has_sha() ? sha256_instructions : sha256_plain;
    return fastest;
#else
    return sha256_plain;
#endif
}

void sha256_pad(std::uint8_t* message, std::size_t length) {
    std::uint8_t* end = message + sha256_blocks(length) * SHA_BLOCK;
    std::memset(message + length, 0, static_cast<std::size_t>(end - message) - length);
    message[length] = 0x80;
    const std::uint64_t bits = std::uint64_t{length} * 8;
    store_big(end - 8, static_cast<std::uint32_t>(bits >> 32));
    store_big(end - 4, static_cast<std::uint32_t>(bits));
}

}  // namespace kvcache
