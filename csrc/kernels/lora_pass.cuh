// What one pass over a matrix of many rows gives, on Hopper:
//
//   down: scale * dropout(x) @ factor    [rows, ranks]      t; or of dz its gradient
//   up:   dropout(x).T @ t               [columns, ranks]   the gradient of a factor
//
// or both of the same x: the backward of an adapter needs both of dz. The two add up along
// different sides of x, so no order of its elements finishes the one and the other; x is cut into
// tiles of 64 x 256, each of which is a part of 64 rows of `down` and of 256 columns of `up`. A
// block takes tiles below each other: `up` stays in its registers until it gets to other columns,
// `down` leaves a part for each tile. A second kernel adds the parts up, in a fixed order; with 16
// ranks they are an eighth of the bytes of x, and stay in the L2.
//
// Tiles lie in shared memory as the copy engine leaves them, and the tensor cores read them there
// with either side outermost (wgmma.cuh), so nothing is copied or transposed on the way. They have
// 64 ranks in any case: the copy engine fills up with zeros. Dropout is the work of further warps,
// between the arrival of a tile and its products.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/convert.cuh"
#include "common/gemm_launch.cuh"
#include "common/gemm_stages.cuh"
#include "common/mbarrier.cuh"
#include "common/philox.cuh"
#include "common/shared.cuh"
#include "common/tma.cuh"
#include "common/vec.cuh"
#include "common/wgmma.cuh"
#include "lora.h"
#include "lora_pass_config.h"

namespace fusedcuda {

struct LoraPassKernelParams {
  TensorMap x, factor, t;
  LoraPassTiles tiles;
  int64_t rows;
  int pitch;  // of t and of all parts
  LoraDropout dropout;
  float* down_parts;  // [tiles.columns, rows, pitch]
  float* up_parts;    // [as many as there are, 256, pitch]: LoraPassTiles::part_of
};

namespace lora_pass {

constexpr int kBoxBytes = 64 * kSwizzleBytes;  // of 64 x 64 elements
constexpr int kBoxes = kLoraPassColumns / 64;  // of a tile
constexpr int kTileBytes = kBoxes * kBoxBytes;
// Warps: four for the products, the producer, and behind its warpgroup those that drop.
constexpr int kProducer = 4, kFirstDropper = 8, kDroppers = 8;

template <typename T, bool kMakesDown, bool kMakesUp, bool kHasDropout>
struct Pass {
  using Element = T;
  static constexpr bool kDown = kMakesDown, kUp = kMakesUp, kDrops = kHasDropout;
  // lora_a lies as x does, lora_b has its ranks side by side.
  static constexpr bool kFactorIsKInner = !kUp;
  static constexpr int kWarps = kDrops ? kFirstDropper + kDroppers : kProducer + 1;
  static constexpr int kStageBytes = kTileBytes + (kUp ? kBoxBytes : 0);
  static constexpr int kStages = 4;

  struct Barriers {
    Mbarrier full[kStages];     // a tile has arrived
    Mbarrier dropped[kStages];  // and what is dropped of it is zero
    Mbarrier empty[kStages];    // its products are over
    Mbarrier factor_full, factor_empty;

    __device__ __forceinline__ void init() {
      for (int s = 0; s < kStages; ++s) {
        full[s].init(1);
        dropped[s].init(kDroppers);
        empty[s].init(kProducer);
      }
      factor_full.init(1);
      factor_empty.init(kProducer);
    }
  };

