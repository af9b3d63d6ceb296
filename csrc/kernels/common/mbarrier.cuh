// Barriers in shared memory (mbarrier, compute capability 9.0): threads arrive, bytes that the copy
// engine delivers are counted, and whoever waits goes on when both are complete. A barrier is used
// again and again; the parity of the round (0, 1, 0, ...) says which one is waited for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "shared.cuh"

namespace fusedcuda {

class Mbarrier {
 public:
  // `arrivals` of threads end a round. One thread does it; a barrier of the block, or of the
  // cluster where other blocks arrive as well, comes before the first use.
  __device__ __forceinline__ void init(unsigned arrivals) {
#ifdef FUSEDCUDA_EMULATION
    ::emulation::mbarrier_init(&state_, arrivals);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state_)),
                 "r"(arrivals)
                 : "memory");
#endif
  }

  // Makes initialized barriers visible to the copy engine and to the cluster.
  static __device__ __forceinline__ void fence_init() {
#ifndef FUSEDCUDA_EMULATION
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // One arrival, and `bytes` more that this round has to wait for.
  __device__ __forceinline__ void arrive_and_expect(unsigned bytes) {
#ifdef FUSEDCUDA_EMULATION
    ::emulation::mbarrier_arrive(&state_, ::emulation::cluster_rank(), bytes);
#else
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state_)),
        "r"(bytes)
        : "memory");
#endif
  }

  // One arrival at this barrier of block `rank` of the cluster. Says nothing of what the thread has
  // written (a release to the cluster would wait for its stores to global memory): for readers that
  // are through.
  __device__ __forceinline__ void arrive_at(unsigned rank) {
#ifdef FUSEDCUDA_EMULATION
    ::emulation::mbarrier_arrive(&state_, rank, 0);
#else
    asm volatile(
        "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(shared_address_in(&state_, rank))
        : "memory");
#endif
  }

  __device__ __forceinline__ void arrive() {
#ifdef FUSEDCUDA_EMULATION
    ::emulation::mbarrier_arrive(&state_, ::emulation::cluster_rank(), 0);
#else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state_))
                 : "memory");
#endif
  }

  // Until the round of this parity is over. (A barrier that was never used has just ended a round
  // of parity 1.)
  __device__ __forceinline__ void wait(unsigned parity) {
#ifdef FUSEDCUDA_EMULATION
    ::emulation::mbarrier_wait(&state_, parity);
#else
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra again_%=;\n"
        "}" ::"r"(shared_address(&state_)),
        "r"(parity)
        : "memory");
#endif
  }

  uint64_t* state() { return &state_; }

 private:
  uint64_t state_;
};

// A barrier of `threads` (whole warps) of a block; `id` 1 to 15. All of them name the same numbers.
__device__ __forceinline__ void named_barrier(int id, int threads) {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::named_barrier(id, threads);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

}  // namespace fusedcuda
