// The CUDA kernels as functions of the processor: each launch is a loop over its threads. Compiled by cuda_on_cpu.py.
#include <cstddef>
#include <cstdint>
#include <initializer_list>

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
#include "../../csrc/cuda/quantise.cu"

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

void launch_quantise(void (*kernel)(kvcache::QuantiseJob), const void* job, unsigned x, unsigned y, unsigned threads) {
    launch(kernel, job, x, y, threads);
}

// Where the host's side must put the members of the structs: in order, the size last.
void job_places(u64* places) {
    using kvcache::Job;
    for (u64 place :
         {offsetof(Job, axes), offsetof(Job, run), offsetof(Job, count), offsetof(Job, vectors), offsetof(Job, blocks),
          offsetof(Job, roots), offsetof(Job, root), offsetof(Job, block), sizeof(Job)})
        *places++ = place;
}

void step_places(u64* places) {
    using kvcache::Step;
    for (u64 place : {offsetof(Step, extent), offsetof(Step, page), offsetof(Step, payload), sizeof(Step)})
        *places++ = place;
}

void quantise_job_places(u64* places) {
    using kvcache::QuantiseJob;
    for (u64 place :
         {offsetof(QuantiseJob, heads), offsetof(QuantiseJob, runs), offsetof(QuantiseJob, tokens),
          offsetof(QuantiseJob, dim), offsetof(QuantiseJob, blocks), offsetof(QuantiseJob, roots),
          offsetof(QuantiseJob, first_root), offsetof(QuantiseJob, kv), offsetof(QuantiseJob, page_token),
          offsetof(QuantiseJob, page_head), offsetof(QuantiseJob, layer), offsetof(QuantiseJob, either),
          offsetof(QuantiseJob, token), offsetof(QuantiseJob, head), offsetof(QuantiseJob, element),
          offsetof(QuantiseJob, codes), offsetof(QuantiseJob, root), offsetof(QuantiseJob, block), sizeof(QuantiseJob)})
        *places++ = place;
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

// By name of the type: numbers as they are widened and narrowed, coded and valued.
#define KV_ELEMENT(TYPE, WORD)                                                       \
    void widen_##TYPE(const WORD* words, float* values, u64 count) {                 \
        for (u64 i = 0; i < count; ++i) values[i] = kvcache::TYPE::widen(words[i]);  \
    }                                                                                \
    void narrow_##TYPE(const float* values, WORD* words, u64 count) {                \
        for (u64 i = 0; i < count; ++i) words[i] = kvcache::TYPE::narrow(values[i]); \
    }
KV_ELEMENT(Bf16, std::uint16_t)
KV_ELEMENT(Fp16, std::uint16_t)
KV_ELEMENT(Fp32, std::uint32_t)

#define KV_FORMAT(TYPE)                                                             \
    void code_##TYPE(const float* values, std::uint8_t* codes, u64 count) {         \
        for (u64 i = 0; i < count; ++i) codes[i] = kvcache::TYPE::code(values[i]);  \
    }                                                                               \
    void value_##TYPE(const std::uint8_t* codes, float* values, u64 count) {        \
        for (u64 i = 0; i < count; ++i) values[i] = kvcache::TYPE::value(codes[i]); \
    }
KV_FORMAT(Fp8)
KV_FORMAT(Int8)
}
