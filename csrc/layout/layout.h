// Index arithmetic of layouts, for the host and for CUDA alike: no includes, no std.
//
// A block is copied between an engine's page and its payload as an array of up to MAX_AXES axes, each with its own
// step on each side. `collapse` turns the axes into a Walk: equal fragments, as long as both sides allow, numbered in
// the payload's order. `locate` gives the offsets of a fragment.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KV_HD __host__ __device__
#else
#define KV_HD
#endif

namespace kvcache {

using u64 = unsigned long long;  // no <cstdint> under NVRTC
using i64 = long long;

constexpr int MAX_AXES = 5;

struct Axis {
    u64 extent;
    i64 page;     // bytes from one index to the next in the page
    i64 payload;  // the same in the payload, not negative
};

struct Walk {
    Axis axes[MAX_AXES];  // outermost to innermost in the payload, without those inside a fragment
    int count;
    u64 run;        // bytes of a fragment, contiguous on both sides
    u64 fragments;  // the product of the extents; 0 where an axis is empty
};

struct Place {
    i64 page;  // bytes from the start of the page, of the payload
    i64 payload;
};

// The axes' elements are `item_bytes` long. No two elements may share an offset in the payload.
KV_HD inline Walk collapse(const Axis* axes, int count, u64 item_bytes) {
    Walk walk = {};
    for (int i = 0; i < count; ++i) {  // insertion sort by step in the payload, without axes of one index
        if (axes[i].extent == 1) continue;
        int at = walk.count++;
        for (; at > 0 && walk.axes[at - 1].payload < axes[i].payload; --at) walk.axes[at] = walk.axes[at - 1];
        walk.axes[at] = axes[i];
    }
    int kept = 0;
    for (int i = 0; i < walk.count; ++i) {
        const Axis inner = walk.axes[i];
        const i64 extent = static_cast<i64>(inner.extent);
        Axis* outer = kept > 0 ? &walk.axes[kept - 1] : nullptr;
        if (outer && outer->page == extent * inner.page && outer->payload == extent * inner.payload) {
            *outer = {outer->extent * inner.extent, inner.page, inner.payload};
        } else {
            walk.axes[kept++] = inner;
        }
    }
    walk.count = kept;
    walk.run = item_bytes;
    if (kept > 0) {
        const Axis& last = walk.axes[kept - 1];
        if (last.page == static_cast<i64>(item_bytes) && last.payload == static_cast<i64>(item_bytes)) {
            walk.run *= last.extent;
            --walk.count;
        }
    }
    walk.fragments = walk.run > 0 ? 1 : 0;
    for (int i = 0; i < walk.count; ++i) walk.fragments *= walk.axes[i].extent;
    return walk;
}

KV_HD inline Place locate(const Walk& walk, u64 fragment) {
    Place place = {0, 0};
    for (int i = walk.count - 1; i >= 0; --i) {
        const Axis& axis = walk.axes[i];
        const i64 index = static_cast<i64>(fragment % axis.extent);
        fragment /= axis.extent;
        place.page += index * axis.page;
        place.payload += index * axis.payload;
    }
    return place;
}

}  // namespace kvcache
