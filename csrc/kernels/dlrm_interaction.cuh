// The interaction on tensor cores, for 16-bit types: a warp has samples of its own, and while it
// works on one, the next ones are on their way to shared memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/async_copy.cuh"
#include "common/mma.cuh"
#include "common/shared.cuh"
#include "common/vec.cuh"
#include "common/wgmma.cuh"
#include "dlrm_layout.h"

namespace fusedcuda {

// Where the product of two vectors is in an output row, behind the dense vector:
//   lower: (1, 0), (2, 0), (2, 1), (3, 0), ...      upper: (0, 1), (0, 2), ..., (1, 2), ...
__device__ __forceinline__ int product_index(const DotVectors& p, int i, int j) {
  const int high = max(i, j), low = min(i, j);
  if (p.upper) return low * (2 * p.vectors - low - 1) / 2 + high - low - 1;
  return high * (high - 1) / 2 + low;
}

// Copies a row between shared and global memory, with `threads` threads. `aligned`: it consists of
// whole, aligned pieces of 16 bytes. (As uint4: four floats would be stored one by one.)
template <typename T>
__device__ __forceinline__ void copy_row(const T* from, T* to, int count, bool aligned, int thread,
                                         int threads) {
  constexpr int kVec = kVectorBytes / sizeof(T);
  if (aligned) {
    for (int i = thread * kVec; i < count; i += threads * kVec)
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
  } else {
    for (int i = thread; i < count; i += threads) to[i] = from[i];
  }
}

// Pieces of kPiece elements of a sample's vectors, of which a lane takes every 32nd.
template <int kPiece>
class Pieces {
 public:
  __device__ Pieces(int columns, int lane)
      : in_vector_(columns / kPiece),
        vector_(lane / in_vector_),
        piece_(lane % in_vector_),
        vectors_apart_(kWarpSize / in_vector_),
        pieces_apart_(kWarpSize % in_vector_) {}

  // f(vector, column)
  template <typename F>
  __device__ __forceinline__ void for_each(int vectors, F f) const {
    int vector = vector_, piece = piece_;
    while (vector < vectors) {
      f(vector, piece * kPiece);
      vector += vectors_apart_;
      piece += pieces_apart_;
      if (piece >= in_vector_) {
        piece -= in_vector_;
        ++vector;
      }
    }
  }

