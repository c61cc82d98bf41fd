// Part of a trace played to an index of one tier, as a cache would live through it. Plain twin:
// kvcache/index/reference/index.py, which must do the same to the letter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "index.h"

namespace kvcache {

struct Requests {
    const std::int64_t* starts;      // where each request's blocks begin; one more than there are requests
    const std::int32_t* blocks;      // numbers of blocks
    const std::uint8_t* signatures;  // by number of a block
    std::size_t first, end;          // those to play
};

// `hits`: by request, from `first` on, how many of its first blocks were there. `values` is a policy's table.
// `refuses`: newcomers take the place of nothing that is worth more.
void replay(Index& index, const std::uint8_t* shard_key, const Requests& requests, std::uint64_t capacity,
            const double* values, bool refuses, std::int32_t* hits);

}  // namespace kvcache
