// The first half of a gated MLP, h = act(x @ w_gate.T) * (x @ w_up.T), on Hopper's tensor cores:
// parameters, launcher. Kernel: gated_mlp.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/gemm_config.h"
#include "common/launch.h"

namespace fusedcuda {

// h[m, f] = act(gate[m, f]) * up[m, f], computed of the float32 sums and rounded once.
struct GatedProductParams {
  DType dtype = DType::kBFloat16;  // of everything
  Activation activation = Activation::kSilu;
  int64_t m = 0, f = 0, k = 0;
  GemmMatrix x;             // m x k
  GemmMatrix w_gate, w_up;  // f x k; may be halves of one matrix
  GemmMatrix h;             // m x f
  void* gate_up = nullptr;  // m x 2 f, contiguous: gate, then up, rounded; null unless it is wanted
};

// What the chooser needs to know about the current device.
cudaError_t gated_mlp_device_traits(DeviceTraits* traits);

// Enqueues on `stream` what gated_product_can_run() accepts (gated_mlp_config.h).
cudaError_t launch_gated_product(const GatedProductParams& params, const GemmConfig& config,
                                 cudaStream_t stream);

}  // namespace fusedcuda