  static constexpr int kFactor = kStages * kStageBytes;
  static constexpr int kBarriers = kFactor + (kDown ? kTileBytes : 0);
  static constexpr int kBytes = kBarriers + static_cast<int>(sizeof(Barriers));
  static_assert(kBytes <= kGemmSharedBytes);
};

// f(column, first, end): the tiles of this block, below each other from row `first` on, in
// every column where it has some.
template <typename F>
__device__ __forceinline__ void for_columns(const LoraPassTiles& tiles, F f) {
  const uint32_t end = tiles.first_of(blockIdx.x + 1);
  for (uint32_t i = tiles.first_of(blockIdx.x); i < end;) {
    const LoraPassTile tile = tiles.at(i);
    const uint32_t count = min(tiles.rows - tile.row, end - i);
    f(static_cast<int>(tile.column), static_cast<int>(tile.row),
      static_cast<int>(tile.row + count));
    i += count;
  }
}

// By a warp, of which one lane talks to the copy engine.
template <typename P>
__device__ __forceinline__ void produce(const LoraPassKernelParams& p, unsigned char* shared,
                                        typename P::Barriers* barriers) {
  RingPosition<P::kStages> at;
  unsigned factor_parity = 1;
  for_columns(p.tiles, [&](int tile_column, int first, int end) {
    const int column = tile_column * kLoraPassColumns;
    if constexpr (P::kDown) {
      barriers->factor_empty.wait(factor_parity);
      factor_parity ^= 1;
      if (is_elected_lane()) {
        barriers->factor_full.arrive_and_expect(kTileBytes);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          const int k = column + 64 * box;
          load_box(&p.factor, shared + P::kFactor + box * kBoxBytes, &barriers->factor_full,
                   P::kFactorIsKInner ? 0 : k, P::kFactorIsKInner ? k : 0);
        }
      }
      __syncwarp();
    }
    for (int tile = first; tile < end; ++tile) {
      unsigned char* const stage = shared + at.stage * P::kStageBytes;
      Mbarrier* const full = &barriers->full[at.stage];
      barriers->empty[at.stage].wait(at.parity ^ 1);
      at.advance();
      if (!is_elected_lane()) continue;
      full->arrive_and_expect(P::kStageBytes);
      const int row = tile * kLoraPassRows;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        load_box(&p.x, stage + box * kBoxBytes, full, row, column + 64 * box);
      if constexpr (P::kUp) load_box(&p.t, stage + kTileBytes, full, row, 0);
    }
  });
}

// Thread `thread` of the dropping warps has the same 16 bytes of every eighth row.
template <typename P>
__device__ __forceinline__ void drop(const LoraPassKernelParams& p, unsigned char* shared,
                                     typename P::Barriers* barriers, int thread) {
  constexpr int kPieces = kLoraPassColumns / 8, kRowsApart = kDroppers * kWarpSize / kPieces;
  static_assert(kRowsApart == 8);  // chunk c of row r lies at c ^ (r % 8), of all of them the same
  const DropoutMask mask(p.dropout.seed, p.dropout.threshold);
  const int piece = thread % kPieces, first_row = thread / kPieces;
  const int own = piece / 8 * kBoxBytes + first_row * kSwizzleBytes + (piece % 8 ^ first_row) * 16;
  RingPosition<P::kStages> at;
  for_columns(p.tiles, [&](int tile_column, int first, int end) {
    const int column = tile_column * kLoraPassColumns + 8 * piece;
    for (int tile = first; tile < end; ++tile, at.advance()) {
      const int64_t row = int64_t{tile} * kLoraPassRows + first_row;
      unsigned char* const values = shared + at.stage * P::kStageBytes + own;
      barriers->full[at.stage].wait(at.parity);
#pragma unroll 2
      for (int i = 0; i < kLoraPassRows; i += kRowsApart) {
        const uint4 kept = mask.of_eight(row + i, column);
        auto* const eight = reinterpret_cast<uint4*>(values + i * kSwizzleBytes);
        *eight = {eight->x & kept.x, eight->y & kept.y, eight->z & kept.z, eight->w & kept.w};
      }
      fence_shared_for_copies();  // the tensor cores read as the copy engine does
      __syncwarp();
      if (thread % kWarpSize == 0) barriers->dropped[at.stage].arrive();
    }
  });
}

// A thread's sums of 64 rows of a tile, or 64 columns, and 64 ranks.
using Sums = float[kLoraPassRanks / 2];

// To `part`, whose rows are `pitch` apart; `rows` of them exist.
__device__ __forceinline__ void store_sums(const Sums& sums, float* part, int pitch, int64_t rows) {
  const int row = wgmma_row_of_thread(), rank = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= rows) continue;
    float* const of_row = part + (row + 8 * half) * pitch + rank;
#pragma unroll
    for (int j = 0; j < kLoraPassRanks / 8; ++j) {
      if (8 * j >= pitch) break;
      const Vector<float, 2> pair = {{sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]}};
      store_vector<float, 2>(of_row + 8 * j, pair);
    }
  }
}

