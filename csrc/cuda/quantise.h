// Kernels that quantise elements to eight bits when they gather pages, and restore them when they scatter payloads. The
// format is that of docs/spec/codec.md: scales by layer, K or V, head and run of 16 tokens, then one code per element
// in the layout's order.
//
// A warp handles a scale group. It reads the elements once for the largest, and again, from the cache, for their codes.
#pragma once

#include "element_types.h"
#include "vector_access.h"

namespace kvcache {

constexpr u32 GROUP_TOKENS = 16;

#ifdef __CUDA_ARCH__
constexpr u32 LANES = 32;
__device__ inline u32 largest_of_lanes(u32 mine) {
#pragma unroll
    for (u32 other = LANES / 2; other > 0; other /= 2) {
        const u32 theirs = __shfl_xor_sync(0xffffffff, mine, other);
        mine = theirs > mine ? theirs : mine;
    }
    return mine;
}
#else
constexpr u32 LANES = 1;  // on the host one thread does the work of a warp
KV_HD inline u32 largest_of_lanes(u32 mine) { return mine; }
#endif

// The job of one launch: a scale group for every block, root (a layer and K or V), head and run of tokens.
struct QuantiseJob {
    Division heads;
    Division runs;  // of tokens
    u32 tokens;
    u32 dim;
    u32 blocks;
    u32 roots;
    u32 first_root;  // number in the shard; K and V of a layer are adjacent
    u32 kv;          // 2, or 1
    i64 page_token;  // bytes from one index to the next in the page
    i64 page_head;
    i64 layer;  // the same in the codes
    i64 either;
    i64 token;
    i64 head;
    i64 element;
    u64 codes;  // bytes of scales before them
    u64 root[ROOTS];
    Block block[BLOCKS];
};

static_assert(sizeof(QuantiseJob) <= ARGUMENT_BYTES);

struct ScaleGroup {
    u64 page;  // its first element, its scale, its first code
    u64 scale;
    u64 codes;
    u32 tokens;
};

KV_HD inline ScaleGroup scale_group(const QuantiseJob& job, u32 group) {
    u32 rest = quotient(job.runs, group);
    const u32 run = group - rest * job.runs.divisor;
    u32 piece = quotient(job.heads, rest);
    const u32 head = rest - piece * job.heads.divisor, block = piece / job.roots, root = piece - block * job.roots;
    const u32 at = job.first_root + root, layer = at / job.kv, either = at - layer * job.kv;
    const u32 first = run * GROUP_TOKENS, left = job.tokens - first;
    const u64 payload = job.block[block].payload;
    const i64 code = layer * job.layer + either * job.either + head * job.head + first * job.token;
    return {job.root[root] + job.block[block].page + static_cast<u64>(first * job.page_token + head * job.page_head),
            payload + 4ull * ((static_cast<u64>(at) * job.heads.divisor + head) * job.runs.divisor + run),
            payload + job.codes + static_cast<u64>(code), left < GROUP_TOKENS ? left : GROUP_TOKENS};
}

template <class Item, int Count>
struct Few {
    Item item[Count];
};

// One access of several items.
template <class Items>
union Whole {
    Vector<sizeof(Items)> all;
    Items items;
};
template <class Items>
KV_HD inline Items load(u64 address) {
    Whole<Items> whole;
    whole.all = *pointer<const Vector<sizeof(Items)>>(address);
    return whole.items;
}
template <class Items>
KV_HD inline void store(u64 address, const Items& items) {
    Whole<Items> whole;
    whole.items = items;
    *pointer<Vector<sizeof(Items)>>(address) = whole.all;
}

// Calls visit(elements' address, codes' address) for each `Count` adjacent elements of this lane.
template <class Word, int Count, class Visit>
KV_HD inline void each(const QuantiseJob& job, const ScaleGroup& group, u32 lane, Visit visit) {
    const u32 row = job.dim / Count;
    for (u32 i = lane; i < group.tokens * row; i += LANES) {
        const u32 token = i / row, at = (i - token * row) * Count;
        visit(group.page + static_cast<u64>(token * job.page_token) + at * sizeof(Word),
              group.codes + static_cast<u64>(token * job.token + at * job.element));
    }
}

template <class Format, class Element, int Count>
KV_HD inline void quantise(const QuantiseJob& job, u32 group_index, u32 lane) {
    using Word = typename Element::Word;
    using Words = Few<Word, Count>;
    const ScaleGroup group = scale_group(job, group_index);
    u32 top = 0;
    each<Word, Count>(job, group, lane, [&](u64 page, u64) {
        const Words words = load<Words>(page);
#pragma unroll
        for (int i = 0; i < Count; ++i) top = magnitude(words.item[i]) > top ? magnitude(words.item[i]) : top;
    });
    const float scale = divide(Element::widen(static_cast<Word>(largest_of_lanes(top))), Format::LARGEST);
    const float factor = bits_of(scale) > 0 ? divide(1.0f, scale) : 0.0f;
    if (lane == 0) *pointer<float>(group.scale) = scale;
    each<Word, Count>(job, group, lane, [&](u64 page, u64 codes) {
        const Words words = load<Words>(page);
        Few<u8, Count> made;
#pragma unroll
        for (int i = 0; i < Count; ++i) made.item[i] = Format::code(multiply(Element::widen(words.item[i]), factor));
        store(codes, made);
    });
}

template <class Format, class Element, int Count>
KV_HD inline void restore(const QuantiseJob& job, u32 group_index, u32 lane) {
    using Word = typename Element::Word;
    const ScaleGroup group = scale_group(job, group_index);
    const float scale = *pointer<const float>(group.scale);
    each<Word, Count>(job, group, lane, [&](u64 page, u64 codes) {
        const auto given = load<Few<u8, Count>>(codes);
        Few<Word, Count> words;
#pragma unroll
        for (int i = 0; i < Count; ++i) words.item[i] = Element::narrow(multiply(Format::value(given.item[i]), scale));
        store(page, words);
    });
}

}  // namespace kvcache
