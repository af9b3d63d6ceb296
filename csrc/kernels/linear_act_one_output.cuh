// The gradient of a layer of one output, in one pass over x: common/one_output_bwd.cuh with
//
//   g[m] = dz[m] = dy[m] * act'(z[m]), rounded
//
// As a product it would be one for dweight, one for dx and a kernel for dbias, the first two mostly
// of tiles' empty columns: 39 us for 65536 x 256 bf16, whose rows are copied in 16.
#pragma once

#include "common/launch.h"
#include "common/one_output_bwd.cuh"
#include "linear_act_rows.cuh"

namespace fusedcuda {

// Bytes from a row's mask to the next.
constexpr int64_t kMaskOfOneOutput = mask_row_bytes(1);

template <typename T>
struct OutputGradient {
  struct Loaded {
    Part<T, 1> dy;
    uint16_t saved;  // a byte of a mask, or an element: in a register either way
  };

  const T* dy;
  int64_t dy_stride;
  const void* saved;
  SavedForBackward saves;

  // With the branch around all rows: of loads under conditions each would wait for the one before.
  template <int kRows>
  __device__ void load(const int64_t (&rows)[kRows], Loaded (&loaded)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) loaded[i].dy = load_part<T, 1>(dy + rows[i] * dy_stride);
    if (saves == SavedForBackward::kMask) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        loaded[i].saved =
            load_saved<T, 1, SavedForBackward::kMask>(saved, kMaskOfOneOutput, rows[i], 0);
    } else if (saves == SavedForBackward::kDerivative) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        loaded[i].saved = static_cast<const uint16_t*>(saved)[rows[i]];
    }
  }

  __device__ Compute<T> value(const Loaded& loaded) const {
    constexpr Activation kAny = Activation::kNone;  // what was saved says enough
    Compute<T> incoming[1], dz[1];
    unpack(loaded.dy, incoming);
    dz[0] = incoming[0];
    if (saves == SavedForBackward::kMask)
      act_gradient<T, SavedForBackward::kMask>(kAny, incoming, loaded.saved, 0, dz);
    if (saves == SavedForBackward::kDerivative) {
      Part<T, 1> derivative;
      memcpy(&derivative, &loaded.saved, sizeof(derivative));
      act_gradient<T, SavedForBackward::kDerivative>(kAny, incoming, derivative, 0, dz);
    }
    return to_compute(from_compute<T>(dz[0]));
  }
};

template <typename T, int kVec>
__global__ void __launch_bounds__(kOneOutputThreads, kOneOutputBlocksOfSm)
    one_output_bwd_kernel(const __grid_constant__ OneOutputBwdParams p,
                          const __grid_constant__ OneOutputRows rows) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const OutputGradient<T> gradient = {static_cast<const T*>(p.dy.data), p.dy.stride, p.saved,
                                      p.saves};
  one_output_bwd<T, kVec>(p, rows, gradient);
}

namespace linear_act {

template <typename T>
cudaError_t run_one_output_bwd(const OneOutputBwdParams& p, const OneOutputConfig& config,
                               void* workspace, cudaStream_t stream) {
  return fusedcuda::run_one_output_bwd<T>(
      config.aligned ? one_output_bwd_kernel<T, kVectorWidth<T>> : one_output_bwd_kernel<T, 1>, p,
      config, workspace, stream);
}

}  // namespace linear_act
}  // namespace fusedcuda