template <typename P>
__device__ __forceinline__ void start_down(const unsigned char* stage, const unsigned char* factor,
                                           Sums& sums) {
  constexpr bool kInner = P::kFactorIsKInner;
  wgmma_pin(sums);
  wgmma_begin();
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const uint64_t a = wgmma_factor(stage + box * kBoxBytes, true, kBoxBytes);
    const uint64_t b = wgmma_factor(factor + box * kBoxBytes, kInner, kBoxBytes);
#pragma unroll
    for (int k = 0; k < kGemmK; k += kWgmmaK)
      wgmma<typename P::Element, kLoraPassRanks, true, kInner>(
          sums, wgmma_advance(a, true, k), wgmma_advance(b, kInner, k), box + k > 0);
  }
  wgmma_commit();
}

template <typename P>
__device__ __forceinline__ void start_up(const unsigned char* stage, bool accumulate,
                                         Sums (&sums)[kBoxes]) {
#pragma unroll
  for (Sums& of_box : sums) wgmma_pin(of_box);
  wgmma_begin();
  const uint64_t b = wgmma_factor(stage + kTileBytes, false, kBoxBytes);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const uint64_t a = wgmma_factor(stage + box * kBoxBytes, false, kBoxBytes);
#pragma unroll
    for (int k = 0; k < kGemmK; k += kWgmmaK)
      wgmma<typename P::Element, kLoraPassRanks, false, false>(
          sums[box], wgmma_advance(a, false, k), wgmma_advance(b, false, k), accumulate || k > 0);
  }
  wgmma_commit();
}

// The products for `down` of a tile run while those for `up` of the one before end, and those for
// `up` while the sums for `down` are stored.
template <typename P>
__device__ __forceinline__ void multiply(const LoraPassKernelParams& p, unsigned char* shared,
                                         typename P::Barriers* barriers) {
  auto arrive = [](Mbarrier* barrier) {
    if (threadIdx.x % kWarpSize == 0) barrier->arrive();
  };
  Mbarrier* const there = P::kDrops ? barriers->dropped : barriers->full;
  RingPosition<P::kStages> at;
  unsigned factor_parity = 0;
  for_columns(p.tiles, [&](int column, int first, int end) {
    Sums down, up[kBoxes];
    int previous = 0;
    // All products but the latest group are over, and with them those for `up` of the tile before.
    auto release_previous = [&](int tile) {
      wgmma_wait<1>();
      if (tile > first) arrive(&barriers->empty[previous]);
    };
    if constexpr (P::kDown) {
      barriers->factor_full.wait(factor_parity);
      factor_parity ^= 1;
    }
    for (int tile = first; tile < end; ++tile, at.advance()) {
      const unsigned char* const stage = shared + at.stage * P::kStageBytes;
      there[at.stage].wait(at.parity);
      if constexpr (P::kDown) {
        start_down<P>(stage, shared + P::kFactor, down);
        if constexpr (P::kUp) release_previous(tile);
      }
      if constexpr (P::kUp) start_up<P>(stage, tile > first, up);
      if constexpr (P::kDown) {
        if constexpr (P::kUp) {
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
          arrive(&barriers->empty[at.stage]);
        }
        const int64_t row = int64_t{tile} * kLoraPassRows;
        wgmma_pin(down);
        store_sums(down, p.down_parts + (column * p.rows + row) * p.pitch, p.pitch, p.rows - row);
      } else {
        release_previous(tile);
      }
      previous = at.stage;
    }
    if constexpr (P::kDown) arrive(&barriers->factor_empty);
    if constexpr (P::kUp) {
      wgmma_wait<0>();
      arrive(&barriers->empty[previous]);
      const int64_t part = LoraPassTiles::part_of(column, blockIdx.x);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        wgmma_pin(up[box]);
        store_sums(up[box], p.up_parts + (part * kLoraPassColumns + 64 * box) * p.pitch, p.pitch,
                   64);
      }
    }
  });
}

}  // namespace lora_pass

