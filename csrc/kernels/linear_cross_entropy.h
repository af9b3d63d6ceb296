// Linear + cross-entropy: what it takes beside the products of linear_act and the rows of
// cross_entropy. Kernels: linear_cross_entropy.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "common/iteration.h"
#include "common/launch.h"

namespace fusedcuda {

// gradient *= factor
struct ScaleGradientParams {
  DType dtype = DType::kFloat32;
  int64_t count = 0;
  void* gradient = nullptr;      // [count]
  const void* factor = nullptr;  // one float32, or float64 for float64 gradients
};

struct ScaleGradientConfig {
  int vec = 1;  // elements of an access
  int64_t blocks = 0;
  bool dependent_launch = false;
};

constexpr int kScaleGradientThreads = 256;
constexpr int kScaleGradientItems = 4;  // vectors of a thread that are on their way at once

inline ScaleGradientConfig choose_scale_gradient_config(const ScaleGradientParams& params,
                                                        const DeviceTraits& device) {
  ScaleGradientConfig config;
  config.dependent_launch = device.dependent_launch;
  const bool aligned = reinterpret_cast<uintptr_t>(params.gradient) % kVectorBytes == 0;
  if (aligned && params.dtype != DType::kFloat64) config.vec = kVectorBytes / size_of(params.dtype);
  // Enough blocks to move a gigabyte at the speed of memory. No more: mostly the factor is 1, and
  // they come to find out that there is nothing to do.
  constexpr int kBlocksOfSm = 8;
  const int64_t vectors = ceil_div(params.count, config.vec);
  config.blocks =
      std::min<int64_t>(ceil_div(vectors, int64_t{kScaleGradientThreads} * kScaleGradientItems),
                        int64_t{kBlocksOfSm} * device.num_sms);
  return config;
}

// What the chooser needs to know about the current device.
cudaError_t linear_cross_entropy_device_traits(DeviceTraits* traits);

// Enqueues on `stream`.
cudaError_t launch_scale_gradient(const ScaleGradientParams& params,
                                  const ScaleGradientConfig& config, cudaStream_t stream);

}  // namespace fusedcuda
