// What the kernels of the interaction share: where products are in a row, and how a warp, or a
// block, goes through its samples and their vectors.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/async_copy.cuh"
#include "common/shared.cuh"
#include "common/vec.cuh"
#include "dlrm_layout.h"

namespace fusedcuda {

// Where the product of two vectors is in an output row, behind the dense vector:
//   lower: (1, 0), (2, 0), (2, 1), (3, 0), ...      upper: (0, 1), (0, 2), ..., (1, 2), ...
// Either is the sum of a number for the higher one and one for the lower one.
__device__ __forceinline__ int place_of_high(bool upper, int i) {
  return upper ? i - 1 : i * (i - 1) / 2;
}
__device__ __forceinline__ int place_of_low(bool upper, int j, int vectors) {
  return upper ? j * (2 * vectors - j - 1) / 2 - j : j;
}
__device__ __forceinline__ int product_index(const DotVectors& p, int i, int j) {
  const int high = max(i, j), low = min(i, j);
  // A branch, as either number by itself would be kept in a register for each sample.
  if (p.upper) return place_of_high(true, high) + place_of_low(true, low, p.vectors);
  return place_of_high(false, high) + place_of_low(false, low, p.vectors);
}

// --- Copies. `aligned`, or kAligned: of whole, aligned pieces of 16 bytes, else of elements.

template <typename T, bool kAligned>
constexpr int kDotPiece = kAligned ? kVectorBytes / sizeof(T) : 1;

template <typename T, bool kAligned>
__device__ __forceinline__ void copy_piece(T* to, const T* from) {
  constexpr int kPiece = kDotPiece<T, kAligned>;
  store_vector<T, kPiece>(to, load_vector<T, kPiece>(from));
}

// To shared memory, where it is after copy_async_wait().
template <typename T, bool kAligned>
__device__ __forceinline__ void copy_piece_async(T* to, const T* from) {
  if constexpr (kAligned) {
    copy_async_16(to, from);
  } else {
    *to = *from;
  }
}

// A row between shared and global memory, by `threads` threads. (As uint4: four floats would be
// stored one by one.)
template <typename T>
__device__ __forceinline__ void copy_row(const T* from, T* to, int count, bool aligned, int thread,
                                         int threads) {
  constexpr int kVec = kVectorBytes / sizeof(T);
  if (aligned) {
#pragma unroll 1
    for (int i = thread * kVec; i < count; i += threads * kVec)
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
  } else {
    for (int i = thread; i < count; i += threads) to[i] = from[i];
  }
}

// --- A warp's samples

// Keeps the compiler from computing more of a number than itself before it is needed: from here on
// it does not know the number.
__device__ __forceinline__ void keep(int& number) {
#ifndef FUSEDCUDA_EMULATION
  asm volatile("" : "+r"(number));
#endif
}

// Every n-th sample of the batch is a warp's own: n is the number of all warps.
__device__ __forceinline__ int64_t first_sample() {
  return int64_t{blockIdx.x} * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
}

__device__ __forceinline__ int own_samples(const DotSteps& steps) {
  return steps.rounds + (first_sample() < steps.rest);
}

// `bytes` behind `data`.
template <typename T>
__device__ __forceinline__ T* behind(T* data, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(data) + bytes);
}

// Goes through what belongs to a warp's samples in a tensor. `data` is what belongs to the first
// sample of the batch, `stride` the number of elements from sample to sample, `step` that of bytes
// from one of the warp's samples to the next.
template <typename T>
class OwnSamples {
 public:
  __device__ OwnSamples(T* data, int64_t stride, int64_t step)
      : next_(data + first_sample() * stride), step_(step) {}

  __device__ __forceinline__ T* next() {
    T* const data = next_;
    next_ = behind(next_, step_);
    return data;
  }

 private:
  T* next_;
  int64_t step_;
};

