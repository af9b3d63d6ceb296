// What becomes of the sums of a linear layer's product: bias, activation, one rounding, and what
// the gradient needs of them.
#pragma once

#include "common/convert.cuh"
#include "common/gemm_activation.cuh"
#include "common/gemm_epilogue.cuh"
#include "linear_act.h"

namespace fusedcuda {

// One bit a value, set unless the value is negative or zero, for 64 x 64 of them: a thread has two
// bits of each byte, the four threads of a quad have a row's bytes together.
template <int kCount>
__device__ __forceinline__ void store_mask(const float (&values)[kCount], uint8_t* mask,
                                           int64_t row_bytes, int row, int column, int rows,
                                           int columns) {
  static_assert(kCount == 2 * kChunkPairs);
  const int quad_lane = static_cast<int>(threadIdx.x) % 4;
  // Four bytes of the upper row, the next four, and the same of the lower row.
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int group = i / 4, lower = i / 2 % 2, second = i % 2;
    const uint32_t bit = values[i] <= 0.0f ? 0 : 1;
    words[2 * lower + group / 4] |= bit << (8 * (group % 4) + 2 * quad_lane + second);
  }
  // Each of the four ends with the word that has its own number.
  uint32_t kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool upper_half = quad_lane >= 2;
    const uint32_t given = upper_half ? words[i] : words[2 + i];
    kept[i] = (upper_half ? words[2 + i] : words[i]) | __shfl_xor_sync(0xffffffff, given, 2);
  }
  const bool odd = quad_lane % 2 != 0;
  const uint32_t word =
      (odd ? kept[1] : kept[0]) | __shfl_xor_sync(0xffffffff, odd ? kept[0] : kept[1], 1);
  const int at_row = row + wgmma_row_of_thread() + quad_lane / 2 * 8;
  const int at_column = column + quad_lane % 2 * 32;
  if (at_row < rows && at_column < columns)
    *reinterpret_cast<uint32_t*>(mask + at_row * row_bytes + at_column / 8) = word;
}

// act(sums + bias), and what its gradient needs: a mask of a ReLU, the derivative of another
// activation. Without kActivates only sums + bias.
struct LinearActEpilogueParams {
  TensorMap output;
  SavedForBackward saves = SavedForBackward::kNone;
  TensorMap saved;  // the derivative
  uint8_t* mask = nullptr;
  int64_t mask_stride = 0;  // bytes
  const void* bias = nullptr;
  Activation activation = Activation::kNone;
  int m = 0, n = 0;
};

template <typename Gemm, bool kActivates>
class LinearActEpilogue : public ChunkEpilogue<Gemm> {
 public:
  using Base = ChunkEpilogue<Gemm>;
  using Params = LinearActEpilogueParams;
  using typename Base::T;

  __device__ __forceinline__ LinearActEpilogue(const Params& params, int warpgroup,
                                               const GemmShared<Gemm>& shared)
      : Base(warpgroup, shared), params_(params), bias_(shared.bias(warpgroup)) {}

