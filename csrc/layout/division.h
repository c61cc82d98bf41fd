// Division by a launch-time constant, as a multiplication and a shift.
//
// Granlund and Montgomery, "Division by invariant integers using multiplication", 1994. Dividends are below 2^31, so
// that the sum cannot overflow. The division instruction takes 20 times as long on a GPU.
#pragma once

#include "layout.h"

namespace kvcache {

using u32 = unsigned int;

struct Division {
    u32 divisor;  // 1 to 2^31
    u32 multiplier;
    u32 shift;
};

KV_HD inline Division division(u32 divisor) {
    Division made = {divisor, 0, 0};
    while ((1ull << made.shift) < divisor) ++made.shift;
    made.multiplier = static_cast<u32>((((1ull << made.shift) - divisor) << 32) / divisor + 1);
    return made;
}

// `dividend` is below 2^31.
KV_HD inline u32 quotient(const Division& by, u32 dividend) {
    const u32 high = static_cast<u32>(static_cast<u64>(dividend) * by.multiplier >> 32);
    return (high + dividend) >> by.shift;
}

}  // namespace kvcache
