// What one pass over a matrix of many rows gives, on Hopper:
//
//   down: scale * dropout(x) @ factor    [rows, ranks]      t; or of dz its gradient
//   up:   dropout(x).T @ t               [columns, ranks]   the gradient of a factor
//
// or both of the same x: the backward of an adapter needs both of dz. x is cut into tiles of 64 x
// 256, of which a block takes some in a line: below each other for `up`, whose sums stay in its
// registers until it gets to other columns, and side by side for `down`. For both it goes down, and
// leaves a part of `down` for each 64 rows of its line. A second kernel adds the parts up, in a
// fixed order.
//
// Tiles lie in shared memory as the copy engine leaves them, and the tensor cores read them there
// with either side outermost (wgmma.cuh), so nothing is copied or transposed on the way. There are
// 16 or 64 ranks in any case; sums of those that do not exist are not stored. Dropout is the work
// of further warps, between the arrival of a tile and its products.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/convert.cuh"
#include "common/gemm_stages.cuh"
#include "common/mbarrier.cuh"
#include "common/philox.cuh"
#include "common/shared.cuh"
#include "common/tensor_map.h"
#include "common/tma.cuh"
#include "common/vec.cuh"
#include "common/wgmma.cuh"
#include "lora.h"
#include "lora_pass_config.h"

namespace fusedcuda {

struct LoraPassKernelParams {
  TensorMap x, factor, t;
  LoraPassLines lines;
  int64_t rows;
  int pitch;        // of t and of all parts
  int stage_bytes;  // that a tile and what comes with it bring
  LoraDropout dropout;
  float* down_parts;  // like up_parts; of both [lines, rows, pitch]
  float* up_parts;    // [lines.parts(), width of a line, pitch]
};

namespace lora_pass {

constexpr int kBoxBytes = 64 * kSwizzleBytes;  // of 64 x 64 elements
constexpr int kBoxes = kLoraPassColumns / 64;  // of a tile
constexpr int kTileBytes = kBoxes * kBoxBytes;
// Warps: four for the products, the producer, and behind its warpgroup those that drop.
constexpr int kProducer = 4, kFirstDropper = 8, kDroppers = 8;

template <typename T, int kMostRanks, bool kMakesDown, bool kMakesUp, bool kHasDropout>
struct Pass {
  using Element = T;
  static constexpr int kRanks = kMostRanks;
  static constexpr bool kDown = kMakesDown, kUp = kMakesUp, kDrops = kHasDropout;
  static constexpr bool kBoth = kDown && kUp;
  static constexpr int kTiles = lora_pass_tiles_of_line(kDown, kUp, kRanks);  // side by side
  static constexpr int kWarps = kDrops ? kFirstDropper + kDroppers : kProducer + 1;
  using Sums = float[kRanks / 2];  // a thread's, of 64 rows of a tile or 64 columns

  // lora_a lies as x does, and comes with its tiles; of lora_b, whose ranks are side by side, a
  // line has what it needs all the time. t lies as lora_b.
  static constexpr bool kFactorIsKInner = !kUp;
  static constexpr int kFactorBoxBytes = (kFactorIsKInner ? kRanks : 64) * kSwizzleBytes;
  static constexpr int kStageBytes = kTileBytes + (kUp ? kBoxBytes : kBoxes * kFactorBoxBytes);
  static constexpr int kStages = kStageBytes > (48 << 10) ? 3 : 4;

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

