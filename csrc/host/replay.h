// Replays part of a trace on an index with one tier, with the calls that a cache would make. The reference twin
// kvcache/index/reference/index.py must give exactly the same hits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "index.h"

namespace kvcache {

struct Requests {
    const std::int64_t* starts;      // (requests + 1): where each request's blocks begin
    const std::int32_t* blocks;      // block numbers
    const std::uint8_t* signatures;  // by block number
    std::size_t first, end;          // requests to replay
};

// `hits`: by request, from `first` on, the number of its leading blocks that were resident. `values`: a policy's table.
// `refuses`: a new block never replaces a more valuable one.
void replay(Index& index, const std::uint8_t* shard_key, const Requests& requests, std::uint64_t capacity,
            const double* values, bool refuses, std::int32_t* hits);

}  // namespace kvcache
