// Matrix products on Hopper: one block an SM, of which one warpgroup keeps the copy engine busy and
// two compute, on tiles of the result until none is left. What becomes of the sums is the business
// of an epilogue (gemm_epilogue.cuh).
//
// Two ways to divide the work between the computing warpgroups:
// - together: each has half of the rows of every tile. The largest tiles, so the least traffic; but
//   the tensor cores wait while both are in their epilogue.
// - in turns: each has every second tile of the block to itself, and computes while the other is in
//   its epilogue. Better where k is short.
//
// Blocks along m may form a cluster: they need the same columns of b, so each fetches a share of
// them and the copy engine delivers it to all.
//
// a may be multiplied by something element by element on the way (gemm_scale.cuh), and summed up
// over k. Or the products of a second pair of factors are added: a row of x and one of x @ A.T side
// by side, without the two being anywhere in memory together (LoRA).
//
// b may be a pair of matrices: a tile has the same columns of the products with both, so that what
// belongs together is in the sums of one thread (a gated MLP's gate and up).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cluster.cuh"
#include "gemm_loads.cuh"
#include "gemm_scale.cuh"
#include "gemm_stages.cuh"
#include "hopper_gemm.h"
#include "launch.h"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace fusedcuda {

// What a kernel is compiled for. kRows: of a tile for each computing warpgroup. kBuffers: of a
// warpgroup's epilogue, of 64 x 64 elements each.
//
// A scaled a and what scales it have stages of their own, kAStages: they are free again as soon as
// they are in registers, long before the products are over, and with those of b there would be room
// for three stages of which one is on its way.
//
// Of a pair of b, kColumns / 2 each are in a tile: sums[i] of the first belongs to
// sums[kSums / 2 + i] of the second.
template <typename T, int kRows, int kColumns, bool kInTurns, int kCluster, int kStages,
          bool kAKInner, bool kBKInner, GemmScale kScale = GemmScale::kNone, int kBuffers = 2,
          int kAStages = 0, bool kBIsPair = false>
