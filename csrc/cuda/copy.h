// One thread's part of a kernel that copies whole blocks between pages and payloads, for any layout. It also compiles
// for the host, where the tests run it thread by thread.
#pragma once

#include "vector_access.h"

namespace kvcache {

constexpr u32 UNROLL = 4;  // loads in flight per thread

enum class Direction { Gather, Scatter };  // pages to payloads, payloads to pages

struct Step {
    Division extent;
    i64 page;  // bytes from one index to the next in the page
    i64 payload;
};

struct Root {
    u64 page;  // address in page 0
    u64 payload;
};

// The job of one launch. Every pair of block and root is a piece of `vectors` accesses. A piece consists of fragments,
// contiguous on both sides, numbered along `axes` in the payload's order (the Walk of layout.h).
struct Job {
    Step axes[MAX_AXES];  // outermost to innermost; only the last `count` are used
    Division run;         // accesses in a fragment
    u32 count;
    u32 vectors;  // below 2^31
    u32 blocks;
    u32 roots;
    Root root[ROOTS];
    Block block[BLOCKS];
};

static_assert(sizeof(Job) <= ARGUMENT_BYTES);

// A thread's position in a piece and among the pieces, and the steps to its next positions.
struct Thread {
    u32 vector, vector_step;
    u32 piece, piece_step;
};

template <int Width>
KV_HD inline Place place_of(const Job& job, u32 vector) {
    u32 fragment = quotient(job.run, vector);
    const i64 within = static_cast<i64>(vector - fragment * job.run.divisor) * Width;
    Place place = {within, within};
#pragma unroll
    for (int i = MAX_AXES - 1; i >= 0; --i) {  // unrolled, so that the steps are read from the constant bank
        if (i < MAX_AXES - static_cast<int>(job.count)) break;
        const Step& axis = job.axes[i];
        const u32 outer = quotient(axis.extent, fragment);
        const i64 index = static_cast<i64>(fragment - outer * axis.extent.divisor);
        fragment = outer;
        place.page += index * axis.page;
        place.payload += index * axis.payload;
    }
    return place;
}

template <Direction direction, int Width>
KV_HD inline void copy(const Job& job, const Thread& thread) {
    using Access = Vector<Width>;
    for (u32 piece = thread.piece; piece < job.blocks * job.roots; piece += thread.piece_step) {
        const u32 block = piece / job.roots;
        const Root& root = job.root[piece - block * job.roots];
        const u64 page = root.page + job.block[block].page, payload = root.payload + job.block[block].payload;
        for (u32 first = thread.vector; first < job.vectors; first += UNROLL * thread.vector_step) {
            Access held[UNROLL];
            u64 to[UNROLL];
#pragma unroll
            for (u32 i = 0; i < UNROLL; ++i) {
                const u32 vector = first + i * thread.vector_step;
                if (vector >= job.vectors) break;
                const Place place = place_of<Width>(job, vector);
                const u64 at_page = page + static_cast<u64>(place.page);
                const u64 at_payload = payload + static_cast<u64>(place.payload);
                held[i] = *pointer<const Access>(direction == Direction::Gather ? at_page : at_payload);
                to[i] = direction == Direction::Gather ? at_payload : at_page;
            }
#pragma unroll
            for (u32 i = 0; i < UNROLL; ++i) {
                if (first + i * thread.vector_step >= job.vectors) break;
                *pointer<Access>(to[i]) = held[i];
            }
        }
    }
}

}  // namespace kvcache
