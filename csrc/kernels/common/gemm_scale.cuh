// The factor a of a matrix product, multiplied element by element on its way from shared memory to
// the tensor cores, by the bits of a ReLU's mask. So dz = dy * act'(z) never exists in memory,
// though two products need it. (By the elements of another activation's derivative it was up to 7 %
// faster than dz in a kernel of its own, mostly slower, and 40 % of the time that nvcc took:
// bench/results/h200/linear_act_notes.md.)
//
// The tensor cores take a from registers here. Other than in shared memory it can be changed there,
// at the price of instructions that the other warpgroup's products hide.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hopper_gemm.h"
#include "launch.h"
#include "tensor_map.h"
#include "wgmma.cuh"

namespace fusedcuda {

// All ones in each half of a word whose lowest bit is set. (The upper bits of the halves are
// ignored.)
__device__ __forceinline__ uint32_t halves_of_bits(uint32_t bits) {
  return (bits & 0x00010001) * 0xffffu;
}

// 64 rows x 64 values of k of a, in the registers of a warpgroup: `words[k / 16]` as wgmma() takes
// them.
struct GemmFragments {
  uint32_t words[kGemmK / kWgmmaK][4] = {};

  // Products read these registers while the threads go on, which the compiler does not know: called
  // behind wgmma_wait(), this keeps it from using them for something else before.
  __device__ __forceinline__ void keep() const {
#ifndef FUSEDCUDA_EMULATION
#pragma unroll
    for (const auto& step : words) {
#pragma unroll
      for (const uint32_t& word : step) asm volatile("" ::"r"(word) : "memory");
    }
#endif
  }
};

// Where a thread's fragments come from; the tile `a` lies as tensor_map.h says, k inner or rows
// inner, `first_row` is a multiple of 64.
template <bool kKInner>
__device__ __forceinline__ void load_fragments(const unsigned char* a, int first_row,
                                               GemmFragments* fragments) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / kWarpSize;
  // Of the four 8x8 matrices, 1 and 3 are the lower rows, 2 and 3 the later k.
  const int lower = lane / 8 % 2, later = lane / 16;
#pragma unroll
  for (int step = 0; step < kGemmK / kWgmmaK; ++step) {
    if constexpr (kKInner) {
      const int row = warp * 16 + lower * 8 + lane % 8;
      const int chunk = (2 * step + later) ^ (row % 8);
      load_matrices<false>(a + (first_row + row) * kSwizzleBytes + chunk * 16,
                           fragments->words[step]);
    } else {
      const int k = step * kWgmmaK + later * 8 + lane % 8;
      const int chunk = (2 * warp + lower) ^ (k % 8);
      load_matrices<true>(a + (first_row + k) * kSwizzleBytes + chunk * 16, fragments->words[step]);
    }
  }
}

// The bits of a tile, in rows of 16 bytes: with k inner a row has the bits of 128 values of k of
// one row of a, those of `block` and of a neighbour; with rows inner those of 128 rows of a at one
// k.
template <bool kKInner>
__device__ __forceinline__ void mask_fragments(const unsigned char* mask, int first_row, int block,
                                               GemmFragments* fragments) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int row = first_row + wgmma_row_of_thread(), pair = 2 * (lane % 4);
  if constexpr (kKInner) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const uint2 bits = *reinterpret_cast<const uint2*>(
          mask + (row + 8 * lower) * kByteBoxColumns + block % 2 * (kGemmK / 8));
#pragma unroll
      for (int step = 0; step < kGemmK / kWgmmaK; ++step) {
#pragma unroll
        for (int later = 0; later < 2; ++later) {
          const uint32_t here =
              (step < 2 ? bits.x : bits.y) >> (step % 2 * kWgmmaK + later * 8 + pair);
          fragments->words[step][2 * later + lower] &= halves_of_bits((here & 1) | here << 15);
        }
      }
    }
  } else {
    // The bits of the upper and the lower row are in neighbouring bytes.
    const int warp = static_cast<int>(threadIdx.x) % kWarpgroup / kWarpSize;
    const unsigned char* const bytes = mask + (first_row + warp * 16) / 8;
    const int bit = lane / 4;
#pragma unroll
    for (int step = 0; step < kGemmK / kWgmmaK; ++step) {
#pragma unroll
      for (int later = 0; later < 2; ++later) {
        const int k = step * kWgmmaK + later * 8 + pair;
        const auto at = [&](int row_of_k) {
          return uint32_t{*reinterpret_cast<const uint16_t*>(bytes + row_of_k * kByteBoxColumns)};
        };
        const uint32_t both = (at(k) | at(k + 1) << 16) >> bit;
        fragments->words[step][2 * later] &= halves_of_bits(both);
        fragments->words[step][2 * later + 1] &= halves_of_bits(both >> 8);
      }
    }
  }
}

}  // namespace fusedcuda
