// Matrix products of a warpgroup (wgmma, compute capability 9.0a): 64 x n x 16, both factors in
// shared memory as tensor_map.h lays them out, sums in the registers of the 128 threads.
//
// Thread t of warp w has, of the sums of rows 16 w + t / 4 (+ 8) and columns 8 j + 2 (t % 4) (+ 1):
//   sums[4 j], sums[4 j + 1]: the upper row, [4 j + 2], [4 j + 3]: the lower one.
//
// Between wgmma_begin() and wgmma_commit() any number of products may be started. They run while
// the threads go on; until wgmma_wait() says that they are over, nobody touches sums or factors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "launch.h"
#include "mbarrier.cuh"

namespace fusedcuda {

constexpr int kWarpgroup = 128;  // threads
constexpr int kWgmmaRows = 64;
constexpr int kWgmmaK = 16;

// The upper one of the two rows of which this thread has sums.
__device__ __forceinline__ int wgmma_row_of_thread() {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  return thread / kWarpSize * 16 + thread % kWarpSize / 4;
}

// Where a factor of 2-byte elements lies, in blocks of 8 rows of 128 bytes (1024 bytes). The
// factor's rows are those of the matrix product's result (or its columns).
//   k inner: a row of memory is 64 values of k of one row of the factor; the blocks are 8 rows
//   each. rows inner: a row of memory is 64 rows of the factor at one k; 64 rows x 64 values of k
//   are 8 blocks, the next 64 rows follow `next_rows` bytes later.
// Formats: PTX ISA, "Asynchronous warpgroup level matrix shared memory layout", matrix descriptor.
__device__ __forceinline__ uint64_t wgmma_factor(const void* shared, bool k_is_inner,
                                                 int next_rows) {
#ifdef FUSEDCUDA_EMULATION
  return ::emulation::wgmma_factor(shared, k_is_inner, next_rows);
#else
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  constexpr uint64_t kBlock = 1024 / 16;  // from one block to the next, in 16 bytes
  const uint64_t leading = k_is_inner ? 1 : static_cast<uint64_t>(next_rows) / 16;
  return (shared_address(shared) & 0x3ffff) >> 4 | leading << 16 | kBlock << 32 | kSwizzle128;
#endif
}

// The factor `values` further along k, a multiple of 16 within its 64.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t factor, bool k_is_inner, int values) {
#ifdef FUSEDCUDA_EMULATION
  return ::emulation::wgmma_advance(factor, values);
#else
  return factor + (k_is_inner ? values * 2 : values * 128) / 16;
#endif
}

__device__ __forceinline__ void wgmma_begin() {
#ifndef FUSEDCUDA_EMULATION
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::wgmma_commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::wgmma_wait(kPending);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Keeps the compiler from moving reads and writes of the sums across this place.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&sums)[kCount]) {
#ifndef FUSEDCUDA_EMULATION
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}

#ifndef FUSEDCUDA_EMULATION

// Eight operands, as asm wants them: their numbers in the text, and the registers.
#define FUSEDCUDA_N8(a, b, c, d, e, f, g, h) \
  "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define FUSEDCUDA_N32_0                                            \
  FUSEDCUDA_N8(0, 1, 2, 3, 4, 5, 6, 7)                             \
  "," FUSEDCUDA_N8(8, 9, 10, 11, 12, 13, 14, 15) "," FUSEDCUDA_N8( \
      16, 17, 18, 19, 20, 21, 22, 23) "," FUSEDCUDA_N8(24, 25, 26, 27, 28, 29, 30, 31)
#define FUSEDCUDA_N32_1                                              \
  FUSEDCUDA_N8(32, 33, 34, 35, 36, 37, 38, 39)                       \
  "," FUSEDCUDA_N8(40, 41, 42, 43, 44, 45, 46, 47) "," FUSEDCUDA_N8( \
      48, 49, 50, 51, 52, 53, 54, 55) "," FUSEDCUDA_N8(56, 57, 58, 59, 60, 61, 62, 63)
#define FUSEDCUDA_N32_2                                              \
  FUSEDCUDA_N8(64, 65, 66, 67, 68, 69, 70, 71)                       \
  "," FUSEDCUDA_N8(72, 73, 74, 75, 76, 77, 78, 79) "," FUSEDCUDA_N8( \
      80, 81, 82, 83, 84, 85, 86, 87) "," FUSEDCUDA_N8(88, 89, 90, 91, 92, 93, 94, 95)
