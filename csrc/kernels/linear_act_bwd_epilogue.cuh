// What becomes of the sums of the gradient's products: dx as it is, dweight and dbias in parts.
#pragma once

#include "common/convert.cuh"
#include "common/gemm_epilogue.cuh"

namespace fusedcuda {

// The sums as they are.
struct PlainEpilogueParams {
  TensorMap output;
  int m = 0, n = 0;
};

template <typename Gemm>
class PlainEpilogue : public ChunkEpilogue<Gemm> {
 public:
  using Params = PlainEpilogueParams;
  using ChunkEpilogue<Gemm>::kTogether;

  __device__ __forceinline__ PlainEpilogue(const Params& params, int warpgroup,
                                           const GemmShared<Gemm>& shared)
      : ChunkEpilogue<Gemm>(warpgroup, shared), params_(params) {}

  __device__ __forceinline__ void finish(typename Gemm::Sums* sums, int row, int column,
                                         int /*split*/) {
    this->template for_chunks<true, kTogether>(
        sums, row, column, params_.m, params_.n,
        [&](const auto& values, int, int, int, int i) { this->write(values, i); },
        [&](int at_row, int at_column) {
          this->template send<kTogether>(params_.output, at_row, at_column);
        });
  }

 private:
  const Params& params_;
};

// What a part of k gives, in float32, for sum_partials.cuh: values[split][row][column], and the
// sums of a's rows, row_sums[split][row]. Or, where there is one part, the result.
struct PartialsEpilogueParams {
  float* values = nullptr;
  float* row_sums = nullptr;                       // or null
  int64_t values_stride = 0, row_sums_stride = 0;  // between splits
  void* output = nullptr;                          // contiguous; instead of `values`
  void* row_sums_output = nullptr;                 // or null
  int m = 0, n = 0;                                // rows and columns
};

template <typename Gemm>
class PartialsEpilogue {
 public:
  using Params = PartialsEpilogueParams;
  using T = typename Gemm::Element;
  static constexpr bool kSumsRows = true;

  __device__ __forceinline__ PartialsEpilogue(const Params& params, int /*warpgroup*/,
                                              const GemmShared<Gemm>& /*shared*/)
      : params_(params) {}

  __device__ __forceinline__ void prepare(int /*column*/) const {}

  __device__ __forceinline__ void store_row_sums(const typename Gemm::Sums& sums, int row,
                                                 int split) const {
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < Gemm::kHalves; ++h) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int at = row + wgmma_row_of_thread() + h * kWgmmaRows + 8 * lower;
        if (at >= params_.m) continue;
        const float sum = sums.of_rows[h][2 * lower];
        if (params_.row_sums != nullptr)
          params_.row_sums[split * params_.row_sums_stride + at] = sum;
        if (params_.row_sums_output != nullptr)
          static_cast<T*>(params_.row_sums_output)[at] = from_compute<T>(sum);
      }
    }
  }

  __device__ __forceinline__ void finish(const typename Gemm::Sums* sums, int row, int column,
                                         int split) const {
    if (params_.output != nullptr) {
      store(sums, static_cast<T*>(params_.output), row, column);
    } else {
      store(sums, params_.values + split * params_.values_stride, row, column);
    }
  }

 private:
  template <typename Element>
  __device__ __forceinline__ void store(const typename Gemm::Sums* sums, Element* to, int row,
                                        int column) const {
    const int quad_lane = static_cast<int>(threadIdx.x) % 4;
    const int own_row = row + wgmma_row_of_thread();
    const bool pairs = params_.n % 2 == 0;  // and aligned
#pragma unroll
    for (int h = 0; h < Gemm::kHalves; ++h) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int at = own_row + h * kWgmmaRows + 8 * lower;
        if (at >= params_.m) continue;
        Element* const values = to + int64_t{at} * params_.n;
#pragma unroll
        for (int group = 0; group < Gemm::kTileColumns / 8; ++group) {
          const float first = sums->values[h][4 * group + 2 * lower];
          const float second = sums->values[h][4 * group + 2 * lower + 1];
          const int at_column = column + 8 * group + 2 * quad_lane;
          if (pairs) {
            if (at_column < params_.n) store_pair(values + at_column, first, second);
          } else {
            if (at_column < params_.n) values[at_column] = from_compute<Element>(first);
            if (at_column + 1 < params_.n) values[at_column + 1] = from_compute<Element>(second);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void store_pair(float* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  }
  static __device__ __forceinline__ void store_pair(T* to, float first, float second) {
    *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(first, second);
  }

  const Params& params_;
};

}  // namespace fusedcuda