// Calls use(stage, done) for each of a warp's samples, in the order in which load(stage, has_next)
// has put them into stages; has_next: another one will be loaded. use() calls done() when it has
// read its stage, which gets another sample then.
template <int kStages, typename T, typename Load, typename Use>
__device__ __forceinline__ void for_own_samples(const DotSteps& steps, T* stages, int stage_size,
                                                Load load, Use use) {
  int to_use = own_samples(steps);
  int to_load = to_use;
  auto load_next = [&](T* stage) {
    if (to_load-- > 0) load(stage, to_load > 0);
    copy_async_commit();
  };
#pragma unroll 1
  for (int k = 0; k < kStages; ++k) load_next(stages + k * stage_size);
  let_next_kernel_start();
  for (int k = 0; to_use > 0; --to_use) {
    copy_async_wait<kStages - 1>();
    __syncwarp();  // the other lanes' copies are there, too
    T* stage = stages + k * stage_size;
    use(stage, [&] {
      __syncwarp();
      load_next(stage);
    });
    k = k == kStages - 1 ? 0 : k + 1;
  }
}

// How the lanes of a warp share the vectors of a sample, in pieces of kPiece elements: a lane takes
// the same columns of every n-th vector, so that its addresses advance by constants. Lanes that are
// left over have nothing to do. The dense vector, which may be anywhere, is not counted.
template <int kPiece>
class Pieces {
 public:
  __device__ Pieces(const DotVectors& p, int lane) : columns_(p.columns) {
    const int lanes = dot_lanes_of_vector(p.columns, kPiece);
    const int apart = kWarpSize / lanes;
    vector_ = lane / lanes;
    column_ = lane % lanes * kPiece;
    count_ = vector_ < apart ? (p.vectors - 1 - vector_ + apart - 1) / apart : 0;
  }

  // Where the lane's piece of the dense vector is, and the first one of the others, if these are
  // `stride` elements apart.
  __device__ int dense() const { return column_; }
  __device__ int64_t first(int64_t stride) const { return vector_ * stride + column_; }

  // copy(to, from) for these pieces; steps are from piece to piece, in bytes.
  template <typename T, typename Copy>
  __device__ __forceinline__ void copy_dense(const T* from, T* to, Copy copy) const {
    if (vector_ == 0) copy_columns(from, to, copy);
  }
  template <typename T, typename Copy>
  __device__ __forceinline__ void copy_others(const T* from, int64_t from_step, T* to,
                                              int64_t to_step, Copy copy) const {
#pragma unroll(kPiece == 1 ? 1 : 4)
    for (int k = 0; k < count_; ++k) {
      copy_columns(from, to, copy);
      from = behind(from, from_step);
      to = behind(to, to_step);
    }
  }
  // The same from `count` rows that may be anywhere, of which a lane has pieces `apart` rows apart.
  // All lanes call row_of(vector) for where a row starts, at the same time, also those that are
  // left over.
  template <typename T, typename RowOf, typename Copy>
  __device__ __forceinline__ void copy_rows(RowOf row_of, int count, int apart, T* to,
                                            int64_t to_step, Copy copy) const {
#pragma unroll(kPiece == 1 ? 1 : 2)
    for (int k = 0; k * apart < count; ++k) {
      const T* row = row_of(vector_ + k * apart);
      if (k < count_) copy_columns(row + column_, to, copy);
      to = behind(to, to_step);
    }
  }

 private:
  // Of one vector. The lanes of a warp have all of its pieces, if these are not single elements.
  template <typename T, typename Copy>
  __device__ __forceinline__ void copy_columns(const T* from, T* to, Copy copy) const {
    static_assert(kPiece == 1 || kPiece * kWarpSize >= kMaxDotColumns);
    copy(to, from);
    if constexpr (kPiece == 1) {
#pragma unroll 1
      for (int i = kWarpSize; i < columns_ - column_; i += kWarpSize) copy(to + i, from + i);
    }
  }

  int columns_;
  int vector_, column_;  // the first piece
  int count_;
};

}  // namespace fusedcuda
