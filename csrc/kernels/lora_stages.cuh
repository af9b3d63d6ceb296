// What the products of lora.cu share: pieces of 16 bytes that come to shared memory in stages.
#pragma once

#include <cstdint>

#include "common/async_copy.cuh"
#include "common/philox.cuh"
#include "common/vec.cuh"
#include "lora_config.h"

namespace fusedcuda {

// A piece of 16 bytes, of which the first `valid` elements exist; the others are 0, so that they
// add nothing to a product.
template <typename T>
__device__ __forceinline__ void fetch_piece(T* to, const T* from, int64_t valid, bool aligned) {
  constexpr int kPiece = kVectorBytes / sizeof(T);
  if (aligned && valid >= kPiece) {
    copy_async_16(to, from);
    return;
  }
  Vector<T, kPiece> piece;
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    piece.values[i] = i < valid ? from[i] : from_compute<T>(Compute<T>(0));
  store_vector<T, kPiece>(to, piece);
}

// A matrix in global memory, of which rows and columns that do not exist are 0.
template <typename T>
struct PieceSource {
  const T* data;
  int64_t stride;
  int64_t rows, columns;
  bool aligned;
};

// The pieces of a tile that a thread has: every so many rows, the same piece of each.
template <typename T>
class OwnPieces {
 public:
  // Of rows of `columns` elements, a multiple of a piece.
  __device__ explicit OwnPieces(int columns) : columns_(columns) {
    constexpr int kPiece = kVectorBytes / sizeof(T);
    const int pieces = columns / kPiece;
    rows_apart_ = kLoraThreads / pieces;
    row_ = static_cast<int>(threadIdx.x) / pieces;
    column_ = static_cast<int>(threadIdx.x) % pieces * kPiece;
    if (row_ >= rows_apart_) row_ = 1 << 30;  // there are more threads than whole rows
  }

  // f(row, column)
  template <typename F>
  __device__ __forceinline__ void for_each(int rows, F f) const {
    for (int row = row_; row < rows; row += rows_apart_) f(row, column_);
  }

  // Those of a tile of which all is there, from the place of its first element on.
  __device__ __forceinline__ void copy(const T* from, int64_t stride, int rows, T* shared,
                                       int pitch) const {
    from += row_ * stride + column_;
    shared += row_ * pitch + column_;
#pragma unroll 4
    for (int row = row_; row < rows; row += rows_apart_) {
      copy_async_16(shared, from);
      from += rows_apart_ * stride;
      shared += rows_apart_ * pitch;
    }
  }

  __device__ __forceinline__ int columns() const { return columns_; }

 private:
  int columns_, row_, column_, rows_apart_;
};

// The `rows` rows of a tile from (first_row, first_column) on, by all threads of the block. (Where
// every piece asks whether it is there, the addresses and branches take longer than the copies: 70
// instructions a piece, 36 us of 8192 x 4096 elements of two bytes.)
template <typename T>
__device__ __forceinline__ void fetch_tile(const PieceSource<T>& source, const OwnPieces<T>& pieces,
                                           int64_t first_row, int64_t first_column, int rows,
                                           T* shared, int pitch) {
  const T* const first = source.data + first_row * source.stride + first_column;
  if (source.aligned && first_row + rows <= source.rows &&
      first_column + pieces.columns() <= source.columns) {
    pieces.copy(first, source.stride, rows, shared, pitch);
    return;
  }
  pieces.for_each(rows, [&](int row, int column) {
    const int64_t valid =
        first_row + row < source.rows ? source.columns - first_column - column : 0;
    fetch_piece(shared + row * pitch + column, first + row * source.stride + column, valid,
                source.aligned);
  });
}

// Dropout of what fetch_tile() has fetched, each thread of its own pieces: no barrier is needed.
template <typename T>
__device__ __forceinline__ void drop_in_tile(const DropoutMask& mask, const OwnPieces<T>& pieces,
                                             int64_t first_row, int64_t first_column, int rows,
                                             T* shared, int pitch) {
  static_assert(sizeof(T) == 2);
  pieces.for_each(rows, [&](int row, int column) {
    const uint4 kept = mask.of_eight(first_row + row, static_cast<int>(first_column) + column);
    auto* const piece = reinterpret_cast<uint4*>(shared + row * pitch + column);
    const uint4 values = *piece;
    *piece = {values.x & kept.x, values.y & kept.y, values.z & kept.z, values.w & kept.w};
  });
}

// For i from `first` to before `last`: fetch(i, stage), some iterations ahead, then, with the
// thread's own pieces there, finish(i, stage), and with those of all threads there, use(stage).
template <typename Fetch, typename Finish, typename Use>
__device__ __forceinline__ void for_stages(int64_t first, int64_t last, char* shared,
                                           int bytes_of_stage, Fetch fetch, Finish finish,
                                           Use use) {
  for (int stage = 0; stage < kLoraStages - 1; ++stage) {
    if (first + stage < last) fetch(first + stage, shared + stage * bytes_of_stage);
    copy_async_commit();
  }
  let_next_kernel_start();
  int stage = 0;
  for (int64_t i = first; i < last; ++i) {
    char* const here = shared + stage * bytes_of_stage;
    copy_async_wait<kLoraStages - 2>();
    finish(i, here);
    __syncthreads();  // it is all there, and nobody uses the stage before any more
    const int free_stage = stage == 0 ? kLoraStages - 1 : stage - 1;
    const int64_t next = i + kLoraStages - 1;
    if (next < last) fetch(next, shared + free_stage * bytes_of_stage);
    copy_async_commit();
    use(here);
    stage = stage == kLoraStages - 1 ? 0 : stage + 1;
  }
}

// The iterations of part `split` of `splits`.
struct StageRange {
  int64_t first, last;

  __device__ StageRange(int64_t stages, int split, int splits)
      : first(stages * split / splits), last(stages * (split + 1) / splits) {}
};

}  // namespace fusedcuda
