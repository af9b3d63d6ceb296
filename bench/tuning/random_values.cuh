// The operands of the tuning programs: bf16 numbers that are the same in every run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "check.cuh"

using T = __nv_bfloat16;

namespace {

// Evenly from -scale to scale.
__global__ void fill(T* data, int64_t n, unsigned seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n; i += gridDim.x * int64_t{256}) {
    unsigned x = static_cast<unsigned>(i) * 2654435761u + seed;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    data[i] = __float2bfloat16_rn(((x & 0xffff) / 32768.0f - 1.0f) * scale);
  }
}

T* random_values(int64_t n, unsigned seed, float scale = 1) {
  T* data;
  CHECK(cudaMalloc(&data, n * sizeof(T)));
  fill<<<1024, 256>>>(data, n, seed, scale);
  CHECK(cudaGetLastError());
  return data;
}

}  // namespace