  static constexpr int kFactor = kStages * kStageBytes;  // of a line
  static constexpr int kBarriers = kFactor + (kBoth ? kTiles * kTileBytes : 0);
  static constexpr int kBytes = kBarriers + static_cast<int>(sizeof(Barriers));
  static_assert(kBytes <= kGemmSharedBytes);
};

// f(line, first, end): the lines of which this block has tiles, and which ones.
template <typename F>
__device__ __forceinline__ void for_lines(const LoraPassLines& lines, F f) {
  const uint32_t end = lines.first_of(blockIdx.x + 1);
  for (uint32_t i = lines.first_of(blockIdx.x); i < end;) {
    const uint32_t line = i / lines.length, first = i % lines.length;
    const uint32_t count = min(lines.length - first, end - i);
    f(static_cast<int>(line), static_cast<int>(first), static_cast<int>(first + count));
    i += count;
  }
}

// f(row, column) of the first elements of a block's tiles of a line, in their order.
template <typename P, typename F>
__device__ __forceinline__ void for_tiles(int line, int first, int end, F f) {
  for (int i = first; i < end; ++i) {
#pragma unroll
    for (int tile = 0; tile < P::kTiles; ++tile) {
      f((P::kUp ? i : line) * kLoraPassRows,
        (P::kUp ? line * P::kTiles + tile : i) * kLoraPassColumns);
    }
  }
}

// By a warp, of which one lane talks to the copy engine.
template <typename P>
__device__ __forceinline__ void produce(const LoraPassKernelParams& p, unsigned char* shared,
                                        typename P::Barriers* barriers) {
  RingPosition<P::kStages> at;
  unsigned factor_parity = 1;
  for_lines(p.lines, [&](int line, int first, int end) {
    if constexpr (P::kBoth) {
      barriers->factor_empty.wait(factor_parity);
      factor_parity ^= 1;
      if (is_elected_lane()) {
        Mbarrier* const full = &barriers->factor_full;
        full->arrive_and_expect(P::kTiles * kTileBytes);
#pragma unroll
        for (int box = 0; box < P::kTiles * kBoxes; ++box)
          load_box(&p.factor, shared + P::kFactor + box * kBoxBytes, full,
                   line * P::kTiles * kLoraPassColumns + 64 * box, 0);
      }
      __syncwarp();
    }
    for_tiles<P>(line, first, end, [&](int row, int column) {
      unsigned char* const stage = shared + at.stage * P::kStageBytes;
      Mbarrier* const full = &barriers->full[at.stage];
      barriers->empty[at.stage].wait(at.parity ^ 1);
      at.advance();
      if (!is_elected_lane()) return;
      full->arrive_and_expect(p.stage_bytes);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        load_box(&p.x, stage + box * kBoxBytes, full, row, column + 64 * box);
        if constexpr (!P::kUp)
          load_box(&p.factor, stage + kTileBytes + box * P::kFactorBoxBytes, full, 0,
                   column + 64 * box);
      }
      if constexpr (P::kUp) load_box(&p.t, stage + kTileBytes, full, row, 0);
    });
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
  for_lines(p.lines, [&](int line, int first, int end) {
    for_tiles<P>(line, first, end, [&](int row, int column) {
      unsigned char* const values = shared + at.stage * P::kStageBytes + own;
      barriers->full[at.stage].wait(at.parity);
#pragma unroll
      for (int i = 0; i < kLoraPassRows; i += kRowsApart) {
        const uint4 kept = mask.of_eight(row + first_row + i, column + 8 * piece);
        auto* const eight = reinterpret_cast<uint4*>(values + i * kSwizzleBytes);
        *eight = {eight->x & kept.x, eight->y & kept.y, eight->z & kept.z, eight->w & kept.w};
      }
      fence_shared_for_copies();  // the tensor cores read as the copy engine does
      __syncwarp();
      if (thread % kWarpSize == 0) barriers->dropped[at.stage].arrive();
      at.advance();
    });
  });
}

// To `part`, whose rows are `pitch` apart; `rows` of them exist.
template <int kSums>
__device__ __forceinline__ void store_sums(const float (&sums)[kSums], float* part, int pitch,
                                           int64_t rows) {
  const int row = wgmma_row_of_thread(), rank = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= rows) continue;
    float* const of_row = part + (row + 8 * half) * pitch + rank;
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      if (8 * j >= pitch) break;
      const Vector<float, 2> pair = {{sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]}};
      store_vector<float, 2>(of_row + 8 * j, pair);
    }
  }
}

