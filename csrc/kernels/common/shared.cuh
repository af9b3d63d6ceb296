// Dynamic shared memory: its size is a launch option (LaunchOptions::shared_bytes in launch.h).
// What other blocks of a cluster store into (cluster.cuh) lies in it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fusedcuda {

// Where the block's dynamic shared memory starts, aligned to 1024 bytes (tensor_map.h). What it
// holds is undefined until somebody writes it.
__device__ __forceinline__ void* dynamic_shared() {
#ifdef FUSEDCUDA_EMULATION
  return ::emulation::dynamic_shared();
#else
  extern __shared__ __align__(1024) unsigned char fusedcuda_dynamic_shared[];
  return fusedcuda_dynamic_shared;
#endif
}

// Parts of the dynamic shared memory, one behind the other.
class SharedMemory {
 public:
  __device__ SharedMemory() : next_(static_cast<unsigned char*>(dynamic_shared())) {}

  // `bytes`: a multiple of 16.
  __device__ void* take(int bytes) {
    void* part = next_;
    next_ += bytes;
    return part;
  }
  __device__ void* rest() const { return next_; }

 private:
  unsigned char* next_;
};

#ifndef FUSEDCUDA_EMULATION

// An address in the block's shared memory, as PTX names it.
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// The same place in block `rank` of the cluster.
__device__ __forceinline__ uint32_t shared_address_in(const void* shared, unsigned rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(mapped)
      : "r"(shared_address(shared)), "r"(rank));
  return mapped;
}

#endif

}  // namespace fusedcuda
