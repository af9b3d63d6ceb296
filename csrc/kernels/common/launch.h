// Launching a kernel, with programmatic dependent launch where the GPU has it (compute
// capability 9.0 and newer).
//
// A dependent launch lets the blocks of a kernel start while the one before it on the stream is
// still finishing, which hides the gap of about a microsecond between small kernels. The kernel
// then has to call wait_for_previous_kernel() before it touches global memory, and must read with
// plain loads afterwards: the non-coherent path (ld.global.nc, __ldg) may be served from lines
// fetched before the wait.
#pragma once

#include <cuda_runtime_api.h>

namespace fusedcuda {

constexpr int kWarpSize = 32;

// What choosers may know about a device.
struct DeviceTraits {
  int num_sms = 132;  // H200
  bool dependent_launch = true;
};

#ifdef __CUDACC__

__device__ __forceinline__ void wait_for_previous_kernel() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// From here on the next kernel on the stream may start; it still waits for this one's memory.
__device__ __forceinline__ void let_next_kernel_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, bool dependent,
                   cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

#endif

}  // namespace fusedcuda
