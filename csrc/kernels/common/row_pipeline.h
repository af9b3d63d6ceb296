// Shared memory of rows that stream through it: the host counts what row_pipeline.cuh lays out.
#pragma once

#include "dtype.h"
#include "iteration.h"
#include "launch.h"

namespace fusedcuda {

constexpr int kSlotsOfLine = 128 / kVectorBytes;

// 16-byte slots of a row of one tensor. `threads`: of the block, on this row; each has `items`
// vectors. Unaligned, a warp's part of the row takes one piece more, and begins in its slots at the
// same place of a 128-byte line as in memory; not so where rows share a warp.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int pipeline_slots(int items, int threads, bool aligned) {
  const int slots = items * threads;
  if (aligned) return slots;
  return threads < kWarpSize ? slots + 1 : slots + threads / kWarpSize * kSlotsOfLine;
}

}  // namespace fusedcuda
