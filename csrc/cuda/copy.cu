// Copies between pages and payloads, and within the pool (a payload may be in another page: see kernels.py). One kernel
// for each direction and width in bytes. The caller chooses the widest that every address and step allows.
#include "copy.h"

#define KV_COPY(NAME, DIRECTION, WIDTH)                                                                          \
    extern "C" __global__ void __launch_bounds__(256) NAME##_##WIDTH(const __grid_constant__ kvcache::Job job) { \
        kvcache::copy<kvcache::Direction::DIRECTION, WIDTH>(                                                     \
            job, {blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, blockIdx.y, gridDim.y});        \
    }

KV_COPY(gather, Gather, 16)
KV_COPY(gather, Gather, 8)
KV_COPY(gather, Gather, 4)
KV_COPY(gather, Gather, 2)
KV_COPY(gather, Gather, 1)
KV_COPY(scatter, Scatter, 16)
KV_COPY(scatter, Scatter, 8)
KV_COPY(scatter, Scatter, 4)
KV_COPY(scatter, Scatter, 2)
KV_COPY(scatter, Scatter, 1)