 private:
  int in_vector_;
  int vector_, piece_;  // the first one
  int vectors_apart_, pieces_apart_;
};

template <typename T>
__device__ __forceinline__ const T* vector_of(const DotVectors& p, int64_t sample, int vector) {
  if (vector == 0) return static_cast<const T*>(p.dense) + sample * p.dense_stride;
  return static_cast<const T*>(p.embeddings) + sample * p.sample_stride +
         (vector - 1) * p.vector_stride;
}

// Calls use(sample, stage) for each of the warp's samples after load(sample, stage) has fetched it;
// kStages - 1 of them ahead.
template <int kStages, typename T, typename Load, typename Use>
__device__ __forceinline__ void for_own_samples(int64_t batch, T* stages, int stage_size, Load load,
                                                Use use) {
  const int warps = blockDim.x / kWarpSize;
  const int64_t step = int64_t{gridDim.x} * warps;
  int64_t sample = int64_t{blockIdx.x} * warps + threadIdx.x / kWarpSize;
  int64_t next = sample;
  for (int stage = 0; stage < kStages - 1; ++stage, next += step) {
    if (next < batch) load(next, stages + stage * stage_size);
    copy_async_commit();
  }
  let_next_kernel_start();
  int stage = 0;
  for (; sample < batch; sample += step, next += step) {
    copy_async_wait<kStages - 2>();
    __syncwarp();  // the other lanes' copies are there too, and nobody uses the stage before
    const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
    if (next < batch) load(next, stages + free_stage * stage_size);
    copy_async_commit();
    use(sample, stages + stage * stage_size);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
}

// What follows from the lane is computed again for each sample, instead of being kept in more
// registers than there are.
template <int kTiles>
__device__ __forceinline__ int lane_again(int lane) {
#ifndef FUSEDCUDA_EMULATION
  if constexpr (kTiles > kFewDotTiles) asm volatile("" : "+r"(lane));
#endif
  return lane;
}

// What both kernels do with their part of shared memory before they start: all of it is zero, so
// that vectors and columns that do not exist, but are multiplied, add nothing.
template <typename T>
__device__ __forceinline__ void fill_with_zeros(T* memory, int elements, int lane) {
  constexpr int kVec = kVectorBytes / sizeof(T);
  for (int i = lane * kVec; i < elements; i += kWarpSize * kVec)
    *reinterpret_cast<uint4*>(memory + i) = uint4{};
  __syncwarp();
}

template <typename T, bool kAligned>
constexpr int kDotPiece = kAligned ? kVectorBytes / sizeof(T) : 1;

template <typename T, bool kAligned>
__device__ __forceinline__ void load_vectors(const DotVectors& p, int64_t sample,
                                             const Pieces<kDotPiece<T, kAligned>>& pieces,
                                             T* vectors, int pitch) {
  pieces.for_each(p.vectors, [&](int vector, int column) {
    const T* from = vector_of<T>(p, sample, vector) + column;
    T* to = vectors + vector * pitch + column;
    if constexpr (kAligned) {
      copy_async_16(to, from);
    } else {
      *to = *from;
    }
  });
}

// The product of the vectors with themselves, V V^T, tile by tile of 16 x 8 and of these only those
// that reach below the diagonal: of 16 vectors m, the columns up to 2 m + 1.
template <typename T, int kTiles, bool kAligned>
__global__ void __launch_bounds__(kDotWarps* kWarpSize,
                                  kTiles == kFewDotTiles ? kFewTilesBlocks : kManyTilesBlocks)
    dot_interaction_kernel(const __grid_constant__ DotParams p, bool aligned_row) {
  const int lane = threadIdx.x % kWarpSize;
  const DotLayout layout(p, kTiles);
  const int pitch = layout.pitch;
  T* row = static_cast<T*>(dynamic_shared()) + threadIdx.x / kWarpSize * layout.forward_elements();
  fill_with_zeros(row, layout.forward_elements(), lane);
  const Pieces<kDotPiece<T, kAligned>> pieces(p.columns, lane);

  auto load = [&](int64_t sample, T* vectors) {
    load_vectors<T, kAligned>(p, sample, pieces, vectors, pitch);
  };
  auto use = [&](int64_t sample, const T* vectors) {
    copy_row(vectors, row, p.columns, kAligned, lane, kWarpSize);
    float sums[kTiles][2 * kTiles][4] = {};
    // Rows of V are rows of the left factor and columns of the right one: the same registers.
    const T* fragments = vectors + lane % 16 * pitch + lane / 16 * 8;
#pragma unroll 4
    for (int column = 0; column < p.columns; column += 16) {
      uint32_t v[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
        load_matrices<false>(fragments + m * 16 * pitch + column, v[m]);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2 * m + 2; ++n)
          multiply_tiles<T>(sums[m][n], v[m], {v[n / 2][n % 2], v[n / 2][n % 2 + 2]});
      }
    }
    const int own = lane_again<kTiles>(lane);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * m + 2; ++n) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int i = 16 * m + own / 4 + k / 2 * 8, j = 8 * n + own % 4 * 2 + k % 2;
          if (j < i && i < p.vectors)
            row[p.columns + product_index(p, i, j)] = from_compute<T>(sums[m][n][k]);
        }
      }
    }
    __syncwarp();
    T* output = static_cast<T*>(p.output) + sample * p.width;
    copy_row(row, output, p.width, aligned_row, lane, kWarpSize);
  };
  wait_for_previous_kernel();
  for_own_samples<dot_stages(kTiles)>(p.batch, row + layout.row, layout.vectors, load, use);
}

