// Shared memory of rows that stream through it: the host counts what row_pipeline.cuh lays out.
#pragma once

#include "dtype.h"
#include "iteration.h"
#include "launch.h"

namespace fusedcuda {

constexpr int kSlotsOfLine = 128 / kVectorBytes;

// How threads reach the elements of a row (row_pipeline.cuh).
enum class RowAccess {
  kAligned,  // every vector of every tensor is whole and aligned
  kPhased,   // all tensors' rows begin at the same place of a vector, the same for rows in a phase
  kShifted,  // anything else
};

inline const char* name_of(RowAccess access) {
  switch (access) {
    case RowAccess::kAligned:
      return "aligned";
    case RowAccess::kPhased:
      return "phased";
    default:
      return "shifted";
  }
}

// 16-byte slots of a row of one tensor. `threads`: of the block, on this row; each has `items`
// vectors. Unless all is aligned, a warp has slots of its own, in which its pieces begin at the
// same place of a 128-byte line as in memory: phased, the 32 pieces that are neighbours; shifted,
// its part of the row, which takes one piece more; not so where rows share a warp.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int pipeline_slots(int items, int threads, RowAccess access) {
  const int slots = items * threads;
  if (access == RowAccess::kAligned) return slots;
  if (access == RowAccess::kPhased) return slots / kWarpSize * (kWarpSize + kSlotsOfLine);
  return threads < kWarpSize ? slots + 1 : slots + threads / kWarpSize * kSlotsOfLine;
}

}  // namespace fusedcuda