template <typename P>
__global__ void __launch_bounds__(P::kWarps* kWarpSize, 1)
    lora_pass_kernel_sm90(const __grid_constant__ LoraPassKernelParams p) {
#if defined(FUSEDCUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  auto* const shared = static_cast<unsigned char*>(dynamic_shared());
  auto* const barriers = reinterpret_cast<typename P::Barriers*>(shared + P::kBarriers);
  // (By a shuffle, so that the compiler knows it to be the same for the warp.)
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  if (threadIdx.x == 0) {
    barriers->init();
    Mbarrier::fence_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  // Of 512 threads each has 128 registers, too few for all sums of `up`.
  constexpr bool kMoves = P::kDrops && P::kUp;
  if (warp < lora_pass::kProducer) {
    if constexpr (kMoves) take_registers<208>();
    lora_pass::multiply<P>(p, shared, barriers);
    return;
  }
  if constexpr (kMoves) give_registers<96>();
  if (warp == lora_pass::kProducer) lora_pass::produce<P>(p, shared, barriers);
  if constexpr (P::kDrops) {
    const int thread = static_cast<int>(threadIdx.x) - lora_pass::kFirstDropper * kWarpSize;
    if (thread >= 0) lora_pass::drop<P>(p, shared, barriers, thread);
  }
#else
  __trap();
#endif
}

// ------------------------------------------------------------------------------------------------
// Sums of the parts
// ------------------------------------------------------------------------------------------------

constexpr int kLoraPassSumThreads = 256;

struct LoraPassSumParams {
  LoraPassTiles tiles;
  const float *down_parts, *up_parts;
  uint32_t down_count, up_count;  // of fours of ranks
  uint32_t columns;
  int pitch, rank;
  float down_scale, up_scale;
  void* down;
  void* up;
  bool transposed;  // `up` has its ranks side by side
};

// A thread has four ranks of a row of `down` or, behind those, of a column of `up`.
template <typename T, typename Gradient>
__global__ void __launch_bounds__(kLoraPassSumThreads)
    lora_pass_sum_kernel(const __grid_constant__ LoraPassSumParams p) {
  using Four = Vector<float, 4>;
  const uint32_t index = blockIdx.x * kLoraPassSumThreads + threadIdx.x;
  const bool is_down = index < p.down_count;
  const uint32_t four = is_down ? index : index - p.down_count;
  const auto at = four * uint32_t{4};
  const uint32_t row = at / p.pitch;  // or column
  const int rank = static_cast<int>(at % p.pitch);
  const float* parts = p.down_parts + at;
  uint32_t count = p.tiles.columns;
  int64_t apart = int64_t{4} * p.down_count;
  if (!is_down) {
    if (four >= p.up_count) return;
    const uint32_t column = row / kLoraPassColumns, first_tile = column * p.tiles.rows;
    const uint32_t first = p.tiles.block_of(first_tile);
    apart = int64_t{kLoraPassColumns} * p.pitch;
    parts = p.up_parts + int64_t{p.tiles.part_of(column, first)} * apart +
            (at - column * kLoraPassColumns * p.pitch);
    count = p.tiles.block_of(first_tile + p.tiles.rows - 1) - first + 1;
  }
  wait_for_previous_kernel();
  float sums[4] = {};
#pragma unroll 8
  for (uint32_t i = 0; i < count; ++i) {
    const Four part = load_vector<float, 4>(parts + i * apart);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] += part.values[j];
  }
  if (is_down) {
    Vector<T, 4> values;
#pragma unroll
    for (int j = 0; j < 4; ++j)  // where there is no rank, infinity in x gives NaN
      values.values[j] = from_compute<T>(rank + j < p.rank ? sums[j] * p.down_scale : 0.0f);
    store_vector<T, 4>(static_cast<T*>(p.down) + at, values);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (rank + j >= p.rank) break;
    const int64_t to =
        p.transposed ? int64_t{row} * p.rank + rank + j : int64_t{rank + j} * p.columns + row;
    static_cast<Gradient*>(p.up)[to] = from_compute<Gradient>(sums[j] * p.up_scale);
  }
}