#define FUSEDCUDA_N32_3                                                                           \
  FUSEDCUDA_N8(96, 97, 98, 99, 100, 101, 102, 103)                                                \
  "," FUSEDCUDA_N8(104, 105, 106, 107, 108, 109, 110, 111) "," FUSEDCUDA_N8(                      \
      112, 113, 114, 115, 116, 117, 118, 119) "," FUSEDCUDA_N8(120, 121, 122, 123, 124, 125, 126, \
                                                               127)

#define FUSEDCUDA_R8(d, i)                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FUSEDCUDA_R32(d, i) \
  FUSEDCUDA_R8(d, i), FUSEDCUDA_R8(d, i + 8), FUSEDCUDA_R8(d, i + 16), FUSEDCUDA_R8(d, i + 24)

// One instruction: the operands behind the sums are the factors, whether to add to the sums, and
// which factors have their rows inner.
#define FUSEDCUDA_WGMMA(n, type, numbers, a, b, add, a_rows, b_rows, ...)                   \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #add                              \
               ", 0;\n"                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" numbers \
               "}, %" #a ", %" #b ", adds, 1, 1, %" #a_rows ", %" #b_rows ";\n}"            \
               : __VA_ARGS__                                                                \
               : "l"(factor_a), "l"(factor_b), "r"(static_cast<int>(accumulate)),           \
                 "n"(kARowsInner), "n"(kBRowsInner))

// The same with a in registers.
#define FUSEDCUDA_WGMMA_A(n, type, numbers, a0, a1, a2, a3, b, add, b_rows, ...)                 \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" #add                                   \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" numbers      \
               "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", adds, 1, 1, %" #b_rows ";\n}" \
               : __VA_ARGS__                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(factor_b),                      \
                 "r"(static_cast<int>(accumulate)), "n"(kBRowsInner))

#define FUSEDCUDA_N64 FUSEDCUDA_N32_0 "," FUSEDCUDA_N32_1
#define FUSEDCUDA_N96 FUSEDCUDA_N64 "," FUSEDCUDA_N32_2
#define FUSEDCUDA_N128 FUSEDCUDA_N96 "," FUSEDCUDA_N32_3
#define FUSEDCUDA_R64 FUSEDCUDA_R32(sums, 0), FUSEDCUDA_R32(sums, 32)
#define FUSEDCUDA_R96 FUSEDCUDA_R64, FUSEDCUDA_R32(sums, 64)
#define FUSEDCUDA_R128 FUSEDCUDA_R96, FUSEDCUDA_R32(sums, 96)

#define FUSEDCUDA_WGMMA_OF(type)                                                            \
  if constexpr (kN == 16) {                                                                 \
    FUSEDCUDA_WGMMA(16, type, FUSEDCUDA_N8(0, 1, 2, 3, 4, 5, 6, 7), 8, 9, 10, 11, 12,       \
                    FUSEDCUDA_R8(sums, 0));                                                 \
  } else if constexpr (kN == 64) {                                                          \
    FUSEDCUDA_WGMMA(64, type, FUSEDCUDA_N32_0, 32, 33, 34, 35, 36, FUSEDCUDA_R32(sums, 0)); \
  } else if constexpr (kN == 128) {                                                         \
    FUSEDCUDA_WGMMA(128, type, FUSEDCUDA_N64, 64, 65, 66, 67, 68, FUSEDCUDA_R64);           \
  } else if constexpr (kN == 192) {                                                         \
    FUSEDCUDA_WGMMA(192, type, FUSEDCUDA_N96, 96, 97, 98, 99, 100, FUSEDCUDA_R96);          \
  } else {                                                                                  \
    FUSEDCUDA_WGMMA(256, type, FUSEDCUDA_N128, 128, 129, 130, 131, 132, FUSEDCUDA_R128);    \
  }

#define FUSEDCUDA_WGMMA_A_OF(type)                                                                \
  if constexpr (kN == 8) {                                                                        \
    FUSEDCUDA_WGMMA_A(8, type, "%0,%1,%2,%3", 4, 5, 6, 7, 8, 9, 10, "+f"(sums[0]), "+f"(sums[1]), \
                      "+f"(sums[2]), "+f"(sums[3]));                                              \
  } else if constexpr (kN == 64) {                                                                \
    FUSEDCUDA_WGMMA_A(64, type, FUSEDCUDA_N32_0, 32, 33, 34, 35, 36, 37, 38,                      \
                      FUSEDCUDA_R32(sums, 0));                                                    \
  } else if constexpr (kN == 128) {                                                               \
    FUSEDCUDA_WGMMA_A(128, type, FUSEDCUDA_N64, 64, 65, 66, 67, 68, 69, 70, FUSEDCUDA_R64);       \
  } else if constexpr (kN == 192) {                                                               \
    FUSEDCUDA_WGMMA_A(192, type, FUSEDCUDA_N96, 96, 97, 98, 99, 100, 101, 102, FUSEDCUDA_R96);    \
  } else {                                                                                        \
    FUSEDCUDA_WGMMA_A(256, type, FUSEDCUDA_N128, 128, 129, 130, 131, 132, 133, 134,               \
                      FUSEDCUDA_R128);                                                            \
  }