// sums (+)= tile @ factor
template <typename P>
__device__ __forceinline__ void start_down(const unsigned char* tile, const unsigned char* factor,
                                           bool accumulate, typename P::Sums& sums) {
  constexpr bool kInner = P::kFactorIsKInner;
  wgmma_pin(sums);
  wgmma_begin();
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const uint64_t a = wgmma_factor(tile + box * kBoxBytes, true, kBoxBytes);
    const uint64_t b = wgmma_factor(factor + box * P::kFactorBoxBytes, kInner, kBoxBytes);
#pragma unroll
    for (int k = 0; k < kGemmK; k += kWgmmaK)
      wgmma<typename P::Element, P::kRanks, true, kInner>(
          sums, wgmma_advance(a, true, k), wgmma_advance(b, kInner, k), accumulate || box + k > 0);
  }
  wgmma_commit();
}

// sums (+)= tile.T @ t
template <typename P>
__device__ __forceinline__ void start_up(const unsigned char* tile, const unsigned char* t,
                                         bool accumulate, typename P::Sums (&sums)[kBoxes]) {
#pragma unroll
  for (auto& of_box : sums) wgmma_pin(of_box);
  wgmma_begin();
  const uint64_t b = wgmma_factor(t, false, kBoxBytes);
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const uint64_t a = wgmma_factor(tile + box * kBoxBytes, false, kBoxBytes);
#pragma unroll
    for (int k = 0; k < kGemmK; k += kWgmmaK)
      wgmma<typename P::Element, P::kRanks, false, false>(
          sums[box], wgmma_advance(a, false, k), wgmma_advance(b, false, k), accumulate || k > 0);
  }
  wgmma_commit();
}

