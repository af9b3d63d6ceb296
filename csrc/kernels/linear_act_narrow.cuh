// A layer of few inputs and many rows, as the first one of a DLRM: act(x @ weight.T + bias), bound
// by the write of the output.
//
// - A warp has 32 columns of the output, whose weights and biases stay in its registers (64: 3 %
//   slower), and takes 16 rows of x at a time. No copies to padded rows: they lie behind each other
//   and have any length up to 16.
// - So 16 rows are at most 32 pieces of 16 bytes, one a thread. They are on their way two sets of
//   rows ahead (one: 8 % slower), and become a factor through shared memory.
// - The weights are columns of the products (mma.sync) in an order in which a thread's results are
//   eight neighbours: one store of 16 bytes, and one byte of a ReLU's mask.
// - The sums start as the biases, and a ReLU whose input nobody needs is part of the rounding.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "common/convert.cuh"
#include "common/gemm_activation.cuh"
#include "common/launch.h"
#include "common/mma.cuh"
#include "common/vec.cuh"
#include "linear_act.h"
#include "linear_act_config.h"

namespace fusedcuda {

// kIsPlain: no activation or a ReLU, and nothing is saved.
template <typename T, bool kIsPlain>
class NarrowRows {
 public:
  // Of the rows first_row, first_row + step, ... and the 15 after each.
  __device__ __forceinline__ NarrowRows(const LinearActParams& p, unsigned char* memory,
                                        int64_t mask_stride, int64_t first_column, int first_row,
                                        int step)
      : p_(p),
        memory_(memory),
        mask_stride_(mask_stride),
        first_column_(first_column),
        column_(first_column + lane() % 4 * 8),
        step_(step),
        inputs_(static_cast<int>(p.k)),
        rows_(static_cast<int>(p.m)),
        next_row_(first_row) {}

  __device__ __forceinline__ void run() {
    if constexpr (kIsPlain) {
      if (p_.activation == Activation::kRelu) {
        run<false>(FixedActivation<Activation::kRelu>());
      } else {
        run<false>(FixedActivation<Activation::kNone>());
      }
    } else {
      with_activation(p_.activation, [&](auto act) {
        if (p_.saves != SavedForBackward::kNone) {
          run<true>(act);
        } else {
          run<false>(act);
        }
      });
    }
  }

 private:
  static constexpr int kProducts = kNarrowColumns / 8;

  using Piece = uint4;  // a thread's, of 16 rows

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  template <bool kSaves, typename Act>
  __device__ __forceinline__ void run(const Act& act) {
    int row = next_row_;
    Piece even = load(), odd = load();  // on their way while others are multiplied
    load_weights();
    while (row < rows_) {
      finish<kSaves>(row, even, act);
      even = load();
      row += step_;
      if (row >= rows_) break;
      finish<kSaves>(row, odd, act);
      odd = load();
      row += step_;
    }
  }

  // Of the 16 rows that come next; zeros where there is nothing.
  __device__ __forceinline__ Piece load() {
    const int first = lane() * 8;  // of the piece, from next_row_ on
    const int count = min(rows_ - next_row_, 16) * inputs_ - first;
    const uint16_t* const from =
        static_cast<const uint16_t*>(p_.a.data) + int64_t{next_row_} * inputs_ + first;
    next_row_ += step_;
    if (count >= 8) return *reinterpret_cast<const Piece*>(from);
    auto element = [&](int i) { return i < count ? from[i] : uint16_t{0}; };
    auto pair = [&](int i) { return pair_of(element(i), element(i + 1)); };
    return {pair(0), pair(2), pair(4), pair(6)};
  }

