// A product of many rows with up to 16 values of k, bound by the write of its result:
//
//   output[m, n] = f(sum_k a[m, k] b[n, k] + bias[n])
//
// - A warp has 32 columns of the output, whose values of b and biases stay in its registers (64: 3
// %
//   slower), and takes 16 rows of a at a time. No copies to padded rows: they lie behind each other
//   and have any length up to 16.
// - So 16 rows are at most 32 pieces of 16 bytes, one a thread. They are on their way two sets of
//   rows ahead (one: 8 % slower), and become a factor through shared memory.
// - The rows of b are columns of the products (mma.sync) in an order in which a thread's results
// are
//   eight neighbours of a row: one store of 16 bytes.
// - The sums start as the biases.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "convert.cuh"
#include "launch.h"
#include "mma.cuh"
#include "narrow_rows.h"
#include "vec.cuh"

namespace fusedcuda {

template <typename T>
__device__ __forceinline__ void store_eight(T* to, const float (&x)[8]) {
  store_words(to, {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]), pack_pair<T>(x[4], x[5]),
                   pack_pair<T>(x[6], x[7])});
}

// Of the calling warp: a warp for each group of columns and `strides` sets of rows, columns first,
// so that the warps of a block write whole rows.
template <typename T, bool kBKInner, bool kHasBias>
class NarrowRows {
 public:
  // `memory`: kNarrowBytesOfWarp for each warp of the block.
  __device__ __forceinline__ NarrowRows(const NarrowParams& p, unsigned char* memory)
      : p_(p), inputs_(p.k), rows_(static_cast<int>(p.m)) {
    const int warp_of_block = static_cast<int>(threadIdx.x) / kWarpSize;
    const int warp = static_cast<int>(blockIdx.x) * kNarrowWarps + warp_of_block;
    const int set = warp / p.config.warps_of_row;
    memory_ = memory + warp_of_block * kNarrowBytesOfWarp;
    first_column_ = int64_t{warp % p.config.warps_of_row} * kNarrowColumns;
    column_ = first_column_ + lane() % 4 * 8;
    step_ = p.config.strides * 16;
    next_row_ = set < p.config.strides ? set * 16 : rows_;
  }

  // finish(whether they exist, where they belong, row, column, eight results)
  template <typename Finish>
  __device__ __forceinline__ void run(const Finish& finish) {
    int row = next_row_;
    if (row >= rows_) return;
    Piece even = load(), odd = load();  // on their way while others are multiplied
    load_weights();
    while (row < rows_) {
      multiply(row, even, finish);
      even = load();
      row += step_;
      if (row >= rows_) break;
      multiply(row, odd, finish);
      odd = load();
      row += step_;
    }
  }

 private:
  static constexpr int kProducts = kNarrowColumns / 8;

  using Piece = uint4;  // a thread's, of 16 rows

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  // Of the 16 rows that come next; zeros where there is nothing.
  __device__ __forceinline__ Piece load() {
    const int first = lane() * 8;  // of the piece, from next_row_ on
    const int count = min(rows_ - next_row_, 16) * inputs_ - first;
    const uint16_t* const from =
        static_cast<const uint16_t*>(p_.a) + int64_t{next_row_} * inputs_ + first;
    next_row_ += step_;
    if (count >= 8) return *reinterpret_cast<const Piece*>(from);
    auto element = [&](int i) { return i < count ? from[i] : uint16_t{0}; };
    auto pair = [&](int i) { return pair_of(element(i), element(i + 1)); };
    return {pair(0), pair(2), pair(4), pair(6)};
  }

