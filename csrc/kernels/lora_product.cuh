// A linear layer with its adapter in one launch:
//
//   y = x @ weight.T + bias + t @ up.T,   t = scale * x @ down.T
//
// A product on Hopper (common/hopper_gemm.cuh) leaves three warps of each block idle. They make t,
// 16 rows at a time and each warp a third of the columns, straight from the memory to mma.sync,
// while the others multiply x and the weight; that needs t only at the end of a tile, for one block
// more of what it adds up. For 128 rows a counter says how many of their eights of t are there. (A
// warp for 16 rows would have as many bytes under way, but all rows would be ready at the same
// time, after the first tiles want theirs.)
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/convert.cuh"
#include "common/gemm_launch.cuh"
#include "common/grid_counter.cuh"
#include "common/mma.cuh"
#include "common/run_gemm.cuh"
#include "common/tma.cuh"
#include "linear_act_forward.cuh"
#include "lora.h"
#include "lora_product_config.h"

namespace fusedcuda {

template <typename T>
class LoraSide {
 public:
  struct Params {
    const void* x = nullptr;
    const void* down = nullptr;
    void* t = nullptr;
    unsigned* counters = nullptr;  // zero before the launch
    float* parts = nullptr;        // lora_product_parts() of them
    int64_t x_stride = 0, down_stride = 0;
    int rows = 0, columns = 0, rank = 0, pitch = 0;  // pitch: of t
    float scale = 1;
  };
  static constexpr bool kRuns = true;
  static constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;

  __device__ __forceinline__ explicit LoraSide(const Params& params) : p_(params) {}

  // Warp `warp` of `warps` that do this in every block. All blocks begin with the first rows, which
  // are needed first.
  __device__ __forceinline__ void run(int warp, int warps) const {
    const int blocks = blocks_of(p_.rows);
    int turn = 0;
    for (int block = static_cast<int>(blockIdx.x); block < blocks;
         block += static_cast<int>(gridDim.x), turn ^= 1) {
      float sums[2][4] = {};
      make_part(block * kRowsOfWarp, warp, warps, sums);
      if (warp > 0) keep_part(sums, part_of(turn, warp));
      named_barrier(kBarrier, warps * kWarpSize);
      if (warp > 0) continue;
#pragma unroll 1
      for (int other = 1; other < warps; ++other) add_part(part_of(turn, other), sums);
      store(block * kRowsOfWarp + lane() / 4, sums);
      // (The copy engine reads t.)
      fence_global_for_copies();
      __syncwarp();
      if (lane() == 0) add_release(&p_.counters[block / kWarpsOfTile], 1);
    }
  }

  // Until t has the rows of a tile.
  __device__ __forceinline__ void wait_for_rows(int first) const {
    if (first >= p_.rows) return;
    const int rows = min(kLoraProductRows, p_.rows - first);
    const auto expected = static_cast<unsigned>(blocks_of(rows));
    constexpr int kMostPolls = 1 << 24;  // 10 s, and then the other blocks have stopped
    for (int polls = 0; load_acquire(&p_.counters[first / kLoraProductRows]) < expected; ++polls) {
      // (An assertion is a function call, for which the compiler would end each of the tensor
      // cores' products before it starts the next one: C7510.)
      if (polls >= kMostPolls) __trap();
    }
    fence_global_for_copies();
  }

 private:
  static constexpr int kRowsOfWarp = 16, kWarpsOfTile = kLoraProductRows / kRowsOfWarp;
  static constexpr int kStep = 32;    // columns that a warp multiplies at a time
  static constexpr int kBarrier = 3;  // behind those of the two computing warpgroups
  static constexpr int kPartVectors = kLoraProductParts / 4;

  // Of a row, eight neighbours of the columns of a step. Two rows of x, eight apart, and two ranks.
  struct Pieces {
    uint4 x[2], down[2];
  };

  static __device__ __forceinline__ int blocks_of(int rows) {
    return (rows + kRowsOfWarp - 1) / kRowsOfWarp;
  }
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

