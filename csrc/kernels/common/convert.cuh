// Conversions between storage and compute types. torch's build defines __CUDA_NO_HALF_CONVERSIONS__
// and friends, so every conversion in the kernels goes through these two functions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dtype.h"

namespace fusedcuda {

// What an element is computed in: double for double, float for everything else.
template <typename T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <typename T>
using Compute = typename ComputeOf<T>::type;

__device__ __forceinline__ double to_compute(double x) { return x; }
__device__ __forceinline__ float to_compute(float x) { return x; }
__device__ __forceinline__ float to_compute(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_compute(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_compute(Compute<T> x);
template <>
__device__ __forceinline__ double from_compute<double>(double x) {
  return x;
}
template <>
__device__ __forceinline__ float from_compute<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_compute<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_compute<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two elements of 2 bytes in a register, the first one in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    memcpy(&bits, &pair, sizeof(bits));
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    memcpy(&bits, &pair, sizeof(bits));
  }
  return bits;
}

// The same of what is not negative, and 0 of the rest; a NaN stays. In one instruction.
template <typename T>
__device__ __forceinline__ uint32_t pack_relu(float first, float second) {
#ifdef __CUDA_ARCH__
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  }
  return bits;
#else
  return pack_pair<T>(first < 0.0f ? 0.0f : first, second < 0.0f ? 0.0f : second);
#endif
}

}  // namespace fusedcuda
