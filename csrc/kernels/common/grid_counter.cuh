// Counters in global memory by which the blocks of one launch tell each other how far they are.
// Whoever waits for another block needs a launch whose blocks all run at the same time
// (LaunchOptions::cooperative), or it may wait for one that never starts.
//
//   store what others read; __syncwarp();
//   if (lane == 0) add_release(&counter, 1);          // it is there
//   ...
//   while (load_acquire(&counter) < expected) {}      // all of it is there
//   __syncwarp(); and the warp reads by load_of_others()
#pragma once

#include <cuda_runtime.h>

namespace fusedcuda {

// Whoever sees the sum sees what this thread has written or seen before, too.
__device__ __forceinline__ void add_release(unsigned* counter, unsigned value) {
#ifdef FUSEDCUDA_EMULATION
  *counter += value;
#else
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
#endif
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* counter) {
#ifdef FUSEDCUDA_EMULATION
  return ::emulation::poll(counter);
#else
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
#endif
}

// From where all blocks see the same, past the cache of this multiprocessor.
__device__ __forceinline__ uint4 load_of_others(const uint4* from) {
#ifdef FUSEDCUDA_EMULATION
  return *from;
#else
  return __ldcg(from);
#endif
}

// Adds with both, and returns the value before.
__device__ __forceinline__ unsigned add_acquire_release(unsigned* counter, unsigned value) {
#ifdef FUSEDCUDA_EMULATION
  return atomicAdd(counter, value);
#else
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
#endif
}

}  // namespace fusedcuda