  // The sums over the columns of warp `warp` of `warps`, which take steps in turn.
  __device__ __forceinline__ void make_part(int first, int warp, int warps,
                                            float (&sums)[2][4]) const {
    const int row = lane() / 4, first_column = warp * kStep + lane() % 4 * 8;
    // What would lie outside is read from the last row, or rank, and not stored.
    const T *x[2], *down[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[i] = static_cast<const T*>(p_.x) + min(first + row + 8 * i, p_.rows - 1) * p_.x_stride +
             first_column;
      down[i] = static_cast<const T*>(p_.down) + min(row + 8 * i, p_.rank - 1) * p_.down_stride +
                first_column;
    }
    int left = p_.columns - first_column;  // from where the pointers are
    auto load = [&](int ahead, Pieces& pieces) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pieces.x[i] = pieces.down[i] = {0, 0, 0, 0};
        if (ahead < left) {
          pieces.x[i] = *reinterpret_cast<const uint4*>(x[i] + ahead);
          pieces.down[i] = *reinterpret_cast<const uint4*>(down[i] + ahead);
        }
      }
    };
    Pieces even, odd;
    const int step = warps * kStep;
    load(0, even);
#pragma unroll 1
    for (int column = warp * kStep; column < p_.columns; column += 2 * step) {
      load(step, odd);
      multiply(even, sums);
      load(2 * step, even);
      multiply(odd, sums);
      left -= 2 * step;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[i] += 2 * step;
        down[i] += 2 * step;
      }
    }
  }

  // Two turns have places of their own: the first warp reads those of one while the others may be
  // at the next.
  __device__ __forceinline__ float4* part_of(int turn, int warp) const {
    const int place = (static_cast<int>(blockIdx.x) * 2 + turn) * kPartVectors;
    return reinterpret_cast<float4*>(p_.parts) + place + (warp - 1) * 2 * kWarpSize + lane();
  }

  static __device__ __forceinline__ void keep_part(const float (&sums)[2][4], float4* part) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      part[i * kWarpSize] = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
  }

  static __device__ __forceinline__ void add_part(const float4* part, float (&sums)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 bits = load_of_others(reinterpret_cast<const uint4*>(part + i * kWarpSize));
      sums[i][0] += __uint_as_float(bits.x);
      sums[i][1] += __uint_as_float(bits.y);
      sums[i][2] += __uint_as_float(bits.z);
      sums[i][3] += __uint_as_float(bits.w);
    }
  }

  // The order of k is another one than that of the columns, the same in both factors: a thread's
  // eight neighbours are k 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of a first product, and of a second.
  static __device__ __forceinline__ void multiply(const Pieces& pieces, float (&sums)[2][4]) {
    const uint4 &upper = pieces.x[0], &lower = pieces.x[1];
    const uint32_t a[2][4] = {{upper.x, lower.x, upper.y, lower.y},
                              {upper.z, lower.z, upper.w, lower.w}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t b[2][2] = {{pieces.down[i].x, pieces.down[i].y},
                                {pieces.down[i].z, pieces.down[i].w}};
      multiply_tiles<T>(sums[i], a[0], b[0]);
      multiply_tiles<T>(sums[i], a[1], b[1]);
    }
  }

  // Where there is no rank, infinity in x gives NaN.
  __device__ __forceinline__ void store(int row, const float (&sums)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * i + lane() % 4 * 2;
      if (column >= p_.pitch) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at_row = row + 8 * half;
        float two[2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
          two[j] = column + j < p_.rank ? sums[i][2 * half + j] * p_.scale : 0.0f;
        if (at_row < p_.rows)
          *reinterpret_cast<uint32_t*>(static_cast<T*>(p_.t) + int64_t{at_row} * p_.pitch +
                                       column) = pack_pair<T>(two[0], two[1]);
      }
    }
  }

  const Params& p_;
};

template <typename T>
struct LoraProductKernelParams : GemmKernelParams<LinearActEpilogueParams> {
  typename LoraSide<T>::Params side;
};

template <typename Gemm>
__global__ void __launch_bounds__(kGemmThreads, 1) lora_product_kernel_sm90(
    const __grid_constant__ LoraProductKernelParams<typename Gemm::Element> params) {
#if defined(FUSEDCUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_gemm<Gemm, LinearActEpilogue<Gemm, /*kActivates=*/false>, LoraSide<typename Gemm::Element>>(
      params.factors, params.tiles, params.epilogue, params.side);
#else
  __trap();
#endif
}

// ------------------------------------------------------------------------------------------------
// Launcher
// ------------------------------------------------------------------------------------------------

namespace lora_product {

template <typename Gemm>
cudaError_t run(const LoraProductParams& p, const GemmConfig& config, cudaStream_t stream) {
  const LinearActParams& linear = p.linear;
  LoraProductKernelParams<typename Gemm::Element> params;
  const cudaError_t status = linear_act::describe_forward<Gemm>(linear, config, &params);
  if (status != cudaSuccess) return status;
  auto& side = params.side;
  side.x = linear.a.data;
  side.x_stride = linear.a.stride;
  side.down = p.down.data;
  side.down_stride = p.down.stride;
  side.t = const_cast<void*>(linear.extra_a.data);
  side.counters = p.counters;
  side.parts = p.parts;
  side.rows = static_cast<int>(linear.m);
  side.columns = static_cast<int>(linear.k);
  side.rank = p.rank;
  side.pitch = lora_pitch(p.rank);
  side.scale = p.scale;
  return gemm::start<Gemm>(lora_product_kernel_sm90<Gemm>, config, stream, params,
                           /*cooperative=*/true);
}

template <typename T>
cudaError_t run_type(const LoraProductParams& p, const GemmConfig& config, cudaStream_t stream) {
  return p.linear.b.k_is_inner ? run<linear_act::TogetherGemm<T, true>>(p, config, stream)
                               : run<linear_act::TogetherGemm<T, false>>(p, config, stream);
}

constexpr auto kAnyKernel = lora_product_kernel_sm90<linear_act::TogetherGemm<__nv_bfloat16, true>>;

}  // namespace lora_product
}  // namespace fusedcuda
