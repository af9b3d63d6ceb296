// dropout(t @ factor): the branch's part of the gradient of x, of t = dt and factor = A. Bound by
// its write: beside rows x columns elements t and factor are nothing, and a thread's eight
// neighbours share one call of the generator. (A product, and a kernel that drops some of its
// elements, write it twice and read it once; and round it twice.)
#pragma once

#include <cstdint>

#include "common/narrow_rows.cuh"
#include "common/philox.cuh"
#include "lora.h"

namespace fusedcuda {

template <typename T>
struct DroppedBranch {
  DropoutMask mask;
  float scale;

  // (All before the question whether they exist: what the generator does for two rows of a thread
  // is half the same then.)
  __device__ __forceinline__ void operator()(bool exists, T* to, int64_t row, int64_t column,
                                             const float (&z)[8]) const {
    bool kept[8];
    mask.keeps(row, static_cast<int>(column), kept);
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = kept[i] ? z[i] * scale : 0.0f;
    if (exists) store_eight(to, y);
  }
};

template <typename T>
__global__ void __launch_bounds__(kNarrowThreads, kLoraBranchBlocksOfSm)
    lora_branch_kernel(const __grid_constant__ LoraBranchParams p) {
  alignas(16) __shared__ unsigned char memory[kNarrowWarps * kNarrowBytesOfWarp];
  wait_for_previous_kernel();
  let_next_kernel_start();
  NarrowRows<T, /*kBKInner=*/false, /*kHasBias=*/false> rows(p.rows, memory);
  rows.run(DroppedBranch<T>{DropoutMask(p.dropout.seed, p.dropout.threshold), p.scale});
}

}  // namespace fusedcuda
