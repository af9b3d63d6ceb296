// A product of many rows with a few values of k: parameters, and how it is divided. Pure host
// functions. The product itself: narrow_rows.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm_config.h"

namespace fusedcuda {

constexpr int kNarrowMostK = 16;
constexpr int kNarrowColumns = 32;  // of a warp
constexpr int kNarrowThreads = 256;
constexpr int kNarrowWarps = kNarrowThreads / kWarpSize;
// Of a warp, in shared memory: its weights and then 16 rows of a.
constexpr int kNarrowBytesOfWarp = kNarrowColumns * kNarrowMostK * 2;

struct NarrowConfig {
  int warps_of_row = 1;  // that have one row together
  int strides = 1;       // sets of 16 rows that are computed at the same time

  int64_t blocks() const { return ceil_div(int64_t{strides} * warps_of_row, kNarrowWarps); }
};

// output[m, n] = sum_k a[m, k] b[n, k] + bias[n], in float32, for what the kernel makes of it.
struct NarrowParams {
  int64_t m = 0, n = 0;
  int k = 0;
  const void* a = nullptr;  // m x k elements of two bytes, read as one array
  GemmFactor b;
  const void* bias = nullptr;  // or null
  GemmMatrix output;
  NarrowConfig config;
};

// The output is written in pieces of 16 bytes, in rows of any pitch; a is read in such pieces.
inline bool narrow_can_run(const NarrowParams& p, DType dtype) {
  constexpr int64_t kMostRows = int64_t{1} << 30;
  return size_of(dtype) == 2 && p.m > 0 && p.m < kMostRows && p.n > 0 && p.n % 8 == 0 && p.k > 0 &&
         p.k <= kNarrowMostK && reinterpret_cast<uintptr_t>(p.a) % kVectorBytes == 0 &&
         gemm::can_be_boxed(p.output.data, p.output.stride, dtype);
}

inline NarrowConfig narrow_config(int64_t m, int64_t n, int64_t warps) {
  NarrowConfig config;
  config.warps_of_row = static_cast<int>(ceil_div(n, kNarrowColumns));
  const int64_t sets = std::min(warps / config.warps_of_row, ceil_div(m, 16));
  config.strides = static_cast<int>(std::max<int64_t>(sets, 1));
  return config;
}

// As many warps as the card has a place for, and no more than there are rows for: with fewer, 9 to
// 25 % slower, with many short ones twice as slow (bench/tuning/linear_narrow_configs.cu).
inline NarrowConfig choose_narrow_config(int64_t m, int64_t n, int num_sms, int blocks_of_sm) {
  return narrow_config(m, n, int64_t{num_sms} * blocks_of_sm * kNarrowWarps);
}

}  // namespace fusedcuda