// Of both, the products for `down` of a tile run while those for `up` of the one before end, and
// those for `up` while the sums for `down` are stored.
template <typename P>
__device__ __forceinline__ void multiply(const LoraPassKernelParams& p, unsigned char* shared,
                                         typename P::Barriers* barriers) {
  auto arrive = [](Mbarrier* barrier) {
    if (threadIdx.x % kWarpSize == 0) barrier->arrive();
  };
  Mbarrier* const there = P::kDrops ? barriers->dropped : barriers->full;
  RingPosition<P::kStages> at;
  unsigned factor_parity = 0;
  for_lines(p.lines, [&](int line, int first, int end) {
    typename P::Sums down, up[P::kTiles][kBoxes];
    int previous = 0;
    if constexpr (P::kBoth) {
      barriers->factor_full.wait(factor_parity);
      factor_parity ^= 1;
    }
    for (int i = first; i < end; ++i) {
#pragma unroll
      for (int tile = 0; tile < P::kTiles; ++tile) {
        const unsigned char* const stage = shared + at.stage * P::kStageBytes;
        const unsigned char* const beside = stage + kTileBytes;  // of the other factor
        there[at.stage].wait(at.parity);
        if constexpr (P::kBoth) {
          start_down<P>(stage, shared + P::kFactor + tile * kTileBytes, tile > 0, down);
        } else if constexpr (P::kDown) {
          start_down<P>(stage, beside, i > first, down);
        } else {
          start_up<P>(stage, beside, i > first, up[tile]);
        }
        wgmma_wait<1>();  // for all but those
        if (tile > 0 || i > first) arrive(&barriers->empty[previous]);
        if constexpr (P::kBoth) start_up<P>(stage, beside, i > first, up[tile]);
        previous = at.stage;
        at.advance();
      }
      if constexpr (P::kBoth) {
        wgmma_wait<1>();
        wgmma_pin(down);
        const int64_t row = int64_t{i} * kLoraPassRows;
        store_sums(down, p.down_parts + (line * p.rows + row) * p.pitch, p.pitch, p.rows - row);
      }
    }
    wgmma_wait<0>();
    arrive(&barriers->empty[previous]);
    if constexpr (P::kBoth) arrive(&barriers->factor_empty);
    const int64_t part = LoraPassLines::part_of(line, blockIdx.x);
    if constexpr (!P::kUp) {
      wgmma_pin(down);
      store_sums(down, p.down_parts + part * kLoraPassRows * p.pitch, p.pitch, kLoraPassRows);
    } else {
#pragma unroll
      for (int box = 0; box < P::kTiles * kBoxes; ++box) {
        auto& sums = up[box / kBoxes][box % kBoxes];
        wgmma_pin(sums);
        const int64_t column = part * P::kTiles * kLoraPassColumns + 64 * box;
        store_sums(sums, p.up_parts + column * p.pitch, p.pitch, 64);
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
  // Of 512 threads each has 128 registers, too few for the sums of `up` of 64 ranks.
  constexpr bool kMovesRegisters = P::kDrops && P::kUp && P::kRanks == kLoraPassMostRanks;
  if (warp < lora_pass::kProducer) {
    if constexpr (kMovesRegisters) take_registers<208>();
    lora_pass::multiply<P>(p, shared, barriers);
    return;
  }
  if constexpr (kMovesRegisters) give_registers<96>();
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

// Lanes of a warp that share a value: with few columns there are few values of many parts.
constexpr int kLoraPassSumThreads = 256, kLoraPassSumWays = 4;
constexpr int kLoraPassSumValues = kLoraPassSumThreads / kLoraPassSumWays;  // of a block

struct LoraPassSumParams {
  LoraPassLines lines;
  int width;  // of a line
  const float *down_parts, *up_parts;
  uint32_t down_count, up_count;  // of fours of ranks
  uint32_t columns;
  int pitch, rank;
  float down_scale, up_scale;
  void* down;
  void* up;
  bool transposed;  // `up` has its ranks side by side
};

// A thread has some parts of four ranks of a row of `down` or, behind those, of a column of `up`.
template <typename T, typename Gradient>
__global__ void __launch_bounds__(kLoraPassSumThreads)
    lora_pass_sum_kernel(const __grid_constant__ LoraPassSumParams p) {
  constexpr uint32_t kValues = kWarpSize / kLoraPassSumWays;  // of a warp
  const uint32_t lane = threadIdx.x % kWarpSize, way = lane / kValues;
  const uint32_t index =
      blockIdx.x * kLoraPassSumValues + threadIdx.x / kWarpSize * kValues + lane % kValues;
  const bool is_down = index < p.down_count;
  const uint32_t four = is_down ? index : index - p.down_count;
  const bool exists = is_down || four < p.up_count;
  const uint32_t at = four * 4;
  const uint32_t row = at / p.pitch;  // or column
  const int rank = static_cast<int>(at % p.pitch);
  const float* parts = nullptr;
  uint32_t count = 0;
  int64_t apart = 0;
  if (is_down && p.up_count > 0) {
    parts = p.down_parts + at;
    count = p.lines.count;
    apart = int64_t{4} * p.down_count;
  } else if (exists) {
    const uint32_t line = row / p.width, first_tile = line * p.lines.length;
    const uint32_t first = p.lines.block_of(first_tile);
    apart = int64_t{p.width} * p.pitch;
    parts = (is_down ? p.down_parts : p.up_parts) + at +
            (int64_t{p.lines.part_of(line, first)} - line) * apart;
    count = p.lines.block_of(first_tile + p.lines.length - 1) - first + 1;
  }
  wait_for_previous_kernel();
  float sums[4] = {};
  constexpr int kUnroll = 4;
  for (uint32_t i = way; i < count; i += kUnroll * kLoraPassSumWays) {
    Vector<float, 4> some[kUnroll] = {};  // all loads at once, where they exist
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t part = i + u * kLoraPassSumWays;
      if (part < count) some[u] = load_vector<float, 4>(parts + part * apart);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] += some[u].values[j];
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int apart_in_warp = kValues; apart_in_warp < kWarpSize; apart_in_warp *= 2)
      sums[j] += __shfl_xor_sync(0xffffffff, sums[j], apart_in_warp);
  }
  if (way > 0 || !exists) return;
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

}  // namespace fusedcuda