  // Weights that lie behind each other come in pieces as well: element by element, a warp would ask
  // for eight lines at a time, and all warps together for longer than they multiply.
  __device__ __forceinline__ void load_weights() {
    // Of product i, lane l has row l / 4 of the weights: column 8 (l / 8) + 2 i + l / 4 % 2.
    const int row = lane() / 4;
    const int columns = static_cast<int>(min(p_.n - first_column_, int64_t{kNarrowColumns}));
    const bool in_pieces =
        p_.b.stride == p_.k && reinterpret_cast<uintptr_t>(p_.b.data) % kVectorBytes == 0;
    const uint16_t* first = line(p_.b, first_column_);
    if (in_pieces) {
      const int pieces = columns * inputs_ / 8;
      const Piece* const from = reinterpret_cast<const Piece*>(first);
#pragma unroll
      for (int i = 0; i < kNarrowColumns * kNarrowMostK / 8; i += kWarpSize) {
        if (i + lane() < pieces) reinterpret_cast<Piece*>(memory_)[i + lane()] = from[i + lane()];
      }
      __syncwarp();
      first = reinterpret_cast<const uint16_t*>(memory_);
    }
    const int64_t stride = in_pieces ? inputs_ : p_.b.stride;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const int column = row / 2 * 8 + i * 2 + row % 2;
      const uint16_t* const from = first + min(column, columns - 1) * stride;
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int k = first_k(high);
        weights_[i][high] = pair_of(k < inputs_ ? from[k] : uint16_t{0},
                                    k + 1 < inputs_ ? from[k + 1] : uint16_t{0});
      }
    }
    load_bias();
  }

  __device__ __forceinline__ void load_bias() {
    Vector<T, 8> values = {};
    if (p_.bias != nullptr && column_ < p_.n) {
      const T* const bias = static_cast<const T*>(p_.bias) + column_;
      if (reinterpret_cast<uintptr_t>(bias) % kVectorBytes == 0) {
        values = load_vector<T, 8>(bias);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) values.values[j] = bias[j];
      }
    }
    unpack(values, bias_);
  }

  // Pieces as a factor: of row l / 4 and of row l / 4 + 8, with zeros behind the end of a row.
  __device__ __forceinline__ void exchange(const Piece& piece, uint32_t (&x)[4]) const {
    __syncwarp();  // the last ones are read
    if (lane() < 2 * inputs_) reinterpret_cast<Piece*>(memory_)[lane()] = piece;
    __syncwarp();
    const uint16_t* const upper = reinterpret_cast<const uint16_t*>(memory_) + lane() / 4 * inputs_;
    const uint16_t* const lower = upper + 8 * inputs_;
    if (inputs_ % 2 == 0) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int k = first_k(j / 2);
        const uint16_t* const from = (j % 2 == 0 ? upper : lower) + k;
        x[j] = k < inputs_ ? *reinterpret_cast<const uint32_t*>(from) : 0u;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int k = first_k(j / 2);
        const uint16_t* const from = (j % 2 == 0 ? upper : lower) + k;
        x[j] =
            pair_of(k < inputs_ ? from[0] : uint16_t{0}, k + 1 < inputs_ ? from[1] : uint16_t{0});
      }
    }
  }

  // The results of 16 rows.
  template <bool kSaves, typename Act>
  __device__ __forceinline__ void finish(int first_row, const Piece& piece, const Act& act) {
    uint32_t x[4];
    exchange(piece, x);
    const int row = first_row + lane() / 4;
    T* const to = static_cast<T*>(p_.output.data) + row * p_.output.stride + column_;
    float sums[kProducts][4];
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = bias_[2 * i + j % 2];
      multiply_tiles<T>(sums[i], x, weights_[i]);
    }
    if (column_ >= p_.n) return;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      float z[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) z[j] = sums[j / 2][lower * 2 + j % 2];
      if (row + lower * 8 < rows_)
        store<kSaves>(to + lower * 8 * p_.output.stride, row + lower * 8, z, act);
    }
  }

  template <bool kSaves, typename Act>
  __device__ __forceinline__ void store(T* to, int64_t row, const float (&z)[8],
                                        const Act& act) const {
    if constexpr (Act::kIsRelu && !kSaves) {
      store_words(to, {pack_relu<T>(z[0], z[1]), pack_relu<T>(z[2], z[3]), pack_relu<T>(z[4], z[5]),
                       pack_relu<T>(z[6], z[7])});
      return;
    }
    float y[8], derivative[8];
    act(z, y, derivative);
    store_eight(to, y);
    if constexpr (kSaves && Act::kIsRelu) {
      unsigned bits = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) bits |= (z[j] <= 0.0f ? 0u : 1u) << j;
      static_cast<uint8_t*>(p_.saved)[row * mask_stride_ + column_ / 8] =
          static_cast<uint8_t>(bits);
    } else if constexpr (kSaves) {
      store_eight(static_cast<T*>(p_.saved) + row * p_.n + column_, derivative);
    }
  }

  static __device__ __forceinline__ void store_eight(T* to, const float (&x)[8]) {
    store_words(to, {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]), pack_pair<T>(x[4], x[5]),
                     pack_pair<T>(x[6], x[7])});
  }

  static __device__ __forceinline__ int first_k(int high) { return lane() % 4 * 2 + high * 8; }

  static __device__ __forceinline__ uint32_t pair_of(uint16_t first, uint16_t second) {
    return first | static_cast<uint32_t>(second) << 16;
  }

  static __device__ __forceinline__ const uint16_t* line(const GemmFactor& factor, int64_t row) {
    return static_cast<const uint16_t*>(factor.data) + row * factor.stride;
  }

  const LinearActParams& p_;
  unsigned char* const memory_;
  const int64_t mask_stride_, first_column_;
  const int64_t column_;  // of the thread
  const int step_, inputs_, rows_;
  int next_row_;  // that is loaded
  uint32_t weights_[kProducts][2];
  float bias_[8];
};

// A warp for each group of columns and `strides` sets of rows, columns first: the warps of a block
// write whole rows.
template <typename T, bool kIsPlain>
__global__ void __launch_bounds__(kNarrowThreads, narrow_blocks_of_sm(kIsPlain))
    linear_narrow_kernel(const __grid_constant__ LinearActParams p, int64_t mask_stride,
                         int warps_of_row, int strides) {
  // Of a warp: 16 rows of x, and before them its weights.
  constexpr int kBytes = kNarrowColumns * kNarrowMostK * 2;
  alignas(16) __shared__ unsigned char memory[kNarrowThreads / kWarpSize][kBytes];
  const int warp_of_block = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warp = static_cast<int>(blockIdx.x) * (kNarrowThreads / kWarpSize) + warp_of_block;
  const int set = warp / warps_of_row;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (set >= strides) return;
  const int64_t column = int64_t{warp % warps_of_row} * kNarrowColumns;
  NarrowRows<T, kIsPlain> rows(p, memory[warp_of_block], mask_stride, column, set * 16,
                               strides * 16);
  rows.run();
}

}  // namespace fusedcuda
