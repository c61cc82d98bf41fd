// Belady's optimal policy (1966) on a trace: knows the future, and is the upper limit in `kvcache trace simulate`.
// Plain twin with the same results: kvcache/trace/simulate.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcache {

// A trace as chains of block numbers.
struct Chains {
    const std::int64_t* starts;  // (requests + 1): where each request's blocks begin
    const std::int32_t* blocks;
    std::size_t requests, unique;
};

// Writes the number of resident leading blocks of each request to `hits`. The victim is the block whose next use is
// latest, the deeper of a chain first. A parent is used whenever its child is, so this is optimal for prefixes too.
void replay_optimal(const Chains& chains, std::size_t capacity, std::int32_t* hits);

}  // namespace kvcache
