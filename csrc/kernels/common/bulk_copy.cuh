// Copies of neighbouring bytes from global to shared memory by Hopper's copy engine: one thread
// starts one of any length, and the bytes count at a barrier (mbarrier.cuh) when they arrive.
#pragma once

#include <cuda_runtime.h>

#include "mbarrier.cuh"

namespace fusedcuda {

// Both addresses and the length are multiples of 16. The thread has announced the bytes, or does so
// before it waits (Mbarrier::arrive_and_expect).
__device__ __forceinline__ void load_bulk(void* shared, const void* global, unsigned bytes,
                                          Mbarrier* barrier) {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::load_bulk(shared, global, bytes, barrier->state());
#else
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

}  // namespace fusedcuda
