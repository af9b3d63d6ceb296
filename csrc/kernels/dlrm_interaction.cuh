// The interaction on tensor cores, for 16-bit types: a warp has samples of its own, whose vectors
// it copies to shared memory. What counts beside the memory that it moves is how few instructions a
// sample takes: what is the same for all samples is computed before the first one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "dlrm_lookup.cuh"
#include "dlrm_vectors.cuh"

namespace fusedcuda {

// `bytes` from the start of the block's shared memory.
template <typename T>
__device__ __forceinline__ T* shared_at(int bytes) {
  return reinterpret_cast<T*>(static_cast<char*>(dynamic_shared()) + bytes);
}

template <typename T>
__device__ __forceinline__ void fill_with_zeros(T* memory, int elements, int lane) {
  constexpr int kVec = kVectorBytes / sizeof(T);
  for (int i = lane * kVec; i < elements; i += kWarpSize * kVec)
    *reinterpret_cast<uint4*>(memory + i) = uint4{};
}

// Copies the vectors of a warp's samples to shared memory, one sample after the other.
template <typename T, bool kAligned>
class VectorLoader {
 public:
  using Pieces = fusedcuda::Pieces<kDotPiece<T, kAligned>>;

  __device__ VectorLoader(const DotVectors& p, const DotSteps& steps, const Pieces& pieces,
                          int pitch)
      : dense_(static_cast<const T*>(p.dense) + pieces.dense(), p.dense_stride, steps.dense),
        others_(static_cast<const T*>(p.embeddings) + pieces.first(p.vector_stride),
                p.sample_stride, steps.embeddings),
        first_(pitch + static_cast<int>(pieces.first(pitch))) {}

  __device__ __forceinline__ void start(const DotVectors&, const DotSteps&) {}

  __device__ __forceinline__ void load(const DotVectors&, const DotSteps& steps,
                                       const Pieces& pieces, T* vectors, bool) {
    constexpr auto copy = copy_piece_async<T, kAligned>;
    pieces.copy_dense(dense_.next(), vectors + pieces.dense(), copy);
    pieces.copy_others(others_.next(), steps.piece, vectors + first_, steps.piece_shared, copy);
  }

 private:
  OwnSamples<const T> dense_, others_;  // the lane's first pieces
  int first_;                           // of the others, in shared memory
};

template <typename T, int kTiles, bool kLookup, bool kAligned>
using Loader =
    std::conditional_t<kLookup, RowLoader<T, kTiles, kAligned>, VectorLoader<T, kAligned>>;

// Where a lane reads its part of each tile of 16 vectors (load_matrices), from the first vector.
// For vectors that do not exist it reads the last one: what becomes of it is not used, or is
// multiplied by the zeros that Z has there.
template <int kTiles>
struct Fragments {
  int places[kTiles];

  __device__ Fragments(const DotVectors& p, int pitch, int lane) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
      places[m] = min(16 * m + lane % 16, p.vectors - 1) * pitch + lane / 16 * 8;
  }
};

