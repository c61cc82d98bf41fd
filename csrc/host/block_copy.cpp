#include "block_copy.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcache {
namespace {

constexpr u64 BYTES_PER_THREAD = 1 << 20;  // smaller parts end before a second thread has started
constexpr u64 STREAM_BYTES = 1 << 20;      // smaller copies are probably still cached when they are read
constexpr u64 STREAM_RUN = 512;            // shorter fragments write too many partial cache lines
constexpr u64 AHEAD = 4096;                // bytes to prefetch: the hardware prefetcher restarts with every fragment

// If layers (and K and V) are equal distances apart, they are axes and may become part of a fragment. Otherwise each is
// a separate root.
struct Root {
    u64 address;  // in page 0
    i64 payload;
};

struct Plan {
    std::vector<Root> roots;
    Walk walk;
};

Plan plan(const Geometry& g) {
    const u64 layers = g.extents[0], kv = g.extents[1];
    auto base = [&](u64 layer, u64 k) { return u64{g.bases[layer * kv + k]}; };
    bool kv_even = kv <= 2, layers_even = true;
    const i64 kv_step = kv > 1 ? static_cast<i64>(base(0, 1) - base(0, 0)) : 0;
    const i64 layer_step = layers > 1 ? static_cast<i64>(base(1, 0) - base(0, 0)) : 0;
    for (u64 layer = 0; layer < layers; ++layer) {
        if (kv > 1) kv_even = kv_even && static_cast<i64>(base(layer, 1) - base(layer, 0)) == kv_step;
        layers_even =
            layers_even && static_cast<i64>(base(layer, 0) - base(0, 0)) == static_cast<i64>(layer) * layer_step;
    }
    layers_even = layers_even && kv_even;
    Axis axes[MAX_AXES] = {{layers_even ? layers : 1, layer_step, g.payload[0]},
                           {kv_even ? kv : 1, kv_step, g.payload[1]}};
    for (int i = 2; i < MAX_AXES; ++i) axes[i] = {g.extents[i], g.page[i], g.payload[i]};
    Plan plan;
    for (u64 layer = 0; layer < (layers_even ? 1 : layers); ++layer) {
        for (u64 k = 0; k < (kv_even ? 1 : kv); ++k) {
            const i64 payload = static_cast<i64>(layer) * g.payload[0] + static_cast<i64>(k) * g.payload[1];
            plan.roots.push_back({base(layer, k), payload});
        }
    }
    plan.walk = collapse(axes, MAX_AXES, g.item_bytes);
    return plan;
}

void* pointer(u64 address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

template <std::size_t N>
struct Item {
    void operator()(u64 to, u64 from, u64, u64) const { std::memcpy(pointer(to), pointer(from), N); }
};

struct Plain {
    void operator()(u64 to, u64 from, u64 bytes, u64) const { std::memcpy(pointer(to), pointer(from), bytes); }
};

#if defined(__x86_64__)

// Non-temporal stores: they do not fetch the cache lines that they overwrite. Sources are prefetched, at the end of a
// fragment those of the `next` one.
struct Stream {
    __attribute__((target("avx2"))) void operator()(u64 to, u64 from, u64 bytes, u64 next) const {
        const u64 head = std::min(bytes, (64 - to % 64) % 64);
        std::memcpy(pointer(to), pointer(from), head);
        to += head, from += head, bytes -= head;
        u64 ahead = from + AHEAD;
        for (; bytes >= 64; to += 64, from += 64, bytes -= 64, ahead += 64) {
            if (bytes <= AHEAD && next != 0) ahead = next, next = 0;
            _mm_prefetch(static_cast<const char*>(pointer(ahead)), _MM_HINT_T0);
            const __m256i* source = static_cast<const __m256i*>(pointer(from));
            __m256i* target = static_cast<__m256i*>(pointer(to));
            const __m256i low = _mm256_loadu_si256(source), high = _mm256_loadu_si256(source + 1);
            _mm256_stream_si256(target, low);
            _mm256_stream_si256(target + 1, high);
        }
        std::memcpy(pointer(to), pointer(from), bytes);
    }
};

void stream_fence() { _mm_sfence(); }
bool can_stream() { return __builtin_cpu_supports("avx2"); }

#else

using Stream = Plain;
void stream_fence() {}
bool can_stream() { return false; }

#endif

struct Job {
    Direction direction;
    const Plan& plan;
    i64 page_step;
    const std::int64_t* ids;
    std::uint8_t* const* payloads;

    // Fragments at equal distances on both sides.
    struct Row {
        u64 to, from, count;
    };

    // Copies fragments `first` to `end` (excluded), counted over all blocks and roots.
    Row row(u64 first, u64 end) const {
        const u64 fragments = plan.walk.fragments, roots = plan.roots.size();
        const u64 piece = first / fragments, block = piece / roots, inside = first % fragments;
        const Root root = plan.roots[piece % roots];
        const Place place = locate(plan.walk, inside);
        const u64 page = root.address + static_cast<u64>(ids[block]) * static_cast<u64>(page_step);
        const u64 payload = reinterpret_cast<std::uintptr_t>(payloads[block]) + static_cast<u64>(root.payload);
        const u64 at_page = page + static_cast<u64>(place.page), at_payload = payload + static_cast<u64>(place.payload);
        const u64 count = std::min(end - first, inner().extent - inside % inner().extent);
        if (direction == Direction::Gather) return {at_payload, at_page, count};
        return {at_page, at_payload, count};
    }

    Axis inner() const { return plan.walk.count > 0 ? plan.walk.axes[plan.walk.count - 1] : Axis{1, 0, 0}; }

    template <class Fragment>
    void copy(Fragment fragment, u64 first, u64 end) const {
        if (first >= end) return;
        const bool gather = direction == Direction::Gather;
        const u64 to_step = static_cast<u64>(gather ? inner().payload : inner().page);
        const u64 from_step = static_cast<u64>(gather ? inner().page : inner().payload);
        for (Row now = row(first, end); now.count > 0;) {
            first += now.count;
            const Row next = first < end ? row(first, end) : Row{now.to, now.from, 0};
            for (; now.count > 1; --now.count, now.to += to_step, now.from += from_step) {
                fragment(now.to, now.from, plan.walk.run, now.from + from_step);
            }
            fragment(now.to, now.from, plan.walk.run, next.from);
            now = next;
        }
    }

    void copy(bool stream, u64 first, u64 end) const {
        switch (plan.walk.run) {
            case 1:
                return copy(Item<1>(), first, end);
            case 2:
                return copy(Item<2>(), first, end);
            case 4:
                return copy(Item<4>(), first, end);
            case 8:
                return copy(Item<8>(), first, end);
            case 16:
                return copy(Item<16>(), first, end);
        }
        if (!stream) return copy(Plain(), first, end);
        copy(Stream(), first, end);
        stream_fence();
    }
};

}  // namespace

void copy_blocks(Direction direction, const Geometry& geometry, const std::int64_t* ids, std::uint8_t* const* payloads,
                 std::size_t blocks, unsigned threads, bool plain) {
    const u64 bytes = geometry.block_bytes() * blocks;
    if (bytes == 0) return;
    const Plan the_plan = plan(geometry);
    const Job job{direction, the_plan, geometry.page_step, ids, payloads};
    const u64 total = the_plan.walk.fragments * the_plan.roots.size() * blocks;
    const bool stream = !plain && bytes >= STREAM_BYTES && the_plan.walk.run >= STREAM_RUN && can_stream();
    const u64 workers = std::max<u64>(1, std::min({u64{threads}, bytes / BYTES_PER_THREAD, total}));
    auto part = [&](u64 i) { job.copy(stream, total * i / workers, total * (i + 1) / workers); };
    std::vector<std::thread> others;
    others.reserve(workers - 1);
    u64 started = 1;  // this thread has part 0
    try {
        for (; started < workers; ++started) others.emplace_back(part, started);
    } catch (const std::system_error&) {  // no thread available: this one copies the rest
    }
    part(0);
    for (u64 i = started; i < workers; ++i) part(i);
    for (std::thread& other : others) other.join();
}

}  // namespace kvcache
