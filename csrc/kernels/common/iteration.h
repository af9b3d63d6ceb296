// Iteration space of an elementwise kernel: sizes and strides of all its tensors, reduced to the
// fewest dimensions. Host code without CUDA calls, so that plans can be made and tested on any
// machine.
#pragma once

#include <cstdint>
#include <utility>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

namespace fusedcuda {

constexpr int kMaxDims = 16;  // after merging; a tensor that keeps more is refused by the binding
constexpr int kMaxTensors = 7;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t next_power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Quotient and remainder by a run-time constant with one multiplication. floor(n * floor(2^64 / d)
// / 2^64) is the quotient or one less, so a single correction makes it exact for every n >= 0.
struct Divider {
  int64_t divisor = 1;
  uint64_t magic = ~uint64_t{0};

  static Divider make(int64_t d) {
    Divider result;
    result.divisor = d;
    if (d > 1) result.magic = static_cast<uint64_t>((static_cast<unsigned __int128>(1) << 64) / d);
    return result;
  }

#ifdef __CUDACC__
  __device__ __forceinline__ int64_t divide(int64_t n, int64_t* remainder) const {
    int64_t quotient = __umul64hi(n, magic);
    int64_t rest = n - quotient * divisor;
    if (rest >= divisor) {
      ++quotient;
      rest -= divisor;
    }
    *remainder = rest;
    return quotient;
  }

  // The same for n and a divisor below 2^32, in a quarter of the instructions.
  __device__ __forceinline__ uint32_t divide32(uint32_t n, uint32_t* remainder) const {
    const uint32_t d = static_cast<uint32_t>(divisor);
    uint32_t quotient = static_cast<uint32_t>(uint64_t{n} * (magic >> 32) >> 32);
    uint32_t rest = n - quotient * d;
    if (rest >= d) {
      ++quotient;
      rest -= d;
    }
    *remainder = rest;
    return quotient;
  }
#endif
};

// Dimension 0 is the outermost. Strides are in elements; 0 where a tensor is broadcast.
struct Iteration {
  int num_dims = 0;
  int num_tensors = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxTensors][kMaxDims] = {};

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < num_dims; ++d) n *= sizes[d];
    return n;
  }
};

// Largest number of dimensions a tensor may have before merging (torch's own limit).
constexpr int kMaxInputDims = 64;

struct RawIteration {
  int num_dims = 0;
  int num_tensors = 0;
  int64_t sizes[kMaxInputDims];
  int64_t strides[kMaxTensors][kMaxInputDims];
};

// Merges the dimensions of `raw` into the fewest that all tensors walk alike. Dimensions in
// `outer_mask` go outside the others; within each group they are ordered by the strides of a
// leader, its smallest stride innermost. Dimensions of size 1 are dropped. Returns false if more
// than kMaxDims remain. *split is how many of them come from outer_mask.
inline bool merge_dimensions(const RawIteration& raw, uint64_t outer_mask, int outer_leader,
                             int inner_leader, Iteration* out, int* split) {
  int order[kMaxInputDims];
  int count = 0;
  for (int d = 0; d < raw.num_dims; ++d) {
    if (raw.sizes[d] != 1) order[count++] = d;
  }
  auto is_outer = [&](int d) { return (outer_mask >> d & 1) != 0; };
  auto belongs_before = [&](int a, int b) {
    if (is_outer(a) != is_outer(b)) return is_outer(a);
    const int leader = is_outer(a) ? outer_leader : inner_leader;
    return raw.strides[leader][a] > raw.strides[leader][b];
  };
  // Insertion sort: stable, nearly sorted input, and no allocation on the way to a launch.
  for (int i = 1; i < count; ++i) {
    for (int j = i; j > 0 && belongs_before(order[j], order[j - 1]); --j)
      std::swap(order[j], order[j - 1]);
  }

  out->num_tensors = raw.num_tensors;
  out->num_dims = 0;
  *split = 0;
  int previous = -1;
  for (int i = 0; i < count; ++i) {
    const int d = order[i];
    bool mergeable = previous >= 0 && is_outer(previous) == is_outer(d);
    for (int t = 0; mergeable && t < raw.num_tensors; ++t) {
      mergeable = raw.strides[t][previous] == raw.strides[t][d] * raw.sizes[d];
    }
    if (!mergeable) {
      if (out->num_dims == kMaxDims) return false;
      out->sizes[out->num_dims++] = 1;
      *split += is_outer(d);
    }
    const int last = out->num_dims - 1;
    out->sizes[last] *= raw.sizes[d];
    for (int t = 0; t < raw.num_tensors; ++t) out->strides[t][last] = raw.strides[t][d];
    previous = d;
  }
  return true;
}

}  // namespace fusedcuda