// With the gradients dz of the products as a symmetric matrix Z, zero on its diagonal, those of the
// vectors are Z V; that of the dense vector also has what comes in for it directly. They take the
// place of the vectors, 16 columns at a time.
template <typename T, int kTiles, bool kAligned>
__global__ void __launch_bounds__(kDotWarps* kWarpSize,
                                  kTiles == kFewDotTiles ? kFewTilesBlocks : kManyTilesBlocks)
    dot_interaction_bwd_kernel(const __grid_constant__ DotBwdParams p, bool aligned_row) {
  const int lane = threadIdx.x % kWarpSize;
  const DotLayout layout(p, kTiles);
  const int pitch = layout.pitch;
  T* stages =
      static_cast<T*>(dynamic_shared()) + threadIdx.x / kWarpSize * layout.backward_elements();
  fill_with_zeros(stages, layout.backward_elements(), lane);
  const Pieces<kDotPiece<T, kAligned>> pieces(p.columns, lane);
  const int given = dot_row_elements(p.vectors, p.columns);

  auto load = [&](int64_t sample, T* vectors) {
    load_vectors<T, kAligned>(p, sample, pieces, vectors, pitch);
    const T* from = static_cast<const T*>(p.grad) + sample * p.grad_stride;
    T* to = vectors + layout.vectors;
    if (aligned_row) {
#pragma unroll 2
      for (int i = lane * 8; i < given; i += kWarpSize * 8) copy_async_16(to + i, from + i);
    } else {
      copy_row(from, to, given, false, lane, kWarpSize);
    }
  };
  auto use = [&](int64_t sample, T* vectors) {
    const T* grad = vectors + layout.vectors;
    const int own = lane_again<kTiles>(lane);
    auto z = [&](int i, int j) -> uint32_t {
      uint16_t bits = 0;
      if (i != j && max(i, j) < p.vectors)
        memcpy(&bits, &grad[p.columns + product_index(p, i, j)], sizeof(bits));
      return bits;
    };
    uint32_t a[kTiles][kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int i = 16 * m + own / 4 + word % 2 * 8, j = 16 * k + own % 4 * 2 + word / 2 * 8;
          a[m][k][word] = z(i, j) | z(i, j + 1) << 16;
        }
      }
    }
    T* fragments = vectors + lane % 16 * pitch + lane / 16 * 8;
    T* results = vectors + lane / 4 * pitch + lane % 4 * 2;
    for (int column = 0; column < p.columns; column += 16) {
      uint32_t v[kTiles][4];
#pragma unroll
      for (int k = 0; k < kTiles; ++k)
        load_matrices<true>(fragments + k * 16 * pitch + column, v[k]);
      __syncwarp();  // all lanes have theirs of these columns
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sums[4] = {};
          if (m == 0 && lane < 4) {  // of the dense vector
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const int at = column + 8 * half + 2 * lane + k;
              if (at < p.columns) sums[k] = to_compute(grad[at]);
            }
          }
#pragma unroll
          for (int k = 0; k < kTiles; ++k)
            multiply_tiles<T>(sums, a[m][k], {v[k][2 * half], v[k][2 * half + 1]});
#pragma unroll
          for (int lower = 0; lower < 2; ++lower) {
            const int i = 16 * m + lane / 4 + 8 * lower;
            const uint32_t pair = pack_pair<T>(sums[2 * lower], sums[2 * lower + 1]);
            // Vectors that do not exist stay zero.
            if (i < p.vectors)
              memcpy(results + (16 * m + 8 * lower) * pitch + column + 8 * half, &pair,
                     sizeof(pair));
          }
        }
      }
    }
    __syncwarp();
    T* dense = static_cast<T*>(p.dense_grad) + sample * p.columns;
    T* embeddings = static_cast<T*>(p.embeddings_grad) + sample * (p.vectors - 1) * p.columns;
    pieces.for_each(p.vectors, [&](int vector, int column) {
      constexpr int kPiece = kDotPiece<T, kAligned>;
      T* to = vector == 0 ? dense : embeddings + (vector - 1) * p.columns;
      store_vector<T, kPiece>(to + column,
                              load_vector<T, kPiece>(vectors + vector * pitch + column));
    });
  };
  wait_for_previous_kernel();
  for_own_samples<dot_stages(kTiles)>(p.batch, stages, layout.vectors + layout.row, load, use);
}

}  // namespace fusedcuda