  // Fetches the bias, which arrives while the products are computed.
  __device__ __forceinline__ void prepare(int column) {
    if (params_.bias == nullptr) return;
    const T* const bias = static_cast<const T*>(params_.bias);
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int at = column + own_bias(i);
      fetched_[i] = own_bias(i) < Gemm::kTileColumns && at < params_.n ? bias[at] : T();
    }
  }

  __device__ __forceinline__ void finish(typename Gemm::Sums* sums, int row, int column,
                                         int /*split*/) {
    if (params_.bias != nullptr) {
      // All threads have read that of the last tile: they met when its last chunk was stored.
#pragma unroll
      for (int i = 0; i < kBiases; ++i) {
        if (own_bias(i) < Gemm::kTileColumns) bias_[own_bias(i)] = to_compute(fetched_[i]);
      }
      named_barrier(this->barrier_, kWarpgroup);
    }
    if constexpr (!kActivates) {
      write_all<false>(FixedActivation<Activation::kNone>(), sums, row, column);
      return;
    }
    const bool saves = params_.saves != SavedForBackward::kNone;
    // The choice is made once for all chunks, so that they have no branches.
    with_activation(params_.activation, [&](auto act) {
      if (decltype(act)::kIsLinear || !saves) {
        write_all<false>(act, sums, row, column);
      } else {
        write_all<true>(act, sums, row, column);
      }
    });
  }

 private:
  using Base::kValues;

  // A thread's part of a chunk's biases: of a group of eight columns the two that it has.
  using ChunkBias = float2[kChunk / 8];

  static __device__ __forceinline__ void load_bias(const float* values, ChunkBias& bias) {
    const int quad_lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int group = 0; group < kChunk / 8; ++group)
      bias[group] = *reinterpret_cast<const float2*>(values + 8 * group + 2 * quad_lane);
  }

  static __device__ __forceinline__ void add_bias(float (&z)[kValues], const ChunkBias& bias) {
#pragma unroll
    for (int group = 0; group < kChunk / 8; ++group) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        z[4 * group + 2 * lower] += bias[group].x;
        z[4 * group + 2 * lower + 1] += bias[group].y;
      }
    }
  }

  template <bool kSaves, typename Act>
  __device__ __forceinline__ void write_all(const Act& act, typename Gemm::Sums* sums, int row,
                                            int column) {
    constexpr bool kSavesDerivative = kSaves && !Act::kIsRelu;
    constexpr int kChunks = kSavesDerivative ? 1 : Base::kTogether;
    ChunkBias bias;
    if (params_.bias != nullptr) load_bias(bias_, bias);
    this->template for_chunks<Act::kIsUnrolled, kChunks>(
        sums, row, column, params_.m, params_.n,
        [&](auto& z, int at_row, int at_column, int c, int i) {
          if (params_.bias != nullptr) {
            add_bias(z, bias);
            // Those of the next chunk that lies in the result, while this one is computed.
            const bool row_ends = c + kChunk >= Gemm::kTileColumns ||
                                  (i + 1 == kChunks && at_column + kChunk >= params_.n);
            load_bias(bias_ + (row_ends ? 0 : c + kChunk), bias);
          }
          write_chunk<kSaves>(act, z, at_row, at_column, i);
        },
        [&](int at_row, int at_column) {
          if constexpr (!kSavesDerivative) {
            this->template send<kChunks>(params_.output, at_row, at_column);
          } else if constexpr (kIsRoundOfTwo) {
            this->chunks_.send_round([&](auto send) {
              send(params_.output, 0, at_row, at_column);
              send(params_.saved, 1, at_row, at_column);
            });
          } else {
            this->template send<1>(params_.output, at_row, at_column);
          }
        });
  }

  // `slot`: of y.
  template <bool kSaves, typename Act>
  __device__ __forceinline__ void write_chunk(const Act& act, float (&z)[kValues], int row,
                                              int column, int slot) {
    uint32_t y_pairs[kChunkPairs], derivative_pairs[kChunkPairs];
    // A part at a time: values and derivatives of a whole chunk would not fit beside the sums.
    constexpr int kPart = kValues / 4;
#pragma unroll
    for (int first = 0; first < kValues; first += kPart) {
      float part[kPart], y[kPart], derivative[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) part[i] = z[first + i];
      act(part, y, derivative);
#pragma unroll
      for (int i = 0; i < kPart; i += 2) {
        y_pairs[(first + i) / 2] = pack_pair<T>(y[i], y[i + 1]);
        derivative_pairs[(first + i) / 2] = pack_pair<T>(derivative[i], derivative[i + 1]);
      }
    }
    if constexpr (kSaves && Act::kIsRelu) {
      store_mask(z, params_.mask, params_.mask_stride, row, column, params_.m, params_.n);
    } else if constexpr (kSaves && kIsRoundOfTwo) {
      this->chunks_.write(derivative_pairs, 1);
    } else if constexpr (kSaves) {
      this->chunks_.write(derivative_pairs, 0);
      this->template send<1>(params_.saved, row, column);
    }
    this->chunks_.write(y_pairs, slot);
  }

  static constexpr bool kIsRoundOfTwo = ChunkStore<Gemm::kNumBuffers>::kRound == 2;

  // A thread fetches so many biases of a tile, a warpgroup apart.
  static constexpr int kBiases = (Gemm::kTileColumns + kWarpgroup - 1) / kWarpgroup;
  static __device__ __forceinline__ int own_bias(int i) {
    return static_cast<int>(threadIdx.x) % kWarpgroup + i * kWarpgroup;
  }

  const Params& params_;
  float* bias_;         // of the tile
  T fetched_[kBiases];  // of the next one
};

}  // namespace fusedcuda
