// The interaction by threads, for float32 and float64: a block has a sample at a time, of which it
// goes through kDotChunk columns after the other in shared memory. A thread's products are small
// squares, so that it multiplies more often than it reads.
#pragma once

#include <cstdint>

#include "common/shared.cuh"
#include "common/vec.cuh"
#include "dlrm_lookup.cuh"
#include "dlrm_vectors.cuh"

namespace fusedcuda {

template <typename T, bool kLookup>
__device__ __forceinline__ const T* vector_of(const DotVectors& p, int64_t sample, int vector) {
  if (vector == 0) return static_cast<const T*>(p.dense) + sample * p.dense_stride;
  const T* const others = static_cast<const T*>(p.embeddings);
  if constexpr (kLookup) {
    const char* const address = address_of_index(p.lookup, sample, vector - 1);
    return behind(others, start_of_row<T>(p, load_index(address, p.lookup.is_int32)));
  }
  return others + sample * p.sample_stride + (vector - 1) * p.vector_stride;
}

// The columns [start, start + kDotChunk) of all vectors; zero where there are none.
template <typename T, bool kLookup, bool kAligned>
__device__ __forceinline__ void load_chunk(const DotVectors& p, int64_t sample, int start, T* chunk,
                                           int pitch) {
  constexpr int kPiece = kDotPiece<T, kAligned>;
  constexpr int kPieces = kDotChunk / kPiece;
  for (int i = threadIdx.x; i < p.vectors * kPieces; i += blockDim.x) {
    const int vector = i / kPieces, column = i % kPieces * kPiece;
    Vector<T, kPiece> piece = {};
    if (start + column < p.columns)
      piece = load_vector<T, kPiece>(vector_of<T, kLookup>(p, sample, vector) + start + column);
    store_vector<T, kPiece>(chunk + vector * pitch + column, piece);
  }
}

// A thread's vectors of either side are `groups` apart, so that those of neighbouring threads are
// neighbours, which are in different banks.
template <typename T, bool kLookup, bool kAligned>
__global__ void __launch_bounds__(kDotThreads)
    dot_interaction_threads_kernel(const __grid_constant__ DotParams p, bool aligned_row) {
  constexpr int kStep = kVectorBytes / sizeof(T);
  const DotChunkLayout layout(p, sizeof(T));
  T* chunk = static_cast<T*>(dynamic_shared());
  T* row = chunk + layout.chunk;
  // The tile (high, low) of the lower triangle of groups.
  const int tile = threadIdx.x;
  int high = 0;
  while ((high + 1) * (high + 2) / 2 <= tile) ++high;
  const int low = tile - high * (high + 1) / 2;

  wait_for_previous_kernel();
  for (int64_t sample = blockIdx.x; sample < p.batch; sample += gridDim.x) {
    T sums[kDotSide][kDotSide] = {};
    for (int start = 0; start < p.columns; start += kDotChunk) {
      __syncthreads();
      load_chunk<T, kLookup, kAligned>(p, sample, start, chunk, layout.pitch);
      __syncthreads();
      const int columns = min(kDotChunk, p.columns - start);
      copy_row(chunk, row + start, columns, false, threadIdx.x, blockDim.x);
      if (high >= layout.groups) continue;
      for (int column = 0; column < columns; column += kStep) {
        Vector<T, kStep> left[kDotSide], right[kDotSide];
#pragma unroll
        for (int k = 0; k < kDotSide; ++k) {
          const int i = min(high + k * layout.groups, p.vectors - 1);
          const int j = min(low + k * layout.groups, p.vectors - 1);
          left[k] = load_vector<T, kStep>(chunk + i * layout.pitch + column);
          right[k] = load_vector<T, kStep>(chunk + j * layout.pitch + column);
        }
#pragma unroll
        for (int i = 0; i < kDotSide; ++i) {
#pragma unroll
          for (int j = 0; j < kDotSide; ++j) {
#pragma unroll
            for (int k = 0; k < kStep; ++k) sums[i][j] += left[i].values[k] * right[j].values[k];
          }
        }
      }
    }
    if (high < layout.groups) {
#pragma unroll
      for (int k = 0; k < kDotSide * kDotSide; ++k) {
        const int i = high + k / kDotSide * layout.groups, j = low + k % kDotSide * layout.groups;
        // A tile on the diagonal has each pair twice.
        const bool is_own = high != low || i > j;
        if (is_own && i < p.vectors && j < p.vectors)
          row[p.columns + product_index(p, i, j)] = sums[k / kDotSide][k % kDotSide];
      }
    }
    for (int i = dot_row_elements(p.vectors, p.columns) + threadIdx.x; i < p.width; i += blockDim.x)
      row[i] = 0;
    __syncthreads();
    T* output = static_cast<T*>(p.output) + sample * p.width;
    copy_row(row, output, p.width, aligned_row, threadIdx.x, blockDim.x);
  }
  let_next_kernel_start();
}

template <typename T, bool kLookup, bool kAligned>
__global__ void __launch_bounds__(kDotThreads)
    dot_interaction_bwd_threads_kernel(const __grid_constant__ DotBwdParams p) {
  constexpr int kStep = kVectorBytes / sizeof(T);
  constexpr int kSteps = kDotChunk / kStep;
  const DotChunkLayout layout(p, sizeof(T));
  const int side = layout.side;
  T* z = static_cast<T*>(dynamic_shared());  // the gradients of the products, a symmetric matrix
  T* chunk = z + side * side;

  wait_for_previous_kernel();
  for (int64_t sample = blockIdx.x; sample < p.batch; sample += gridDim.x) {
    const T* grad = static_cast<const T*>(p.grad) + sample * p.grad_stride;
    __syncthreads();
    for (int k = threadIdx.x; k < side * side; k += blockDim.x) {
      const int i = k / side, j = k % side;
      if (i == j || max(i, j) >= p.vectors) {
        z[k] = 0;
      } else if (i > j) {
        z[k] = z[j * side + i] = grad[p.columns + product_index(p, i, j)];
      }
    }
    for (int start = 0; start < p.columns; start += kDotChunk) {
      __syncthreads();
      load_chunk<T, kLookup, kAligned>(p, sample, start, chunk, layout.pitch);
      __syncthreads();
      for (int tile = threadIdx.x; tile < layout.backward_tiles(); tile += blockDim.x) {
        const int first = tile / kSteps * kStep, column = tile % kSteps * kStep;
        T sums[kStep][kStep] = {};
        for (int j = 0; j < p.vectors; ++j) {
          const Vector<T, kStep> dz = load_vector<T, kStep>(z + j * side + first);
          const Vector<T, kStep> v = load_vector<T, kStep>(chunk + j * layout.pitch + column);
#pragma unroll
          for (int i = 0; i < kStep; ++i) {
#pragma unroll
            for (int k = 0; k < kStep; ++k) sums[i][k] += dz.values[i] * v.values[k];
          }
        }
        const int at = start + column;
#pragma unroll
        for (int k = 0; k < kStep; ++k) {
          if (first == 0 && at + k < p.columns) sums[0][k] += grad[at + k];
        }
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          const int vector = first + i;
          if (vector >= p.vectors || at >= p.columns) continue;
          if (kLookup && (vector == 0 ? p.dense_grad : p.embeddings_grad) == nullptr) continue;
          T* to = vector == 0 ? static_cast<T*>(p.dense_grad) + sample * p.columns
                              : static_cast<T*>(p.embeddings_grad) +
                                    (sample * (p.vectors - 1) + vector - 1) * p.columns;
          if constexpr (kAligned) {
            Vector<T, kStep> gradient;
#pragma unroll
            for (int k = 0; k < kStep; ++k) gradient.values[k] = sums[i][k];
            store_vector<T, kStep>(to + at, gradient);
          } else {
#pragma unroll
            for (int k = 0; k < kStep; ++k) {
              if (at + k < p.columns) to[at + k] = sums[i][k];
            }
          }
        }
      }
    }
  }
  let_next_kernel_start();
}

}  // namespace fusedcuda
