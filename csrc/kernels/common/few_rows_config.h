// How the blocks of few_rows.cuh divide a product of few rows. Pure host functions without CUDA
// calls.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dtype.h"
#include "gemm_config.h"
#include "iteration.h"
#include "launch.h"

namespace fusedcuda {

constexpr int kFewRowsMost = 64;  // rows of x
constexpr int kFewRowsWarps = 8;  // of a block
constexpr int kFewRowsThreads = kFewRowsWarps * kWarpSize;
constexpr int kFewRowsTile = 16;  // rows of weights that a warp has at a time
// Values of k that a warp has of every row in one step: 16 bytes a lane, for two products of 16.
constexpr int kFewRowsStepK = 32;

// Blocks on an SM, and steps whose weights a warp asks for before it multiplies the first: 4 KB, or
// 8 where it has the registers of two. So 64 KB are under way on an SM, where the memory needs 32
// (4.25 TB/s for a microsecond).
constexpr int few_rows_blocks_of_sm(int row_tiles) { return row_tiles < 4 ? 2 : 1; }
constexpr int few_rows_steps_ahead(int row_tiles) { return row_tiles < 4 ? 4 : 8; }

struct FewRowsProblem {
  int64_t rows = 0;   // of x: 1 to kFewRowsMost
  int64_t tiles = 0;  // of 16 rows of weights
  int64_t k = 0;
  int common_tiles = 0;       // of 16 rows more, whose products every cluster wants
  int bytes_of_own_tile = 0;  // of shared memory for what else goes into a tile's result
};

// As plans print it. A cluster of blocks has `tiles` of 16 rows of weights, and each of its blocks
// a part of their columns: `steps` of 32. In a block the warps take tiles in turn, `k_groups` of
// them a part of the steps each. (Numbers that the kernel divides by are powers of two: all weights
// wait for what comes before the first of them.)
struct FewRowsConfig {
  int row_tiles = 0;     // of 16 rows of x
  int cluster_log2 = 0;  // of the blocks of a cluster
  int clusters = 0;
  int tiles = 0;
  int own_tiles = 0;       // of them, those whose parts one block adds up; at a time
  int tiles_of_group = 0;  // of all blocks
  int k_groups_log2 = 0;
  int parts = 0;  // of one sum
  int steps = 0;
  int steps_of_warp = 0;  // the most
  int common_tiles = 0;
  int steps_of_warp_of_common = 0;  // likewise: all warps have a part
  // In shared memory, in bytes: what else goes into the results; parts of the common sums, of the
  // warps and of the blocks; parts of the sums; the mailbox. At the beginning is the block's part
  // of x.
  int own_offset = 0, common_of_warps_offset = 0, common_of_blocks_offset = 0;
  int sums_offset = 0, mailbox_offset = 0;
  size_t shared_bytes = 0;
  bool dependent_launch = false;

