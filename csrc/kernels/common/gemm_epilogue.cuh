// The way of a matrix product's sums to memory: 64 x 64 elements at a time go through shared
// memory, from where the copy engine stores them in whole lines while the threads work on the next.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "convert.cuh"
#include "gemm_stages.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace fusedcuda {

constexpr int kChunk = 64;  // rows and columns
constexpr int kChunkPairs =
    kChunk * kChunk / 2 / kWarpgroup;  // of neighbouring columns, a thread's
static_assert(kGemmBufferBytes == kChunk * kSwizzleBytes);

// A warpgroup's chunks on their way to memory. The values of a thread come in the order of its sums
// (wgmma.cuh), two columns in a word. One or two chunks are written and then sent together: a
// fence and a meeting of the threads for each such round. While the copy engine reads the buffers
// of one round, the threads write to those of the next.
template <int kBuffers>
class ChunkStore {
 public:
  static constexpr int kRound = kBuffers / 2;  // chunks
  static_assert(kRound == 1 || kRound == 2);

  // `barrier`: a named one that is the warpgroup's own.
  __device__ __forceinline__ ChunkStore(unsigned char* buffers, int barrier)
      : buffers_(buffers), barrier_(barrier) {}

  __device__ __forceinline__ void write(const uint32_t (&pairs)[kChunkPairs], int slot) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarpSize;
    const int own_row = thread / kWarpSize * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kChunkPairs; i += 4) {
      // Two groups of eight columns, of 16 rows: lanes 16 to 31 have the places of the second.
      const int group = i / 2 + lane / 16;
      unsigned char* const place =
          buffer(slot) + own_row * kSwizzleBytes + ((group ^ (own_row % 8)) * 16);
      const uint32_t four[4] = {pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]};
      store_matrices(place, four);
    }
  }

  // start(send): send(map, slot, row, column) for every chunk of the round.
  template <typename F>
  __device__ __forceinline__ void send_round(F start) {
    const bool is_first = threadIdx.x % kWarpgroup == 0;
    fence_shared_for_copies();
    // The round before this one has left the buffers of the next.
    if (is_first) wait_for_stores_to_read<0>();
    named_barrier(barrier_, kWarpgroup);
    if (is_first) {
      start([&](const TensorMap& map, int slot, int row, int column) {
        store_box(&map, buffer(slot), row, column);
      });
      commit_stores();
    }
    round_ ^= 1;
  }

 private:
  __device__ __forceinline__ unsigned char* buffer(int slot) const {
    return buffers_ + (round_ * kRound + slot) * kGemmBufferBytes;
  }

  unsigned char* buffers_;
  int barrier_;
  int round_ = 0;
};

// The part of an epilogue that stores chunks of what it makes of the sums.
template <typename Gemm>
class ChunkEpilogue {
 public:
  static constexpr bool kSumsRows = false;

  __device__ __forceinline__ void prepare(int /*column*/) const {}
  __device__ __forceinline__ void store_row_sums(const typename Gemm::Sums&, int, int) const {}

 protected:
  using T = typename Gemm::Element;
  static constexpr int kValues = 2 * kChunkPairs;  // of a chunk, a thread's

  __device__ __forceinline__ ChunkEpilogue(int warpgroup, const GemmShared<Gemm>& shared)
      : barrier_(1 + warpgroup), chunks_(shared.buffers(warpgroup), barrier_) {}

  // Chunks that lie in the result, `kTogether` of a row at a time:
  //   f(values, row, column, c, i) for the i-th of them; c: its column in the tile
  //   done(row, column) behind them, with the place of the first
  // kUnrolled: every chunk has code of its own. Else there is one piece of code for all, and the
  // sums move up in their registers: a few hundred moves for a tile, but a quarter of the
  // instructions (to fetch, and to compile).
  template <bool kUnrolled, int kTogether, typename F, typename Done>
  static __device__ __forceinline__ void for_chunks(typename Gemm::Sums* sums, int row, int column,
                                                    int rows, int columns, F f, Done done) {
    constexpr int kOfRow = Gemm::kTileColumns / kChunk, kCount = Gemm::kHalves * kOfRow;
    static_assert(kOfRow % kTogether == 0);
    auto chunks_from = [&](int chunk) {
      const int c = chunk % kOfRow * kChunk;
      const int at_row = row + chunk / kOfRow * kWgmmaRows, at_column = column + c;
      const bool is_inside = at_row < rows && at_column < columns;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        float values[kValues];
        take_chunk<kUnrolled>(sums, chunk + i, values);
        // (Beyond the last column the copy engine stores nothing.)
        if (is_inside) f(values, at_row, at_column + i * kChunk, c + i * kChunk, i);
      }
      if (is_inside) done(at_row, at_column);
    };
    if constexpr (kUnrolled) {
#pragma unroll
      for (int chunk = 0; chunk < kCount; chunk += kTogether) chunks_from(chunk);
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < kCount; chunk += kTogether) chunks_from(chunk);
    }
  }

  // The sums of a chunk: in their place, or those of the first, to whose place the others move up.
  template <bool kInPlace>
  static __device__ __forceinline__ void take_chunk(typename Gemm::Sums* sums, int chunk,
                                                    float (&values)[kValues]) {
    constexpr int kOfHalf = Gemm::kSums, kAll = Gemm::kHalves * kOfHalf;
    const int from = kInPlace ? chunk * kValues : 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      values[i] = sums->values[(from + i) / kOfHalf][(from + i) % kOfHalf];
    if constexpr (!kInPlace) {
#pragma unroll
      for (int i = 0; i + kValues < kAll; ++i) {
        const int next = i + kValues;
        sums->values[i / kOfHalf][i % kOfHalf] = sums->values[next / kOfHalf][next % kOfHalf];
      }
    }
  }

  __device__ __forceinline__ void write(const float (&values)[kValues], int slot) {
    uint32_t pairs[kChunkPairs];
#pragma unroll
    for (int i = 0; i < kChunkPairs; ++i) pairs[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
    chunks_.write(pairs, slot);
  }

  // Sends what a round has of one matrix.
  template <int kTogether>
  __device__ __forceinline__ void send(const TensorMap& map, int row, int column) {
    chunks_.send_round([&](auto send) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) send(map, i, row, column + i * kChunk);
    });
  }

  // Chunks of a row that are sent together.
  static constexpr int kTogether =
      Gemm::kTileColumns / kChunk % 2 == 0 ? ChunkStore<Gemm::kNumBuffers>::kRound : 1;

  int barrier_;  // of the warpgroup
  ChunkStore<Gemm::kNumBuffers> chunks_;
};

}  // namespace fusedcuda
