// The vectors of a sample as rows of a table: the lookup of its indices inside the interaction, so
// that the [batch, vectors, columns] tensor of what was looked up is never in memory.
#pragma once

#include <cstdint>

#include "dlrm_index.cuh"
#include "dlrm_vectors.cuh"

namespace fusedcuda {

__device__ __forceinline__ const char* address_of_index(const EmbeddingLookup& lookup,
                                                        int64_t sample, int64_t vector) {
  return static_cast<const char*>(lookup.indices) +
         (sample * lookup.sample_stride + vector * lookup.vector_stride) * bytes_of_index(lookup);
}

// Where the row of an index starts, in bytes from the start of the table.
template <typename T>
__device__ __forceinline__ int64_t start_of_row(const DotVectors& p, int64_t index) {
  assert_is_row(index, p.lookup.rows);
  return index * p.vector_stride * static_cast<int64_t>(sizeof(T));
}

// In place of VectorLoader. A lane has the index of one vector, or of two that are 32 apart, and
// all lanes ask it for the address. The indices of the next sample are on their way while this one
// is worked on, so that no copy waits for its index. (Copies of single elements wait: they are no
// fast way, and have no registers left for indices.)
template <typename T, int kTiles, bool kAligned>
class RowLoader {
 public:
  using Pieces = fusedcuda::Pieces<kDotPiece<T, kAligned>>;

  __device__ RowLoader(const DotVectors& p, const DotSteps& steps, const Pieces& pieces, int pitch)
      : dense_(static_cast<const T*>(p.dense) + pieces.dense(), p.dense_stride, steps.dense),
        next_(address_of_index(p.lookup, first_sample(), threadIdx.x % kWarpSize)),
        first_(pitch + static_cast<int>(pieces.first(pitch))) {}

  __device__ __forceinline__ void start(const DotVectors& p, const DotSteps& steps) {
    if (kAligned) fetch_indices(p, steps, own_samples(steps) > 0);
  }

  __device__ __forceinline__ void load(const DotVectors& p, const DotSteps& steps,
                                       const Pieces& pieces, T* vectors, bool has_next) {
    constexpr auto copy = copy_piece_async<T, kAligned>;
    if (!kAligned) fetch_indices(p, steps, true);
    int64_t starts[kIndices];
#pragma unroll
    for (int k = 0; k < kIndices; ++k) starts[k] = start_of_row<T>(p, indices_[k]);
    pieces.copy_dense(dense_.next(), vectors + pieces.dense(), copy);
    auto row_of = [&](int vector) {
      int64_t start = __shfl_sync(kAllLanes, starts[0], vector % kWarpSize);
      if constexpr (kIndices > 1) {
        const int64_t other = __shfl_sync(kAllLanes, starts[1], vector % kWarpSize);
        if (vector >= kWarpSize) start = other;
      }
      return behind(static_cast<const T*>(p.embeddings), start);
    };
    pieces.copy_rows(row_of, p.vectors - 1, steps.apart, vectors + first_, steps.piece_shared,
                     copy);
    if (kAligned) fetch_indices(p, steps, has_next);
  }

 private:
  static constexpr int kIndices = 16 * kTiles / kWarpSize;
  static constexpr unsigned kAllLanes = 0xffffffff;

  // Those of the next sample that has none yet, if there is one.
  __device__ __forceinline__ void fetch_indices(const DotVectors& p, const DotSteps& steps,
                                                bool exists) {
    const int64_t apart = kWarpSize * p.lookup.vector_stride * bytes_of_index(p.lookup);
#pragma unroll
    for (int k = 0; k < kIndices; ++k) {
      if (threadIdx.x % kWarpSize + k * kWarpSize + 1 < p.vectors && exists)
        indices_[k] = load_index(next_ + k * apart, p.lookup.is_int32);
    }
    next_ += steps.indices;
  }

  OwnSamples<const T> dense_;
  const char* next_;  // the lane's first index of the sample whose indices are read next
  int first_;         // of the lane's pieces of rows, in shared memory
  // Of lanes without a vector: that of a row which nobody asks for.
  int64_t indices_[kIndices] = {};
};

}  // namespace fusedcuda