  // Values of b that lie behind each other come in pieces as well: element by element, a warp would
  // ask for eight lines at a time, and all warps together for longer than they multiply.
  __device__ __forceinline__ void load_weights() {
    const int columns = static_cast<int>(min(p_.n - first_column_, int64_t{kNarrowColumns}));
    const bool in_pieces = kBKInner ? fetch_lines(columns) : fetch_lines_of_k(columns);
    __syncwarp();
    const uint16_t* first = reinterpret_cast<const uint16_t*>(memory_);
    int64_t stride = kBKInner ? inputs_ : kNarrowColumns;
    if (!in_pieces) {
      first = static_cast<const uint16_t*>(p_.b.data) +
              first_column_ * (kBKInner ? p_.b.stride : int64_t{1});
      stride = p_.b.stride;
    }
    // Of product i, lane l has row l / 4 of b: column 8 (l / 8) + 2 i + l / 4 % 2.
    const int row = lane() / 4;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const int column = min(row / 2 * 8 + i * 2 + row % 2, columns - 1);
      auto element = [&](int k) {
        if (k >= inputs_) return uint16_t{0};
        return kBKInner ? first[column * stride + k] : first[k * stride + column];
      };
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int k = first_k(high);
        weights_[i][high] = pair_of(element(k), element(k + 1));
      }
    }
    if constexpr (kHasBias) load_bias();
  }

  // The lines of b, if they are one array.
  __device__ __forceinline__ bool fetch_lines(int columns) {
    if (p_.b.stride != p_.k || reinterpret_cast<uintptr_t>(p_.b.data) % kVectorBytes != 0)
      return false;
    const int pieces = columns * inputs_ / 8;
    const Piece* const from = reinterpret_cast<const Piece*>(
        static_cast<const uint16_t*>(p_.b.data) + first_column_ * inputs_);
#pragma unroll
    for (int i = 0; i < kNarrowBytesOfWarp / kVectorBytes; i += kWarpSize) {
      if (i + lane() < pieces) reinterpret_cast<Piece*>(memory_)[i + lane()] = from[i + lane()];
    }
    return true;
  }

  // The columns of each k, as [k][kNarrowColumns], if those begin at multiples of 16 bytes.
  __device__ __forceinline__ bool fetch_lines_of_k(int columns) {
    constexpr int kPieces = kNarrowColumns / 8;
    if (p_.b.stride % 8 != 0 || reinterpret_cast<uintptr_t>(p_.b.data) % kVectorBytes != 0)
      return false;
#pragma unroll
    for (int i = 0; i < kNarrowBytesOfWarp / kVectorBytes; i += kWarpSize) {
      const int k = (i + lane()) / kPieces, column = lane() % kPieces * 8;
      const uint16_t* const from =
          static_cast<const uint16_t*>(p_.b.data) + k * p_.b.stride + first_column_ + column;
      if (k < inputs_ && column < columns)
        reinterpret_cast<Piece*>(memory_)[i + lane()] = *reinterpret_cast<const Piece*>(from);
    }
    return true;
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
  template <typename Finish>
  __device__ __forceinline__ void multiply(int first_row, const Piece& piece,
                                           const Finish& finish) {
    uint32_t x[4];
    exchange(piece, x);
    const int row = first_row + lane() / 4;
    T* const to = static_cast<T*>(p_.output.data) + row * p_.output.stride + column_;
    float sums[kProducts][4];
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = kHasBias ? bias_[2 * i + j % 2] : 0.0f;
      multiply_tiles<T>(sums[i], x, weights_[i]);
    }
    if (column_ >= p_.n) return;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      float z[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) z[j] = sums[j / 2][lower * 2 + j % 2];
      finish(row + lower * 8 < rows_, to + lower * 8 * p_.output.stride, int64_t{row + lower * 8},
             column_, z);
    }
  }

  static __device__ __forceinline__ int first_k(int high) { return lane() % 4 * 2 + high * 8; }

  static __device__ __forceinline__ uint32_t pair_of(uint16_t first, uint16_t second) {
    return first | static_cast<uint32_t>(second) << 16;
  }

  const NarrowParams& p_;
  unsigned char* memory_;
  int64_t first_column_, column_;  // of the warp, of the thread
  const int inputs_, rows_;
  int step_, next_row_;  // that is loaded
  uint32_t weights_[kProducts][2];
  float bias_[kHasBias ? 8 : 1];
};

}  // namespace fusedcuda
