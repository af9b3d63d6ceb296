// Copies of boxes of matrices between global and shared memory by Hopper's copy engine (TMA): one
// thread starts one, no registers and no other threads are involved. tensor_map.h says how a box
// lies in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mbarrier.cuh"
#include "tensor_map.h"

namespace fusedcuda {

// Ahead of the first copy: the description comes from memory as well.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
#ifndef FUSEDCUDA_EMULATION
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// The box whose first element is at (row, column), to `shared`, a multiple of 1024. Its bytes count
// at `barrier`. A row of the box begins at a multiple of 16 bytes of the matrix' row.
__device__ __forceinline__ void load_box(const TensorMap* map, void* shared, Mbarrier* barrier,
                                         int row, int column) {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::load_box(&map->matrix, shared, barrier->state(), row, column,
                        1u << ::emulation::cluster_rank());
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
#endif
}

// The same to the same place in every block of the cluster whose bit is set, where it counts at
// that block's barrier.
__device__ __forceinline__ void load_box_to_blocks(const TensorMap* map, void* shared,
                                                   Mbarrier* barrier, int row, int column,
                                                   unsigned blocks) {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::load_box(&map->matrix, shared, barrier->state(), row, column, blocks);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)),
      "h"(static_cast<uint16_t>(blocks))
      : "memory");
#endif
}

// From shared memory to the matrix. The threads that wrote it have called
// fence_shared_for_copies() and met at a barrier.
__device__ __forceinline__ void store_box(const TensorMap* map, const void* shared, int row,
                                          int column) {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::store_box(&map->matrix, shared, row, column);
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(shared_address(shared)), "r"(column), "r"(row)
      : "memory");
#endif
}

__device__ __forceinline__ void fence_shared_for_copies() {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::fence_shared_for_copies();
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Between stores of threads to global memory and copies that read it: of the thread that stored,
// before it says so, and of the one that starts the copy, after it has heard.
__device__ __forceinline__ void fence_global_for_copies() {
#ifndef FUSEDCUDA_EMULATION
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// The stores that this thread has started since the last commit are a group.
__device__ __forceinline__ void commit_stores() {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::commit_stores();
#else
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Until all but the kPending latest groups of this thread have been read from shared memory.
template <int kPending>
__device__ __forceinline__ void wait_for_stores_to_read() {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::wait_for_stores(kPending);
#else
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

// Until they have been written as well.
__device__ __forceinline__ void wait_for_stores() {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::wait_for_stores(0);
#else
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

}  // namespace fusedcuda
