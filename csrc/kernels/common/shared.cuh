// Dynamic shared memory: its size is a launch option (LaunchOptions::shared_bytes in launch.h).
// What other blocks of a cluster store into (cluster.cuh) lies in it.
#pragma once

#include <cuda_runtime.h>

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

}  // namespace fusedcuda
