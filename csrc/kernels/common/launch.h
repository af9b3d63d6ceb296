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
#include <pthread.h>

namespace fusedcuda {

constexpr int kWarpSize = 32;

// What choosers may know about a device.
struct DeviceTraits {
  int num_sms = 132;  // H200
  bool dependent_launch = true;
  bool clusters = true;  // thread-block clusters of up to 16 blocks
  bool wgmma = true;     // Hopper's own matrix products, for which it has to be compiled (9.0a)
  // Clusters of 1, 2, 4, 8 and 16 blocks that run at the same time, with one block on an SM and
  // with two. A cluster sits on one GPC, and GPCs differ in size (H200).
  int resident_clusters[2][5] = {{132, 66, 30, 15, 7}, {264, 132, 64, 32, 14}};
  size_t shared_bytes_of_sm = 228 << 10;
  size_t shared_bytes_of_block = 227 << 10;
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

// What the current device is and can do, given one of the kernels that it runs: the hardware's word
// on dependent launches and clusters is not enough where it runs older PTX.
template <typename... Params>
cudaError_t describe_device(void (*kernel)(Params...), DeviceTraits* traits) {
  int device;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&traits->num_sms, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  int of_sm, of_block;
  status = cudaDeviceGetAttribute(&of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) return status;
  traits->shared_bytes_of_sm = of_sm;
  traits->shared_bytes_of_block = of_block;
  cudaFuncAttributes attributes;
  status = cudaFuncGetAttributes(&attributes, kernel);
  traits->dependent_launch = status == cudaSuccess && attributes.ptxVersion >= 90;
  traits->clusters = traits->dependent_launch;
  return status;
}

struct LaunchOptions {
  bool dependent = false;    // may start early: the kernel calls wait_for_previous_kernel()
  int cluster = 1;           // blocks along x that form a cluster (cluster.cuh); divides grid.x
  size_t shared_bytes = 0;   // of dynamic shared memory (shared.cuh)
  bool cooperative = false;  // all blocks run at the same time, or the launch is an error
};

// A kernel gets 48 KB of shared memory unless it is allowed more. Some of it may be static.
constexpr size_t kSharedBytesOfAnyKernel = 40 << 10;
constexpr int kClusterOfAnyGpu = 8;

// Held from the call that sets how much shared memory a kernel may have to the launch that relies
// on it, so that another thread's launch of the same kernel cannot lower the limit in between.
// (Not std::mutex: its header takes nvcc a second.)
class SharedMemoryLimit {
 public:
  SharedMemoryLimit() { pthread_mutex_lock(&mutex_); }
  ~SharedMemoryLimit() { pthread_mutex_unlock(&mutex_); }
  SharedMemoryLimit(const SharedMemoryLimit&) = delete;

  template <typename Kernel>
  cudaError_t set(Kernel kernel, size_t bytes) const {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(bytes));
  }

 private:
  inline static pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

inline cudaLaunchAttribute cluster_attribute(int cluster) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

template <typename... Params>
cudaError_t allow_cluster(void (*kernel)(Params...), int cluster) {
  if (cluster <= kClusterOfAnyGpu) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// What a kernel is allowed is set for every launch that needs it: remembering it would take a table
// of kernels and devices.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, const LaunchOptions& options,
                   cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = options.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (options.dependent) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (options.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  if (options.cluster > 1) attributes[config.numAttrs++] = cluster_attribute(options.cluster);
  cudaError_t status = allow_cluster(kernel, options.cluster);
  if (status != cudaSuccess) return status;
  if (options.shared_bytes <= kSharedBytesOfAnyKernel)
    return cudaLaunchKernelEx(&config, kernel, args...);
  const SharedMemoryLimit limit;
  status = limit.set(kernel, options.shared_bytes);
  if (status != cudaSuccess) return status;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// How many clusters of `cluster` blocks of a kernel the current device runs at the same time.
template <typename... Params>
cudaError_t resident_clusters(void (*kernel)(Params...), int threads, int cluster, int* count) {
  const cudaError_t status = allow_cluster(kernel, cluster);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute = cluster_attribute(cluster);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(threads);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(count, kernel, &config);
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, bool dependent,
                   cudaStream_t stream, const Args&... args) {
  LaunchOptions options;
  options.dependent = dependent;
  return launch(kernel, grid, block, options, stream, args...);
}

#endif

}  // namespace fusedcuda
