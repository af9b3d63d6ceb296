// What becomes of the sums of a gated MLP's product: act(gate) * up, rounded once, and if the
// gradient needs them the sums themselves.
#pragma once

#include "common/convert.cuh"
#include "common/gemm_activation.cuh"
#include "common/gemm_epilogue.cuh"

namespace fusedcuda {

struct GatedEpilogueParams {
  TensorMap h;
  bool saves = false;
  TensorMap gate, up;  // where they are saved
  Activation activation = Activation::kSilu;
  int m = 0, f = 0;
};

template <typename Gemm>
class GatedEpilogue : public ChunkEpilogue<Gemm> {
 public:
  using Base = ChunkEpilogue<Gemm>;
  using Params = GatedEpilogueParams;
  using typename Base::T;

  __device__ __forceinline__ GatedEpilogue(const Params& params, int warpgroup,
                                           const GemmShared<Gemm>& shared)
      : Base(warpgroup, shared), params_(params) {}

  // `row`, `column`: in h.
  __device__ __forceinline__ void finish(typename Gemm::Sums* sums, int row, int column,
                                         int /*split*/) {
    if (params_.saves) store_sums(*sums, row, column);
    // The choice is made once for all chunks, so that they have no branches.
    with_activation(params_.activation, [&](auto act) { store_products(act, *sums, row, column); });
  }

 private:
  using Base::kValues;
  static constexpr int kRound = ChunkStore<Gemm::kNumBuffers>::kRound;
  static constexpr int kOfRow = (Gemm::kResultColumns + kChunk - 1) / kChunk;
  static constexpr int kChunks = Gemm::kHalves * kOfRow;
  static_assert(kChunks % kRound == 0);

  // The chunks of h that a warpgroup makes of a tile. Of 96 columns the second chunk has some of
  // the first one's.
  static __device__ __forceinline__ int row_of(int chunk) { return chunk / kOfRow * kWgmmaRows; }
  static __device__ __forceinline__ int column_of(int chunk) {
    return min(chunk % kOfRow * kChunk, Gemm::kResultColumns - kChunk);
  }
  __device__ __forceinline__ bool is_inside(int chunk, int row, int column) const {
    return row + row_of(chunk) < params_.m && column + column_of(chunk) < params_.f;
  }

  // The thread's sum number i of a chunk: of gate, or of up.
  static __device__ __forceinline__ float gate_of(const typename Gemm::Sums& sums, int chunk,
                                                  int i) {
    return sums.values[chunk / kOfRow][column_of(chunk) / 2 + i];
  }
  static __device__ __forceinline__ float up_of(const typename Gemm::Sums& sums, int chunk, int i) {
    return sums.values[chunk / kOfRow][Gemm::kSums / 2 + column_of(chunk) / 2 + i];
  }

  __device__ __forceinline__ void store_sums(const typename Gemm::Sums& sums, int row, int column) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (!is_inside(chunk, row, column)) continue;
      const int at_row = row + row_of(chunk), at_column = column + column_of(chunk);
      float values[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = gate_of(sums, chunk, i);
      this->write(values, 0);
      if constexpr (kRound == 1) this->template send<1>(params_.gate, at_row, at_column);
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = up_of(sums, chunk, i);
      this->write(values, kRound - 1);
      this->chunks_.send_round([&](auto send) {
        if constexpr (kRound == 2) send(params_.gate, 0, at_row, at_column);
        send(params_.up, kRound - 1, at_row, at_column);
      });
    }
  }

  template <typename Act>
  __device__ __forceinline__ void store_products(const Act& act, const typename Gemm::Sums& sums,
                                                 int row, int column) {
#pragma unroll
    for (int first = 0; first < kChunks; first += kRound) {
      // Where the first chunk of a round is outside the others are as well.
      if (!is_inside(first, row, column)) continue;
#pragma unroll
      for (int i = 0; i < kRound; ++i) {
        if (is_inside(first + i, row, column)) write_product(act, sums, first + i, i);
      }
      this->chunks_.send_round([&](auto send) {
#pragma unroll
        for (int i = 0; i < kRound; ++i) {
          if (is_inside(first + i, row, column))
            send(params_.h, i, row + row_of(first + i), column + column_of(first + i));
        }
      });
    }
  }

  template <typename Act>
  __device__ __forceinline__ void write_product(const Act& act, const typename Gemm::Sums& sums,
                                                int chunk, int slot) {
    uint32_t pairs[kChunkPairs];
    // A part at a time: the values of a whole chunk would not fit beside the sums.
    constexpr int kPart = kValues / 4;
#pragma unroll
    for (int first = 0; first < kValues; first += kPart) {
      float gate[kPart], activated[kPart], unused[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) gate[i] = gate_of(sums, chunk, first + i);
      act(gate, activated, unused);
#pragma unroll
      for (int i = 0; i < kPart; i += 2) {
        pairs[(first + i) / 2] = pack_pair<T>(activated[i] * up_of(sums, chunk, first + i),
                                              activated[i + 1] * up_of(sums, chunk, first + i + 1));
      }
    }
    this->chunks_.write(pairs, slot);
  }

  const Params& params_;
};

}  // namespace fusedcuda