// The product of the vectors with themselves, V V^T, tile by tile of 16 x 8 and of these only those
// that reach below the diagonal: of 16 vectors m, the columns up to 2 m + 1.
template <typename T, int kTiles, int kStages, bool kLookup, bool kAligned>
__global__ void __launch_bounds__(kDotWarps* kWarpSize,
                                  kTiles == kFewDotTiles ? kFewTilesBlocks : kManyTilesBlocks)
    dot_interaction_kernel(const __grid_constant__ DotParams p,
                           const __grid_constant__ DotSteps steps, bool aligned_row) {
  const int lane = threadIdx.x % kWarpSize;
  const DotLayout layout(p, kTiles, kStages);
  const int start = threadIdx.x / kWarpSize * layout.forward_elements();
  T* row = static_cast<T*>(dynamic_shared()) + start;
  // Columns that do not exist, but are multiplied, add nothing; the padding is written as it is.
  fill_with_zeros(row, layout.forward_elements(), lane);
  __syncwarp();
  const Pieces<kDotPiece<T, kAligned>> pieces(p, lane);
  const Fragments<kTiles> fragments(p, layout.pitch, lane);
  // Of the 8 x 8 products at (8 high, 8 low) a lane has (i, j) and (i, j + 1). Where they are in
  // shared memory, in bytes, is the sum of what is known of i and of j.
  const int i = lane / 4, j = lane % 4 * 2;
  int of_high[2 * kTiles], of_low[2 * kTiles][2];
#pragma unroll
  for (int k = 0; k < 2 * kTiles; ++k) {
    of_high[k] = sizeof(T) * (start + p.columns + place_of_high(p.upper, 8 * k + i));
    of_low[k][0] = sizeof(T) * place_of_low(p.upper, 8 * k + j, p.vectors);
    of_low[k][1] = sizeof(T) * place_of_low(p.upper, 8 * k + j + 1, p.vectors);
  }

  Loader<T, kTiles, kLookup, kAligned> loader(p, steps, pieces, layout.pitch);
  OwnSamples<T> outputs(static_cast<T*>(p.output), p.width, steps.row);
  auto load = [&](T* vectors, bool has_next) { loader.load(p, steps, pieces, vectors, has_next); };
  auto use = [&](const T* vectors, auto done) {
    pieces.copy_dense(vectors + pieces.dense(), row + pieces.dense(), copy_piece<T, kAligned>);
    float sums[kTiles][2 * kTiles][4] = {};
    int column = 0;
#pragma unroll 2
    do {
      // Rows of V are rows of the left factor and columns of the right one: the same registers.
      uint32_t v[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
        load_matrices<false>(vectors + fragments.places[m] + column, v[m]);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2 * m + 2; ++n)
          multiply_tiles<T>(sums[m][n], v[m], {v[n / 2][n % 2], v[n / 2][n % 2 + 2]});
      }
      column += 16;
    } while (column < p.columns);
    done();
#pragma unroll
    for (int high = 0; high < 2 * kTiles; ++high) {
      keep(of_high[high]);  // and of_low, not all of their sums
#pragma unroll
      for (int low = 0; low <= high; ++low) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (8 * high + i < p.vectors && (low < high || j + k < i))
            *shared_at<T>(of_high[high] + of_low[low][k]) =
                from_compute<T>(sums[high / 2][low][high % 2 * 2 + k]);
        }
      }
    }
    __syncwarp();
    copy_row(row, outputs.next(), p.width, aligned_row, lane, kWarpSize);
  };
  wait_for_previous_kernel();
  loader.start(p, steps);
  for_own_samples<kStages>(steps, row + layout.row, layout.vectors, load, use);
}

