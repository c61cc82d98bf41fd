// Copies of whole blocks between an engine's pages and payloads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../layout/layout.h"

namespace kvcache {

// The layout of a block in a page and in its payload. Steps are in bytes; the axes are layer, K or V, token, head and
// element.
struct Geometry {
    const std::uint64_t* bases;  // (layers, kv): address of page 0
    u64 extents[MAX_AXES];
    i64 page_step;       // from one page to the next
    i64 page[MAX_AXES];  // first two unused: `bases` says where layers, K and V are
    i64 payload[MAX_AXES];
    u64 item_bytes;

    u64 block_bytes() const { return item_bytes * extents[0] * extents[1] * extents[2] * extents[3] * extents[4]; }
};

enum class Direction { Gather, Scatter };  // pages to payloads, payloads to pages

// Copies `blocks` blocks: block i between page `ids[i]` and the `block_bytes()` bytes at `payloads[i]`. Uses at most
// `threads` threads, the caller's included. `plain` uses memcpy only. No destination may overlap another or a source.
void copy_blocks(Direction direction, const Geometry& geometry, const std::int64_t* ids, std::uint8_t* const* payloads,
                 std::size_t blocks, unsigned threads, bool plain);

}  // namespace kvcache
