// Which launches a GPU of compute capability 9.0 accepts.
#include <cuda_runtime.h>

#include <map>

#include "execution.h"

namespace {

constexpr size_t kSharedBytes = 48 << 10;  // of a block, unless its kernel is allowed more
constexpr size_t kMostSharedBytes = 227 << 10;
constexpr unsigned kPortableCluster = 8;
constexpr unsigned kMostClusterBlocks = 16;
constexpr size_t kMostParameterBytes = 4096;   // of any GPU
constexpr unsigned kMostResidentBlocks = 132;  // of a cooperative launch, one an SM

struct Allowed {
  size_t shared_bytes = kSharedBytes;
  unsigned cluster = kPortableCluster;
};

std::map<const void*, Allowed> allowed;  // a kernel

}  // namespace

void emulation::forget_allowances() { allowed.clear(); }

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    allowed[kernel].cluster = value != 0 ? kMostClusterBlocks : kPortableCluster;
    return cudaSuccess;
  }
  if (value < 0 || value > static_cast<int>(kMostSharedBytes)) return cudaErrorInvalidValue;
  allowed[kernel].shared_bytes = value;
  return cudaSuccess;
}

cudaError_t emulation::launch(const void* kernel, const cudaLaunchConfig_t& config,
                              size_t parameter_bytes, const std::function<void()>& thread) {
  Grid grid;
  grid.size = config.gridDim;
  grid.block = config.blockDim;
  grid.shared_bytes = config.dynamicSmemBytes;
  bool cooperative = false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      grid.dependent = attribute.val.programmaticStreamSerializationAllowed != 0;
    } else if (attribute.id == cudaLaunchAttributeCooperative) {
      cooperative = attribute.val.cooperative != 0;
    } else {
      const uint3& cluster = attribute.val.clusterDim;
      if (cluster.x == 0 || cluster.y != 1 || cluster.z != 1) return cudaErrorInvalidClusterSize;
      grid.cluster = cluster.x;
    }
  }
  const auto& [x, y, z] = static_cast<const uint3&>(grid.size);
  const unsigned threads = grid.block.x * grid.block.y * grid.block.z;
  if (x == 0 || y == 0 || z == 0 || threads == 0 || x >= 1u << 31 || y >= 1u << 16 ||
      z >= 1u << 16 || threads > 1024 || parameter_bytes > kMostParameterBytes) {
    return cudaErrorInvalidConfiguration;
  }
  const Allowed& limits = allowed[kernel];
  if (grid.shared_bytes > limits.shared_bytes) return cudaErrorInvalidValue;
  if (grid.cluster > limits.cluster) return cudaErrorInvalidClusterSize;
  if (x % grid.cluster != 0) return cudaErrorInvalidConfiguration;
  if (cooperative) {
    // All blocks take turns as those of a cluster do: there may be one cluster, but no more.
    if (y != 1 || z != 1 || (grid.cluster != 1 && grid.cluster != x))
      return cudaErrorInvalidConfiguration;
    if (x > kMostResidentBlocks) return cudaErrorCooperativeLaunchTooLarge;
    grid.cluster = x;
  }
  run_grid(grid, thread);
  return cudaSuccess;
}
