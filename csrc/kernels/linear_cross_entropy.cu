// The gradient of a loss that is the last thing computed is made for an incoming gradient of 1, in
// the forward, while the logits are there. If another one comes in,
//
//   gradient *= factor
//
// in place: 4 bytes an element of a 16-bit type, and a gigabyte is no rare size here. If it is 1,
// as in most steps of training, nothing is moved. Which of the two it is only the GPU knows, and
// the host need not: a block reads the factor and goes home.
//
// The products of linear + cross-entropy are linear_act's, the loss of its rows is cross_entropy's.

#include <type_traits>

#include "common/launch.h"
#include "common/row_launch.cuh"
#include "common/vec.cuh"
#include "linear_cross_entropy.h"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Kernels
// ------------------------------------------------------------------------------------------------

template <typename T, int kVec>
__device__ __forceinline__ void scale_vector(Compute<T> factor, Vector<T, kVec>* v) {
  Compute<T> values[kVec];
  unpack(*v, values);
#pragma unroll
  for (int j = 0; j < kVec; ++j) values[j] *= factor;
  *v = pack<T, kVec>(values);
}

// Each thread has kScaleGradientItems vectors on their way before it stores the first one.
template <typename T, int kVec>
__global__ void __launch_bounds__(kScaleGradientThreads)
    scale_gradient_kernel(const __grid_constant__ ScaleGradientParams p) {
  constexpr int kItems = kScaleGradientItems;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Compute<T> factor = *static_cast<const Compute<T>*>(p.factor);
  if (factor == Compute<T>(1)) return;

  T* const gradient = static_cast<T*>(p.gradient);
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t vectors = p.count / kVec;
  for (int64_t first = thread; first < vectors; first += kItems * threads) {
    Vector<T, kVec> v[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t at = first + i * threads;
      if (at < vectors) v[i] = load_vector<T, kVec>(gradient + at * kVec);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t at = first + i * threads;
      if (at >= vectors) break;
      scale_vector(factor, &v[i]);
      store_vector(gradient + at * kVec, v[i]);
    }
  }
  // What is left behind the last whole vector.
  const int64_t last = vectors * kVec + thread;
  if (last < p.count) gradient[last] = from_compute<T>(to_compute(gradient[last]) * factor);
}

// ------------------------------------------------------------------------------------------------
// Launchers
// ------------------------------------------------------------------------------------------------

cudaError_t linear_cross_entropy_device_traits(DeviceTraits* traits) {
  return describe_device(scale_gradient_kernel<float, 1>, traits);
}

cudaError_t launch_scale_gradient(const ScaleGradientParams& params,
                                  const ScaleGradientConfig& config, cudaStream_t stream) {
  if (config.blocks == 0) return cudaSuccess;
  return with_type(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel =
        config.vec > 1 ? scale_gradient_kernel<T, kVectorWidth<T>> : scale_gradient_kernel<T, 1>;
    return launch(kernel, dim3(static_cast<unsigned>(config.blocks)), dim3(kScaleGradientThreads),
                  config.dependent_launch, stream, params);
  });
}

}  // namespace fusedcuda
