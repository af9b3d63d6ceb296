// Elementwise kernels around the products that cuBLASLt makes, over matrices whose rows may have a
// pitch.
#pragma once

#include "common/activation.cuh"
#include "common/convert.cuh"
#include "common/iteration.h"
#include "common/launch.h"
#include "common/row.cuh"
#include "common/vec.cuh"
#include "linear_act.h"

namespace fusedcuda {

// kVec elements of a row per thread; blocks of kActRowsThreads threads take rows in turns.
constexpr int kActRowsThreads = 256;

struct ActRowsKernelParams {
  const void* input;
  void* saved;
  void* output;
  int64_t count;                                      // of vectors
  Divider of_row;                                     // vectors
  int64_t input_stride, output_stride, saved_stride;  // saved: bytes of a mask, or elements
  Activation activation;
  SavedForBackward saves;
};

// Calls f(from, to, row, column) for every kVec elements: where they are read and written.
template <typename T, int kVec, typename F>
__device__ __forceinline__ void for_vectors(const ActRowsKernelParams& params, F f) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t step = int64_t{gridDim.x} * kActRowsThreads;
  for (int64_t i = int64_t{blockIdx.x} * kActRowsThreads + threadIdx.x; i < params.count;
       i += step) {
    int64_t vector;
    const int64_t row = params.of_row.divide(i, &vector), column = vector * kVec;
    f(static_cast<const T*>(params.input) + row * params.input_stride + column,
      static_cast<T*>(params.output) + row * params.output_stride + column, row, column);
  }
}

// y = act(z).
template <typename T, int kVec>
__global__ void __launch_bounds__(kActRowsThreads)
    act_rows_kernel(const __grid_constant__ ActRowsKernelParams params) {
  using C = Compute<T>;
  constexpr bool kFast = sizeof(T) == 2;
  for_vectors<T, kVec>(params, [&](const T* from, T* to, int64_t row, int64_t column) {
    C z[kVec], ones[kVec], y[kVec], derivative[kVec];
    unpack(load_vector<T, kVec>(from), z);
#pragma unroll
    for (int j = 0; j < kVec; ++j) ones[j] = C(1);
    activate<kFast>(params.activation, z, ones, y, derivative);
    if (params.saves == SavedForBackward::kDerivative) {
      T* const saved = static_cast<T*>(params.saved) + row * params.saved_stride + column;
      store_part<kVec, T>(saved, pack<T, kVec>(derivative));
    }
    store_part<kVec, T>(to, pack<T, kVec>(y));
  });
}

template <SavedForBackward kSaves>
using Saves = std::integral_constant<SavedForBackward, kSaves>;

// What was saved of kVec elements, as it lies in memory: of a mask the byte that has their bits.
template <typename T, int kVec, SavedForBackward kSaves>
__device__ __forceinline__ auto load_saved(const void* saved, int64_t stride, int64_t row,
                                           int64_t column) {
  if constexpr (kSaves == SavedForBackward::kMask) {
    return static_cast<const uint8_t*>(saved)[row * stride + column / 8];
  } else {
    return load_part<T, kVec>(static_cast<const T*>(saved) + row * stride + column);
  }
}

// dz = dy * act'(z), given what load_saved() returned.
template <typename T, SavedForBackward kSaves, int kVec, typename Saved>
__device__ __forceinline__ void act_gradient(Activation activation, const Compute<T> (&dy)[kVec],
                                             const Saved& saved, int64_t column,
                                             Compute<T> (&dz)[kVec]) {
  using C = Compute<T>;
  if constexpr (kSaves == SavedForBackward::kMask) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) dz[j] = saved >> ((column + j) % 8) & 1 ? dy[j] : C(0);
  } else {
    C values[kVec], y[kVec];
    unpack(saved, values);
    if constexpr (kSaves == SavedForBackward::kDerivative) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) dz[j] = dy[j] * values[j];
    } else {
      activate<sizeof(T) == 2>(activation, values, dy, y, dz);
    }
  }
}

// dz = dy * act'(z).
template <typename T, int kVec>
__global__ void __launch_bounds__(kActRowsThreads)
    act_rows_bwd_kernel(const __grid_constant__ ActRowsKernelParams params) {
  for_vectors<T, kVec>(params, [&](const T* from, T* to, int64_t row, int64_t column) {
    Compute<T> dy[kVec], dz[kVec];
    unpack(load_part<T, kVec>(from), dy);
    auto scale = [&](auto saves) {
      constexpr SavedForBackward kSaves = decltype(saves)::value;
      const auto saved =
          load_saved<T, kVec, kSaves>(params.saved, params.saved_stride, row, column);
      act_gradient<T, kSaves>(params.activation, dy, saved, column, dz);
    };
    if (params.saves == SavedForBackward::kMask) {
      scale(Saves<SavedForBackward::kMask>());
    } else if (params.saves == SavedForBackward::kDerivative) {
      scale(Saves<SavedForBackward::kDerivative>());
    } else {
      scale(Saves<SavedForBackward::kPreActivation>());
    }
    store_part<kVec, T>(to, pack<T, kVec>(dz));
  });
}

// The mask of a ReLU: a thread has eight elements, one byte; of loads of kVec elements.
template <typename T, int kVec>
__global__ void __launch_bounds__(kActRowsThreads)
    relu_mask_kernel(const __grid_constant__ ActRowsKernelParams params, int64_t columns) {
  using C = Compute<T>;
  for_vectors<T, 8>(params, [&](const T* from, T* to, int64_t row, int64_t first) {
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < 8; j += kVec) {
      if (kVec == 1 && first + j >= columns) break;
      C z[kVec];
      unpack(load_part<T, kVec>(from + j), z);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        bits |= (z[k] <= C(0) ? 0u : 1u) << (j + k);
        z[k] = z[k] <= C(0) ? C(0) : z[k];
      }
      store_part<kVec, T>(to + j, pack<T, kVec>(z));
    }
    static_cast<uint8_t*>(params.saved)[row * params.saved_stride + first / 8] =
        static_cast<uint8_t>(bits);
  });
}

// A warp per row at a time. Neighbouring lanes have neighbouring elements: rows that start anywhere
// are read in whole lines all the same, and eight loads of a lane are under way at a time.
template <typename Bits>
__global__ void __launch_bounds__(kActRowsThreads)
    pad_rows_kernel(const __grid_constant__ PadRowsParams params) {
  constexpr int kUnroll = 8;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t warps = int64_t{gridDim.x} * (kActRowsThreads / kWarpSize);
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t row = (int64_t{blockIdx.x} * kActRowsThreads + threadIdx.x) / kWarpSize;
       row < params.rows; row += warps) {
    const auto* const from =
        static_cast<const Bits*>(params.input.data) + row * params.input.stride;
    auto* const to = static_cast<Bits*>(params.output) + row * params.padded_columns;
    for (int64_t first = lane; first < params.padded_columns; first += kUnroll * kWarpSize) {
      Bits values[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t column = first + i * kWarpSize;
        values[i] = column < params.columns ? from[column] : Bits{0};
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int64_t column = first + i * kWarpSize;
        if (column < params.padded_columns) to[column] = values[i];
      }
    }
  }
}

}  // namespace fusedcuda