  int cluster() const { return 1 << cluster_log2; }
  int k_groups() const { return 1 << k_groups_log2; }
  int blocks() const { return clusters * cluster(); }
};

namespace few_rows {

// A block's own share of shared memory that the GPU takes for itself.
constexpr size_t kReservedBytes = 1 << 10;
// Of a warp, 16 x 16 sums; and as much of x in a step, 16 x 32 elements.
constexpr int kTileBytes = 1 << 10;

inline void lay_out(int bytes_of_own_tile, FewRowsConfig* c) {
  c->tiles_of_group = c->own_tiles * c->cluster();
  c->parts = c->cluster() * c->k_groups();
  const int of_tile = c->row_tiles * kTileBytes;
  int end = c->steps * of_tile;
  auto take = [&](int bytes) {
    const int offset = end;
    end += bytes;
    return offset;
  };
  c->own_offset = take(c->own_tiles * bytes_of_own_tile);
  c->common_of_warps_offset = take(kFewRowsWarps * c->common_tiles * of_tile);
  c->common_of_blocks_offset = take(c->cluster() * c->common_tiles * of_tile);
  c->sums_offset = take(c->own_tiles * c->parts * of_tile);
  c->mailbox_offset = take(16);
  c->shared_bytes = static_cast<size_t>(end);
}

// Clusters that run at the same time with so many blocks on an SM.
inline int resident(const DeviceTraits& device, int cluster_log2, int blocks_of_sm) {
  return std::max(std::min(device.resident_clusters[blocks_of_sm - 1][cluster_log2],
                           (blocks_of_sm * device.num_sms) >> cluster_log2),
                  1);
}

inline void set_k_groups(int log2, FewRowsConfig* c) {
  c->k_groups_log2 = log2;
  c->steps_of_warp = static_cast<int>(ceil_div(c->steps, int64_t{1} << log2));
}

// Divides all tiles among the clusters, and k among the warps of a block: so that the warp with the
// most steps has as few as possible, counted in pieces that are asked for together; an eighth
// fewer, or it is not worth twice as many parts of sums.
inline void divide(int64_t all, int clusters, FewRowsConfig* c) {
  c->tiles = static_cast<int>(ceil_div(all, clusters));
  c->clusters = static_cast<int>(ceil_div(all, c->tiles));
  int64_t fewest = 0;
  int best = 0;
  for (int log2 = 0; kFewRowsWarps >> log2 > 0; ++log2) {
    set_k_groups(log2, c);
    const int64_t rounds = ceil_div(c->tiles, kFewRowsWarps >> log2);
    const int64_t pieces = rounds * ceil_div(c->steps_of_warp, few_rows_steps_ahead(c->row_tiles));
    if (log2 > 0 && 8 * pieces > 7 * fewest) continue;
    fewest = pieces;
    best = log2;
  }
  set_k_groups(best, c);
}

// As many tiles at a time as `limit` bytes of shared memory hold. Where that are not all, each
// group of tiles waits for its sums: then rather with fewer parts of them. False: not even one.
inline bool fit(size_t limit, int bytes_of_own_tile, FewRowsConfig* c) {
  constexpr int kMostOwnTiles = kFewRowsThreads / kFewRowsTile;  // a thread for each row
  const int wanted = static_cast<int>(ceil_div(c->tiles, c->cluster()));
  for (;;) {
    for (c->own_tiles = std::min(wanted, kMostOwnTiles); c->own_tiles > 0; --c->own_tiles) {
      lay_out(bytes_of_own_tile, c);
      if (c->shared_bytes <= limit) break;
    }
    if (c->own_tiles == wanted || c->k_groups_log2 == 0) return c->own_tiles > 0;
    set_k_groups(c->k_groups_log2 - 1, c);
  }
}

// With clusters of 2^cluster_log2 blocks. No own_tiles: there is not enough shared memory.
inline FewRowsConfig choose(const FewRowsProblem& p, int cluster_log2, const DeviceTraits& device) {
  FewRowsConfig c;
  c.row_tiles = static_cast<int>(next_power_of_two(ceil_div(p.rows, 16)));
  c.common_tiles = p.common_tiles;
  c.cluster_log2 = cluster_log2;
  c.steps = static_cast<int>(ceil_div(ceil_div(p.k, kFewRowsStepK), c.cluster()));
  c.steps_of_warp_of_common = static_cast<int>(ceil_div(c.steps, kFewRowsWarps));
  c.dependent_launch = device.dependent_launch;
  for (int blocks = few_rows_blocks_of_sm(c.row_tiles); blocks >= 1; --blocks) {
    divide(p.tiles, resident(device, cluster_log2, blocks), &c);
    const size_t limit =
        std::min(device.shared_bytes_of_block, device.shared_bytes_of_sm / blocks - kReservedBytes);
    if (fit(limit, p.bytes_of_own_tile, &c)) return c;
  }
  return c;
}

// Blocks that share a part of the weights' rows: the more, the less of x, and of common rows, each
// of them reads, but each wants a few kilobytes of every row.
inline int cluster_log2_for(int64_t k) {
  constexpr int64_t kFewestColumns = 16 * kFewRowsStepK;
  constexpr int kMost = 3;  // 8 blocks: all GPUs with clusters have those
  int log2 = 0;
  while (log2 < kMost && k >= kFewestColumns << (log2 + 1)) ++log2;
  return log2;
}

inline FewRowsConfig choose(const FewRowsProblem& p, const DeviceTraits& device) {
  return choose(p, cluster_log2_for(p.k), device);
}

// Whether there is a kernel for it; its rows are read in pieces of 16 bytes.
inline bool can_run(const FewRowsProblem& p, DType dtype, const DeviceTraits& device) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return device.clusters && size_of(dtype) == 2 && p.rows >= 1 && p.rows <= kFewRowsMost &&
         p.tiles >= 1 && p.tiles < kMost / kFewRowsTile && p.k >= 8 && p.k < kMost &&
         p.k % 8 == 0 && choose(p, device).own_tiles > 0;
}

// A linear layer (linear_few.cuh): a tile needs its bias.
inline FewRowsProblem linear_problem(int64_t rows, int64_t n, int64_t k) {
  return {rows, ceil_div(n, kFewRowsTile), k, 0, kFewRowsTile * static_cast<int>(sizeof(float))};
}

}  // namespace few_rows
}  // namespace fusedcuda