// With the gradients dz of the products as a symmetric matrix Z, zero on its diagonal, those of the
// vectors are Z V; that of the dense vector also has what comes in for it directly. They take the
// place of the vectors, 16 columns at a time.
//
// In shared memory is what Z has below its diagonal, L; where L is not zero, its transpose is, so
// that Z is L | L^T. `places` says where in L each element of the incoming row belongs, in bytes.
template <typename T, int kTiles, int kStages, bool kLookup, bool kAligned>
__global__ void __launch_bounds__(kDotWarps* kWarpSize,
                                  kTiles == kFewDotTiles ? kFewTilesBlocks : kManyTilesBlocks)
    dot_interaction_bwd_kernel(const __grid_constant__ DotBwdParams p,
                               const __grid_constant__ DotSteps steps, bool aligned_row) {
  constexpr int kSide = DotLayout::side(kTiles);
  const int lane = threadIdx.x % kWarpSize;
  const DotLayout layout(p, kTiles, kStages);
  const int pitch = layout.pitch;
  uint16_t* places = static_cast<uint16_t*>(dynamic_shared());
  const int start = layout.places + threadIdx.x / kWarpSize * layout.backward_elements();
  T* triangle = static_cast<T*>(dynamic_shared()) + start;
  // (Row by row: with a division for each element this took longer than a warp's only sample.)
  for (int i = threadIdx.x / kWarpSize; i < p.vectors; i += blockDim.x / kWarpSize) {
    for (int j = lane; j < i; j += kWarpSize)
      places[product_index(p, i, j)] = sizeof(T) * (i * kSide + j);
  }
  fill_with_zeros(triangle, layout.triangle, lane);
  __syncthreads();
  const Pieces<kDotPiece<T, kAligned>> pieces(p, lane);
  const Fragments<kTiles> fragments(p, pitch, lane);
  const int products = dot_products(p.vectors);

  Loader<T, kTiles, kLookup, kAligned> loader(p, steps, pieces, pitch);
  OwnSamples<const T> grads(static_cast<const T*>(p.grad), p.grad_stride, steps.row);
  auto load = [&](T* vectors, bool has_next) {
    loader.load(p, steps, pieces, vectors, has_next);
    const T* from = grads.next();
    T* to = vectors + layout.vectors;
    const int given = p.columns + products;
    if (aligned_row) {
#pragma unroll 1
      for (int i = lane * 8; i < given; i += kWarpSize * 8) copy_async_16(to + i, from + i);
    } else {
      copy_row(from, to, given, false, lane, kWarpSize);
    }
  };

  OwnSamples<T> dense_grads(static_cast<T*>(p.dense_grad) + pieces.dense(), p.columns,
                            steps.dense_grad);
  OwnSamples<T> other_grads(static_cast<T*>(p.embeddings_grad) + pieces.first(p.columns),
                            int64_t{p.vectors - 1} * p.columns, steps.embeddings_grad);
  const int first = pitch + static_cast<int>(pieces.first(pitch));
  auto use = [&](T* vectors, auto done) {
    const T* grad = vectors + layout.vectors;
#pragma unroll 4
    for (int k = lane; k < products; k += kWarpSize)
      *shared_at<T>(sizeof(T) * start + places[k]) = grad[p.columns + k];
    __syncwarp();
    uint32_t z[kTiles][kTiles][4];
    const T* lower = triangle + lane % 16 * kSide + lane / 16 * 8;
    const T* upper = triangle + (lane / 16 * 8 + lane % 8) * kSide + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
        if (k <= m) load_matrices<false>(lower + 16 * m * kSide + 16 * k, z[m][k]);
        if (k > m) load_matrices<true>(upper + 16 * k * kSide + 16 * m, z[m][k]);
      }
      uint32_t transposed[4];
      load_matrices<true>(upper + 16 * m * kSide + 16 * m, transposed);
#pragma unroll
      for (int word = 0; word < 4; ++word) z[m][m][word] |= transposed[word];
    }
    // What comes in directly is for the first row, which lanes 0 to 3 have; to the other lanes'
    // rows zeros are added, which the first row of L consists of.
    const T* direct = lane < 4 ? grad + 2 * lane : triangle;
    const int direct_step = lane < 4 ? 16 : 0;
    T* results = vectors + lane / 4 * pitch + lane % 4 * 2;
#pragma unroll 2
    for (int column = 0; column < p.columns; column += 16, direct += direct_step) {
      uint32_t v[kTiles][4];
#pragma unroll
      for (int k = 0; k < kTiles; ++k)
        load_matrices<true>(vectors + fragments.places[k] + column, v[k]);
      __syncwarp();  // all lanes have theirs of these columns
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sums[4] = {};
          if (m == 0) {
            const auto pair = load_vector<T, 2>(direct + 8 * half);
            sums[0] = to_compute(pair.values[0]);
            sums[1] = to_compute(pair.values[1]);
          }
#pragma unroll
          for (int k = 0; k < kTiles; ++k)
            multiply_tiles<T>(sums, z[m][k], {v[k][2 * half], v[k][2 * half + 1]});
#pragma unroll
          for (int below = 0; below < 2; ++below) {
            const int row = 16 * m + 8 * below;
            if (row + lane / 4 < p.vectors)
              *reinterpret_cast<uint32_t*>(results + row * pitch + column + 8 * half) =
                  pack_pair<T>(sums[2 * below], sums[2 * below + 1]);
          }
        }
      }
    }
    __syncwarp();
    constexpr auto copy = copy_piece<T, kAligned>;
    T* const dense_grad = dense_grads.next();
    T* const other_grad = other_grads.next();
    if (!kLookup || p.dense_grad != nullptr)
      pieces.copy_dense(vectors + pieces.dense(), dense_grad, copy);
    if (!kLookup || p.embeddings_grad != nullptr)
      pieces.copy_others(vectors + first, steps.piece_shared, other_grad, steps.piece_grad, copy);
    done();
  };
  wait_for_previous_kernel();
  loader.start(p, steps);
  for_own_samples<kStages>(steps, triangle + layout.triangle, layout.vectors + layout.row, load,
                           use);
}

}  // namespace fusedcuda