#endif

// sums = sums (or 0 unless `accumulate`) + a * b for 16 values of k, started by the whole
// warpgroup.
template <typename T, int kN, bool kAKInner, bool kBKInner>
__device__ __forceinline__ void wgmma(float (&sums)[kN / 2], uint64_t factor_a, uint64_t factor_b,
                                      bool accumulate) {
  static_assert(kN == 16 || kN == 64 || kN == 128 || kN == 192 || kN == 256);
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>);
#ifdef FUSEDCUDA_EMULATION
  ::emulation::wgmma(sums, kN, factor_a, factor_b, accumulate, std::is_same_v<T, __half>);
#else
  constexpr int kARowsInner = !kAKInner, kBRowsInner = !kBKInner;
  if constexpr (std::is_same_v<T, __half>) {
    FUSEDCUDA_WGMMA_OF("f16")
  } else {
    FUSEDCUDA_WGMMA_OF("bf16")
  }
#endif
}

// The same with 64 x 16 elements of a in registers: thread t of warp w has, two columns 2 (t % 4)
// and the next in a word, those of row 16 w + t / 4 in a[0], of row + 8 in a[1], and of the same
// rows in the eight columns that follow in a[2] and a[3].
template <typename T, int kN, bool kBKInner>
__device__ __forceinline__ void wgmma(float (&sums)[kN / 2], const uint32_t (&a)[4],
                                      uint64_t factor_b, bool accumulate) {
  static_assert(kN == 8 || kN == 64 || kN == 128 || kN == 192 || kN == 256);
#ifdef FUSEDCUDA_EMULATION
  ::emulation::wgmma(sums, kN, a, factor_b, accumulate, std::is_same_v<T, __half>);
#else
  constexpr int kBRowsInner = !kBKInner;
  if constexpr (std::is_same_v<T, __half>) {
    FUSEDCUDA_WGMMA_A_OF("f16")
  } else {
    FUSEDCUDA_WGMMA_A_OF("bf16")
  }
#endif
}

#ifndef FUSEDCUDA_EMULATION
#undef FUSEDCUDA_N8
#undef FUSEDCUDA_N32_0
#undef FUSEDCUDA_N32_1
#undef FUSEDCUDA_N32_2
#undef FUSEDCUDA_N32_3
#undef FUSEDCUDA_N64
#undef FUSEDCUDA_N96
#undef FUSEDCUDA_N128
#undef FUSEDCUDA_R64
#undef FUSEDCUDA_R96
#undef FUSEDCUDA_R128
#undef FUSEDCUDA_WGMMA_A
#undef FUSEDCUDA_WGMMA_A_OF
#undef FUSEDCUDA_R8
#undef FUSEDCUDA_R32
#undef FUSEDCUDA_WGMMA
#undef FUSEDCUDA_WGMMA_OF
#endif

// True for one lane of the warp; all of them ask.
__device__ __forceinline__ bool is_elected_lane() {
#ifdef FUSEDCUDA_EMULATION
  return ::emulation::lane() == 0;
#else
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
#endif
}

// Gives registers of this warpgroup's threads back, or takes some of those that others gave.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#ifndef FUSEDCUDA_EMULATION
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifndef FUSEDCUDA_EMULATION
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// Four 8x8 matrices of 2-byte elements from shared memory: lane l gives the place of row l % 8 of
// matrix l / 8 (16 bytes), and gets of row l / 4 of matrix i the elements 2 (l % 4) and the next in
// values[i]. kTransposed: of column l / 4 those in rows 2 (l % 4) and the next.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(const void* row, uint32_t (&values)[4]) {
#if defined(FUSEDCUDA_EMULATION)
  ::emulation::load_matrices(row, kTransposed, values);
#else
  const uint32_t address = shared_address(row);
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// Four 8x8 matrices of 2-byte elements to shared memory: lane l gives the place of row l % 8 of
// matrix l / 8 (16 bytes), and has of row l / 4 of matrix i the elements 2 (l % 4) and the next in
// values[i].
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&values)[4]) {
#ifdef FUSEDCUDA_EMULATION
  ::emulation::store_matrices(row, values);
#else
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
      : "memory");
#endif
}

}  // namespace fusedcuda
