// Copies from global to shared memory that pass no registers (cp.async, compute capability 8.0): a
// thread starts them, goes on, and waits only when it needs the data. So a block keeps as many
// bytes in flight as its shared memory holds, and its registers stay free.
//
//   copy_async_16(shared, global);   // any number of copies
//   copy_async_commit();             // the copies since the last commit are a group
//   copy_async_wait<1>();            // all groups but the latest one have arrived
//   __syncthreads();                 // unless each thread reads only what it copied itself
//
// Committing an empty group is allowed; it keeps the count right where there is no more to copy.
// The copies pass by L1 and read what the previous kernel has written.
#pragma once

#include <cuda_runtime.h>

#include "shared.cuh"

namespace fusedcuda {

// Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::copy_async(shared, global, 16);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
#endif
}

__device__ __forceinline__ void copy_async_commit() {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::copy_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the kPending latest groups of this thread are still on their way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::copy_async_wait(kPending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace fusedcuda
