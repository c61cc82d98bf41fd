// The CUDA kernels as functions of the processor: each launch is a loop over its threads. Compiled by cuda_on_cpu.py.
#include <cstddef>

#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)

namespace {
struct Index {
    unsigned x, y;
};
thread_local Index gridDim, blockDim, blockIdx, threadIdx;
}  // namespace

#include "../../csrc/cuda/copy.cu"

using kvcache::i64;
using kvcache::u32;
using kvcache::u64;

namespace {
template <class Argument>
void launch(void (*kernel)(Argument), const void* argument, unsigned x, unsigned y, unsigned threads) {
    gridDim = {x, y}, blockDim = {threads, 1};
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(*static_cast<const Argument*>(argument));
}
}  // namespace

extern "C" {

void launch_copy(void (*kernel)(kvcache::Job), const void* job, unsigned x, unsigned y, unsigned threads) {
    launch(kernel, job, x, y, threads);
}

// Where the host's side must put each member of a Job.
void job_places(u64* places) {
    using kvcache::Job;
    const u64 all[] = {sizeof(Job),
                       offsetof(Job, axes),
                       offsetof(Job, run),
                       offsetof(Job, count),
                       offsetof(Job, vectors),
                       offsetof(Job, blocks),
                       offsetof(Job, roots),
                       offsetof(Job, root),
                       offsetof(Job, block),
                       sizeof(kvcache::Step),
                       offsetof(kvcache::Step, page),
                       offsetof(kvcache::Step, payload)};
    for (u64 place : all) *places++ = place;
}

void divide(u32 divisor, const u32* dividends, u32* quotients, u64 count, u32* made) {
    const kvcache::Division by = kvcache::division(divisor);
    made[0] = by.divisor, made[1] = by.multiplier, made[2] = by.shift;
    for (u64 i = 0; i < count; ++i) quotients[i] = kvcache::quotient(by, dividends[i]);
}

// The header's walk: its axes (extent, page, payload), then run, number of axes and fragments; and where each of the
// first `fragments` fragments lies.
void walk(const i64* axes, int count, u64 item_bytes, i64* made, i64* places, u64 fragments) {
    kvcache::Axis given[kvcache::MAX_AXES];
    for (int i = 0; i < count; ++i) given[i] = {static_cast<u64>(axes[3 * i]), axes[3 * i + 1], axes[3 * i + 2]};
    const kvcache::Walk walk = kvcache::collapse(given, count, item_bytes);
    for (int i = 0; i < walk.count; ++i) {
        *made++ = static_cast<i64>(walk.axes[i].extent);
        *made++ = walk.axes[i].page;
        *made++ = walk.axes[i].payload;
    }
    *made++ = static_cast<i64>(walk.run);
    *made++ = walk.count;
    *made = static_cast<i64>(walk.fragments);
    for (u64 i = 0; i < fragments && i < walk.fragments; ++i) {
        const kvcache::Place place = locate(walk, i);
        *places++ = place.page;
        *places++ = place.payload;
    }
}
}