// ------------------------------------------------------------------------------------------------
// Launcher
// ------------------------------------------------------------------------------------------------

namespace lora_pass {

inline cudaError_t describe(const LoraPassParams& p, LoraPassKernelParams* params) {
  const int pitch = lora_pitch(p.rank);
  cudaError_t status =
      make_tensor_map(gemm::boxed(p.x.data, p.rows, p.columns, p.x.stride, 64), &params->x);
  if (status == cudaSuccess && p.down != nullptr) {
    const int64_t rows = p.up != nullptr ? p.columns : p.rank;
    const int64_t columns = p.up != nullptr ? pitch : p.columns;
    status =
        make_tensor_map(gemm::boxed(p.factor, rows, columns, p.factor_stride, 64), &params->factor);
  }
  if (status == cudaSuccess && p.up != nullptr)
    status = make_tensor_map(gemm::boxed(p.t, p.rows, pitch, pitch, 64), &params->t);
  return status;
}

template <typename P>
cudaError_t start(const LoraPassKernelParams& params, const LoraPassConfig& config,
                  cudaStream_t stream) {
  LaunchOptions options;
  options.dependent = config.dependent_launch;
  options.shared_bytes = P::kBytes;
  return launch(lora_pass_kernel_sm90<P>, dim3(config.tiles.blocks), dim3(P::kWarps * kWarpSize),
                options, stream, params);
}

template <typename T>
cudaError_t run(const LoraPassParams& p, const LoraPassConfig& config, void* workspace,
                cudaStream_t stream) {
  const int pitch = lora_pitch(p.rank);
  LoraPassKernelParams params;
  cudaError_t status = describe(p, &params);
  if (status != cudaSuccess) return status;
  params.tiles = config.tiles;
  params.rows = p.rows;
  params.pitch = pitch;
  params.dropout = p.dropout;
  params.down_parts = static_cast<float*>(workspace);
  params.up_parts = params.down_parts + config.down_parts;
  const bool drops = p.dropout.seed != nullptr;
  if (p.down != nullptr && p.up != nullptr) {
    status = start<Pass<T, true, true, false>>(params, config, stream);
  } else if (p.down != nullptr) {
    status = drops ? start<Pass<T, true, false, true>>(params, config, stream)
                   : start<Pass<T, true, false, false>>(params, config, stream);
  } else {
    status = drops ? start<Pass<T, false, true, true>>(params, config, stream)
                   : start<Pass<T, false, true, false>>(params, config, stream);
  }
  if (status != cudaSuccess) return status;
  LoraPassSumParams sums = {config.tiles, params.down_parts, params.up_parts};
  sums.down_count = p.down != nullptr ? static_cast<uint32_t>(p.rows * pitch / 4) : 0;
  sums.up_count = p.up != nullptr ? static_cast<uint32_t>(int64_t{p.columns} * pitch / 4) : 0;
  sums.columns = p.columns;
  sums.pitch = pitch;
  sums.rank = p.rank;
  sums.down_scale = p.down_scale;
  sums.up_scale = p.up_scale;
  sums.down = p.down;
  sums.up = p.up;
  sums.transposed = p.transposed;
  const auto kernel =
      p.up_dtype == DType::kFloat32 ? lora_pass_sum_kernel<T, float> : lora_pass_sum_kernel<T, T>;
  const int64_t blocks = ceil_div(int64_t{sums.down_count} + sums.up_count, kLoraPassSumThreads);
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kLoraPassSumThreads),
                config.dependent_launch, stream, sums);
}

}  // namespace lora_pass
}  // namespace fusedcuda