struct HopperGemm {
  using Element = T;
  static_assert(sizeof(T) == 2);
  static_assert(kRows == 64 || kRows == 128);
  static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4);
  static_assert(!kBIsPair || kBKInner);
  using Factors = std::conditional_t<kBIsPair, PairedGemmFactors, GemmFactors>;
  static constexpr int kWarpgroupRows = kRows;
  static constexpr int kTileRows = kInTurns ? kRows : 2 * kRows;
  static constexpr int kTileColumns = kColumns;
  static constexpr bool kAIsKInner = kAKInner, kBIsKInner = kBKInner;
  static constexpr int kResultColumns = kBIsPair ? kColumns / 2 : kColumns;  // of a tile
  static constexpr bool kTakesTurns = kInTurns;
  static constexpr int kClusterBlocks = kCluster;
  static constexpr int kHalves = kRows / kWgmmaRows;  // of what a warpgroup has of a tile
  static constexpr int kSums = kColumns / 2;          // a thread's, of 64 rows
  static constexpr int kNumBuffers = kBuffers;
  static constexpr int kBuffersBytes = kBuffers * kGemmBufferBytes;

  static constexpr int kABytes = kTileRows * kSwizzleBytes;
  static constexpr int kBBytes = kTileColumns * kSwizzleBytes;
  // Columns of b, k inner, that are copied at once: a block's share, and of one matrix.
  static constexpr int kBShare = kTileColumns / kCluster;
  static constexpr int kBBoxRows = kBShare < kResultColumns ? kBShare : kResultColumns;
  static constexpr bool kIsScaled = kScale != GemmScale::kNone;
  // A box of bits has 16 bytes a row; with rows inner those are all rows of a tile.
  static_assert(!kIsScaled || kAKInner || kTileRows == 8 * kByteBoxColumns);
  static constexpr int kScaleBytes =
      kIsScaled ? (kAKInner ? kTileRows : kGemmK) * kByteBoxColumns : 0;
  static_assert(kIsScaled == (kAStages > 0));
  static constexpr int kStageBytes = (kIsScaled ? 0 : kABytes) + kBBytes;
  static constexpr int kAStageBytes = kABytes + kScaleBytes;
  static constexpr int kBOffset = kIsScaled ? 0 : kABytes;  // in a stage
  static constexpr int kNumStages = kStages, kNumAStages = kAStages;
  static constexpr int kGroupBytes = kGemmK * kSwizzleBytes;  // of 64 rows of a rows-inner factor

  // Warps that read a stage, in the whole cluster; those of a block.
  static constexpr int kReaders = (kInTurns ? 4 : 8) * kCluster, kAReaders = 8;

  // A thread's sums of one tile: of rows 64 h and on of what its warpgroup has, for each half h.
  // `of_rows`: the sums of a over k, where they are asked for (only of a scaled a); element 0 is
  // that of the thread's upper row, 2 that of its lower one.
  struct Sums {
    float values[kHalves][kSums];
    float of_rows[kHalves][4];
  };

  // The barriers of the stages, for the producer and the consumers.
  struct Stages {
    Mbarrier full[kStages];   // the bytes have arrived
    Mbarrier empty[kStages];  // all readers are through with them
    Mbarrier a_full[kIsScaled ? kAStages : 1];
    Mbarrier a_empty[kIsScaled ? kAStages : 1];
    Mbarrier turn[2];  // of a warpgroup: the other one has seen its tile arrive

    __device__ __forceinline__ void init() {
      for (int s = 0; s < kStages; ++s) {
        full[s].init(1);
        empty[s].init(kReaders);
      }
      for (int s = 0; s < kAStages; ++s) {
        a_full[s].init(1);
        a_empty[s].init(kAReaders);
      }
      for (Mbarrier& t : turn) t.init(kWarpgroup / kWarpSize);
    }
  };

  struct Position {
    RingPosition<kStages> main;
    RingPosition<kIsScaled ? kAStages : 1> a;
  };

  // --- Producer: a warp (two where a is scaled), of which one lane talks to the copy engine. (All
  // of them in the loops, since the compiler then knows that addresses are the same for the warp,
  // as the engine wants them.)

  // Both factors, or b if a is scaled. `side` makes extra_a.
  template <typename Side>
  static __device__ __forceinline__ void load(const Factors& factors,
                                              const GemmShared<HopperGemm>& shared,
                                              const GemmTiles& tiling, const Side& side) {
    Stages* const stages = shared.stages();
    const unsigned rank = kCluster == 1 ? 0 : cluster_rank();
    RingPosition<kStages> at;
    for_blocks(tiling, [&](const GemmTile& tile, int block) {
      unsigned char* const stage = shared.stage(at.stage);
      Mbarrier* const full = &stages->full[at.stage];
      const bool is_extra = !kIsScaled && block >= tiling.k_blocks;
      const int k = (is_extra ? block - tiling.k_blocks : block) * kGemmK;
      if (is_extra) side.wait_for_rows(first_row(tile, rank));
      stages->empty[at.stage].wait(at.parity ^ 1);
      at.advance();
      if (!is_elected_lane()) return;
      full->arrive_and_expect(kStageBytes);
      if constexpr (!kIsScaled)
        gemm::load_a<HopperGemm>(is_extra ? factors.extra_a : factors.a, stage, full,
                                 first_row(tile, rank), k);
      const int column = tile.column * kResultColumns;
      if constexpr (kBIsPair) {
        gemm::load_pair<HopperGemm>(factors, stage + kBOffset, full, column, k, rank);
      } else {
        gemm::load_b<HopperGemm>(is_extra ? factors.extra_b : factors.b, stage + kBOffset, full,
                                 column, k, rank);
      }
    });
  }

  static __device__ __forceinline__ void load_scaled_a(const Factors& factors,
                                                       const GemmShared<HopperGemm>& shared,
                                                       const GemmTiles& tiling) {
    Stages* const stages = shared.stages();
    const unsigned rank = kCluster == 1 ? 0 : cluster_rank();
    RingPosition<kIsScaled ? kAStages : 1> at;
    for_blocks(tiling, [&](const GemmTile& tile, int block) {
      unsigned char* const stage = shared.a_stage(at.stage);
      Mbarrier* const full = &stages->a_full[at.stage];
      const int row = first_row(tile, rank), k = block * kGemmK;
      stages->a_empty[at.stage].wait(at.parity ^ 1);
      at.advance();
      if (!is_elected_lane()) return;
      full->arrive_and_expect(kAStageBytes);
      gemm::load_a<HopperGemm>(factors.a, stage, full, row, k);
      // (The copy engine takes boxes that begin at a multiple of 16 bytes.)
      load_box(&factors.scale, stage + kABytes, full, kAKInner ? row : k,
               (kAKInner ? k : row) / 8 / kByteBoxColumns * kByteBoxColumns);
    });
  }

  // --- Consumers: a warpgroup

  // The sums of the warpgroup's `tile`-th tile (0, 1, ...), over the blocks [first_block, end) of
  // k. kSumsRows: also the sums of a's rows.
  template <bool kSumsRows>
  static __device__ __forceinline__ void multiply(const GemmShared<HopperGemm>& shared, int tile,
                                                  int first_block, int end, int warpgroup,
                                                  Position* at, Sums* sums) {
    Stages* const stages = shared.stages();
    // Which round of a stage is over can only be told from the round before: a warpgroup that skips
    // tiles has to know that the other one has seen all of its tile arrive.
    if constexpr (kInTurns) stages->turn[warpgroup].wait((tile & 1) ^ (warpgroup == 0 ? 1 : 0));
    if constexpr (kScale == GemmScale::kNone) {
      multiply_direct(shared, end - first_block, warpgroup, &at->main, sums);
    } else {
      static_assert(!kInTurns);
      multiply_scaled<kSumsRows>(shared, first_block, end, warpgroup, at, sums);
    }
    pin<kSumsRows>(sums);
  }

  // --- Tiles: clusters take them in turns

  static __device__ __forceinline__ int first_row(const GemmTile& tile, unsigned rank) {
    return (tile.row * kCluster + static_cast<int>(rank)) * kTileRows;
  }

  // f(tile, block) for the blocks of k of all tiles of this block.
  template <typename F>
  static __device__ __forceinline__ void for_blocks(const GemmTiles& tiling, F f) {
    for (int index = first_tile(); index < tiling.count; index += tile_step()) {
      const GemmTile tile = tiling.at(index);
      const int end = tiling.end_block(tile.split);
      for (int block = tiling.first_block(tile.split); block < end; ++block) f(tile, block);
    }
  }

  static __device__ __forceinline__ int first_tile() {
    return static_cast<int>(blockIdx.x) / kCluster;
  }
  static __device__ __forceinline__ int tile_step() {
    return static_cast<int>(gridDim.x) / kCluster;
  }

 private:
  static __device__ __forceinline__ void release(Stages* stages, int stage) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    if (lane < kCluster) stages->empty[stage].arrive_at(lane);
  }

  static __device__ __forceinline__ void multiply_direct(const GemmShared<HopperGemm>& shared,
                                                         int k_blocks, int warpgroup,
                                                         RingPosition<kStages>* at, Sums* sums) {
    Stages* const stages = shared.stages();
    const int first_row = kInTurns ? 0 : warpgroup * kRows;
    int previous = 0;
    for (int block = 0; block < k_blocks; ++block, at->advance()) {
      stages->full[at->stage].wait(at->parity);
      start_products(shared.stage(at->stage), first_row, block > 0, sums);
      if (block > 0) {
        wgmma_wait<1>();  // for all but those
        release(stages, previous);
      }
      previous = at->stage;
    }
    if (kInTurns && threadIdx.x % kWarpSize == 0) stages->turn[warpgroup ^ 1].arrive();
    wgmma_wait<0>();
    release(stages, previous);
  }

  // While the products of a block run, the fragments of the next are prepared and its products
  // started.
  template <bool kSumsRows>
  static __device__ __forceinline__ void multiply_scaled(const GemmShared<HopperGemm>& shared,
                                                         int first_block, int end, int warpgroup,
                                                         Position* at, Sums* sums) {
    Stages* const stages = shared.stages();
    const int first_row = warpgroup * kRows;
    int previous_stage = 0;
    auto step = [&](int block, GemmFragments(&own)[kHalves], GemmFragments(&previous)[kHalves]) {
      stages->a_full[at->a.stage].wait(at->a.parity);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        load_scaled(shared.a_stage(at->a.stage), first_row + h * kWgmmaRows, block, &own[h]);
      }
      stages->full[at->main.stage].wait(at->main.parity);
      start_products<kSumsRows>(shared.stage(at->main.stage), own, shared.ones(),
                                block > first_block, sums);
      // Only now: a product that is issued has its registers, so what was read has arrived. Before,
      // the loads may still be under way, and the copy engine would overwrite what they read.
      __syncwarp();
      if (threadIdx.x % kWarpSize == 0) stages->a_empty[at->a.stage].arrive();
      at->a.advance();
      if (block > first_block) {
        wgmma_wait<1>();  // for all but those
#pragma unroll
        for (GemmFragments& fragments : previous) fragments.keep();
        release(stages, previous_stage);
      }
      previous_stage = at->main.stage;
      at->main.advance();
    };
    GemmFragments even[kHalves], odd[kHalves];
    for (int block = first_block; block < end; block += 2) {
      step(block, even, odd);
      if (block + 1 < end) step(block + 1, odd, even);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      even[h].keep();
      odd[h].keep();
    }
    release(stages, previous_stage);
  }

  template <bool kSumsRows>
  static __device__ __forceinline__ void pin(Sums* sums) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      wgmma_pin(sums->values[h]);
      if constexpr (kSumsRows) wgmma_pin(sums->of_rows[h]);
    }
  }

  // Both factors from shared memory.
  static __device__ __forceinline__ void start_products(const unsigned char* stage, int first_row,
                                                        bool accumulate, Sums* sums) {
    pin<false>(sums);
    wgmma_begin();
    const uint64_t factor_b = wgmma_factor(stage + kBOffset, kBKInner, kGroupBytes);
#pragma unroll
    for (int k = 0; k < kGemmK; k += kWgmmaK) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        // 64 rows are 64 * 128 bytes either way.
        const unsigned char* const rows = stage + (first_row + h * kWgmmaRows) * kSwizzleBytes;
        const uint64_t factor_a = wgmma_factor(rows, kAKInner, kGroupBytes);
        wgmma<T, kColumns, kAKInner, kBKInner>(
            sums->values[h], wgmma_advance(factor_a, kAKInner, k),
            wgmma_advance(factor_b, kBKInner, k), accumulate || k > 0);
      }
    }
    wgmma_commit();
  }

  // a from registers. Its sums are products with ones.
  template <bool kSumsRows>
  static __device__ __forceinline__ void start_products(const unsigned char* stage,
                                                        const GemmFragments (&fragments)[kHalves],
                                                        const unsigned char* ones, bool accumulate,
                                                        Sums* sums) {
    pin<kSumsRows>(sums);
    wgmma_begin();
    const uint64_t factor_b = wgmma_factor(stage + kBOffset, kBKInner, kGroupBytes);
    const uint64_t factor_ones = wgmma_factor(ones, true, kGroupBytes);
#pragma unroll
    for (int step = 0; step < kGemmK / kWgmmaK; ++step) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        wgmma<T, kColumns, kBKInner>(sums->values[h], fragments[h].words[step],
                                     wgmma_advance(factor_b, kBKInner, step * kWgmmaK),
                                     accumulate || step > 0);
        if constexpr (kSumsRows) {
          wgmma<T, kOnesColumns, true>(sums->of_rows[h], fragments[h].words[step], factor_ones,
                                       accumulate || step > 0);
        }
      }
    }
    wgmma_commit();
  }

  static __device__ __forceinline__ void load_scaled(const unsigned char* stage, int first_row,
                                                     int block, GemmFragments* fragments) {
    load_fragments<kAKInner>(stage, first_row, fragments);
    mask_fragments<kAKInner>(stage + kABytes, first_row, block, fragments);
  }
};

}  // namespace fusedcuda
