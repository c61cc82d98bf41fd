// Copies that quantise and restore. One kernel for each format, element type and access: `wide` handles 16 bytes of
// adjacent, aligned elements, `one` a single element.
#include "quantise.h"

#define KV_KERNEL(NAME, BODY, FORMAT, ELEMENT, COUNT)                                                          \
    extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ kvcache::QuantiseJob job) { \
        const kvcache::u32 thread = blockIdx.x * blockDim.x + threadIdx.x, lane = thread % kvcache::LANES;     \
        const kvcache::u32 groups = job.blocks * job.roots * job.heads.divisor * job.runs.divisor;             \
        for (kvcache::u32 group = thread / kvcache::LANES; group < groups;                                     \
             group += gridDim.x * blockDim.x / kvcache::LANES)                                                 \
            kvcache::BODY<FORMAT, ELEMENT, COUNT>(job, group, lane);                                           \
    }

#define KV_COUNTS(BODY, FORMAT, FORMAT_NAME, ELEMENT, ELEMENT_NAME)                                            \
    KV_KERNEL(BODY##_##FORMAT_NAME##_##ELEMENT_NAME##_wide, BODY, FORMAT, ELEMENT, 16 / sizeof(ELEMENT::Word)) \
    KV_KERNEL(BODY##_##FORMAT_NAME##_##ELEMENT_NAME##_one, BODY, FORMAT, ELEMENT, 1)

#define KV_ELEMENTS(BODY, FORMAT, FORMAT_NAME)       \
    KV_COUNTS(BODY, FORMAT, FORMAT_NAME, Bf16, bf16) \
    KV_COUNTS(BODY, FORMAT, FORMAT_NAME, Fp16, fp16) \
    KV_COUNTS(BODY, FORMAT, FORMAT_NAME, Fp32, fp32)

using kvcache::Bf16;
using kvcache::Fp16;
using kvcache::Fp32;
using kvcache::Fp8;
using kvcache::Int8;

KV_ELEMENTS(quantise, Fp8, fp8)
KV_ELEMENTS(quantise, Int8, int8)
KV_ELEMENTS(restore, Fp8, fp8)
KV_ELEMENTS(restore, Int8, int8)
