// Matrix products of a warp (mma.sync, compute capability 8.0): 16 x 8 x 16 elements of 2 bytes,
// both factors in registers, where load_matrices() of wgmma.cuh puts them.
//
// Of lane l, with row = l / 4 and pair = 2 (l % 4), two neighbours in a word, the first one below:
//   a[0], a[1]: elements (row, pair) and (row + 8, pair) of the left factor, 16 x 16;
//   a[2], a[3]: the same eight columns further;
//   b[0], b[1]: elements (pair, row) and (pair + 8, row) of the right factor, 16 x 8, neighbours
//     being below each other;
//   sums[0], sums[1]: the sums (row, pair) and (row, pair + 1); [2], [3]: the same of row + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace fusedcuda {

// sums += a * b, by the whole warp.
template <typename T>
__device__ __forceinline__ void multiply_tiles(float (&sums)[4], const uint32_t (&a)[4],
                                               const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
#ifdef FUSEDCUDA_EMULATION
  ::emulation::multiply_tiles(sums, a, b, std::is_same_v<T, __half>);
#else
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#endif
}

}  // namespace fusedcuda
