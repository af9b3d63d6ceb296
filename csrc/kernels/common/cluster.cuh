// Thread-block clusters (compute capability 9.0): up to 16 blocks that run at the same time and
// store into each other's dynamic shared memory (shared.cuh).
//
//   store_to_cluster(&slots[cluster_rank()], rank, value);   // for every rank
//   cluster_arrive();
//   ...                                                      // whatever does not need the slots
//   cluster_wait();                                          // the slots are filled
//
// No block may end, nor use a slot for something else, while another may still store into it: the
// last store into a block lies before a cluster_wait() of that block. Nor may a block store before
// the other has started: the first store lies behind a cluster_wait() as well.
//
// Where there are no clusters, and in a launch without them, a block is a cluster of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "shared.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define FUSEDCUDA_NO_CLUSTERS
#endif

namespace fusedcuda {

// The index of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
#if defined(FUSEDCUDA_EMULATION)
  return ::emulation::cluster_rank();
#elif defined(FUSEDCUDA_NO_CLUSTERS)
  return 0;
#else
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
}

// The number of blocks of the cluster.
__device__ __forceinline__ unsigned cluster_size() {
#if defined(FUSEDCUDA_EMULATION)
  return ::emulation::cluster_size();
#elif defined(FUSEDCUDA_NO_CLUSTERS)
  return 1;
#else
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#endif
}

// The barrier of all threads of the cluster in two halves. What a thread has written before it
// arrives, anywhere, all the others see once they have waited. Each thread alternates between the
// two, and the threads of a warp come together.
__device__ __forceinline__ void cluster_arrive() {
#if defined(FUSEDCUDA_EMULATION)
  ::emulation::cluster_arrive();
#elif !defined(FUSEDCUDA_NO_CLUSTERS)
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The same where a thread has nothing to show yet: it has only started, or has initialized
// barriers and told so (ClusterMailbox). It does not wait for what it has read or written.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if defined(FUSEDCUDA_EMULATION)
  ::emulation::cluster_arrive();
#elif !defined(FUSEDCUDA_NO_CLUSTERS)
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// The same when `value` has been computed from all that the thread has read of other blocks, after
// which they may end, but not write there. It does not wait for what it has written elsewhere.
__device__ __forceinline__ void cluster_arrive_behind(float value) {
#if defined(FUSEDCUDA_EMULATION)
  ::emulation::cluster_arrive();
#elif !defined(FUSEDCUDA_NO_CLUSTERS)
  // No computation gives this NaN, but nobody knows before it is done.
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.eq.b32 never, %0, 0x7fabcdef;\n"
      "@never trap;\n"
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "}" ::"r"(__float_as_int(value))
      : "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(FUSEDCUDA_EMULATION)
  ::emulation::cluster_wait();
#elif defined(FUSEDCUDA_NO_CLUSTERS)
  __syncthreads();
#else
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Writes `value` to where `shared`, an address in the dynamic shared memory of this block, is in
// that of block `rank`. T: 4 to 16 bytes, such as float, double, float2.
template <typename T>
__device__ __forceinline__ void store_to_cluster(T* shared, unsigned rank, T value) {
#if defined(FUSEDCUDA_EMULATION)
  T* remote = static_cast<T*>(::emulation::map_to_cluster(shared, rank));
#elif defined(FUSEDCUDA_NO_CLUSTERS)
  T* remote = shared;
#else
  T* remote;  // a generic address: st.shared::cluster becomes the same instruction, ST.E
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(shared), "r"(rank));
#endif
  *remote = value;
}

// Reads what `shared` is in block `rank`. The cluster's barrier lies between this and what is
// written there, before and after. 16 bytes.
template <typename T>
__device__ __forceinline__ T load_from_cluster(const T* shared, unsigned rank) {
  static_assert(sizeof(T) == 16, "four words");
  T value;
#if defined(FUSEDCUDA_EMULATION)
  memcpy(&value, ::emulation::map_to_cluster(const_cast<T*>(shared), rank), sizeof(T));
#elif defined(FUSEDCUDA_NO_CLUSTERS)
  value = *shared;
#else
  uint32_t words[4];
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address_in(shared, rank))
               : "memory");
  memcpy(&value, words, sizeof(T));
#endif
  return value;
}

// A place in each block's dynamic shared memory for values that the blocks of a cluster send each
// other, and a barrier (mbarrier) that counts their bytes. Other than cluster_arrive(), which waits
// until everything the thread has written is visible, results in global memory included, it waits
// for these values only:
//
//   expect(bytes);                            // one thread of the block
//   send(&slots[cluster_rank()], rank, v);    // anybody, any block, before or after
//   wait();                                   // all: `bytes` have arrived
//
// A launch without clusters has none of this. init() by one thread, and a cluster barrier behind
// it, come first. Whoever sends to a block for the next round has to know that it has finished this
// one, so rounds take turns between two mailboxes, and every thread sends for the next only after
// it has read this one's values.
class ClusterMailbox {
 public:
  // `barrier`: 8 bytes of dynamic shared memory, at the same place in every block.
  __device__ __forceinline__ explicit ClusterMailbox(uint64_t* barrier) : barrier_(barrier) {}

  __device__ __forceinline__ void init() const {
#if defined(FUSEDCUDA_EMULATION)
    ::emulation::mailbox_init(barrier_);
#elif !defined(FUSEDCUDA_NO_CLUSTERS)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier_))
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  __device__ __forceinline__ void expect(int bytes) const {
#if defined(FUSEDCUDA_EMULATION)
    ::emulation::mailbox_expect(barrier_, bytes);
#elif !defined(FUSEDCUDA_NO_CLUSTERS)
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier_)),
        "r"(bytes)
        : "memory");
#endif
  }

  // Writes `value` to where `slot` is in block `rank`, word by word. T: a multiple of 4 bytes.
  template <typename T>
  __device__ __forceinline__ void send(T* slot, unsigned rank, const T& value) const {
    static_assert(sizeof(T) % 4 == 0, "whole words");
#if defined(FUSEDCUDA_EMULATION)
    for (size_t at = 0; at < sizeof(T); at += 4) {
      ::emulation::mailbox_send(reinterpret_cast<char*>(slot) + at, barrier_, rank,
                                reinterpret_cast<const char*>(&value) + at, 4);
    }
#elif !defined(FUSEDCUDA_NO_CLUSTERS)
    const unsigned to = shared_address_in(slot, rank), barrier = shared_address_in(barrier_, rank);
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to +
                                                                                            4 * i),
          "r"(words[i]), "r"(barrier)
          : "memory");
    }
#endif
  }

  // `parity`: 0 in the first round of this mailbox, 1 in the second, 0 in the third.
  __device__ __forceinline__ void wait(unsigned parity) const {
#if defined(FUSEDCUDA_EMULATION)
    ::emulation::mailbox_wait(barrier_, parity);
#elif !defined(FUSEDCUDA_NO_CLUSTERS)
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again_%=:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 arrived, [%0], %1;\n"
        "@!arrived bra again_%=;\n"
        "}" ::"r"(shared_address(barrier_)),
        "r"(parity)
        : "memory");
#endif
  }

 private:
  uint64_t* barrier_;
};

}  // namespace fusedcuda
