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

constexpr int kFewRowsMost = 32;   // rows of x
constexpr int kFewRowsWarps = 16;  // of a block, of which an SM has one
constexpr int kFewRowsThreads = kFewRowsWarps * kWarpSize;
constexpr int kFewRowsTile = 16;  // rows of weights that a warp has at a time
// Values of k that a warp has of every row in one step: 16 bytes a lane, for two products of 16.
constexpr int kFewRowsStepK = 32;
// Steps whose weights a warp asks for before it multiplies the first: 4 KB. So 64 KB are under way
// on an SM, where the memory needs 32 (4.25 TB/s for a microsecond).
constexpr int kFewRowsAhead = 4;
constexpr int kFewRowsMostClusterLog2 = 3;  // 8 blocks: all GPUs with clusters have those

struct FewRowsProblem {
  int64_t rows = 0;   // of x: 1 to kFewRowsMost
  int64_t tiles = 0;  // of 16 rows of weights
  int64_t k = 0;
  int common_tiles = 0;       // of 16 rows more, whose products every cluster wants
  int bytes_of_own_tile = 0;  // of shared memory for what else goes into a tile's result
};

// As plans print it. A cluster of blocks has `tiles` of 16 rows of weights, and each of its blocks
// a part of their columns: `steps` of 32.
struct FewRowsConfig {
  int row_tiles = 0;     // of 16 rows of x
  int cluster_log2 = 0;  // of the blocks of a cluster
  int clusters = 0;
  int tiles = 0;
  int own_tiles = 0;       // of them, those whose parts one block adds up; at a time
  int tiles_of_group = 0;  // of all blocks
  int steps = 0;
  int common_tiles = 0;
  // In shared memory, in bytes: what else goes into the results; sums of the common rows; parts of
  // the sums, of the warps. At the beginning is the block's part of x.
  int own_offset = 0, common_offset = 0, sums_offset = 0;
  size_t shared_bytes = 0;
  bool dependent_launch = false;

  int cluster() const { return 1 << cluster_log2; }
  int blocks() const { return clusters * cluster(); }
};

namespace few_rows {

// A block's own share of shared memory that the GPU takes for itself.
constexpr size_t kReservedBytes = 1 << 10;
// What is not shared memory of an SM is L1, where weights arrive: those that are under way have to
// fit. (With 28 KB of L1 instead of 60 the product takes twice as long.)
constexpr size_t kL1Bytes = 32 << 10;
// Of a warp, 16 x 16 sums; and as much of x in a step, 16 x 32 elements.
constexpr int kTileBytes = 1 << 10;

inline void lay_out(int bytes_of_own_tile, FewRowsConfig* c) {
  c->tiles_of_group = c->own_tiles * c->cluster();
  const int of_tile = c->row_tiles * kTileBytes;
  int end = c->steps * of_tile;
  auto take = [&](int bytes) {
    const int offset = end;
    end += bytes;
    return offset;
  };
  c->own_offset = take(c->own_tiles * bytes_of_own_tile);
  c->common_offset = take(c->common_tiles * of_tile);
  // A warp has the rest of a tile, others, and the beginning of one more.
  const int tiles = std::min(c->tiles_of_group, c->tiles) + c->common_tiles;
  c->sums_offset = take((tiles + kFewRowsWarps - 1) * of_tile);
  c->shared_bytes = static_cast<size_t>(end);
}

// Clusters that run at the same time.
inline int resident(const DeviceTraits& device, int cluster_log2) {
  return std::max(
      std::min(device.resident_clusters[0][cluster_log2], device.num_sms >> cluster_log2), 1);
}

// With clusters of 2^cluster_log2 blocks. No own_tiles: there is not enough shared memory.
inline FewRowsConfig choose(const FewRowsProblem& p, int cluster_log2, const DeviceTraits& device) {
  FewRowsConfig c;
  c.row_tiles = static_cast<int>(next_power_of_two(ceil_div(p.rows, 16)));
  c.common_tiles = p.common_tiles;
  c.cluster_log2 = cluster_log2;
  constexpr int64_t kPiece = kFewRowsStepK * kFewRowsAhead;
  c.steps = static_cast<int>(ceil_div(p.k, kPiece * c.cluster())) * kFewRowsAhead;
  c.dependent_launch = device.dependent_launch;
  c.tiles = static_cast<int>(ceil_div(p.tiles, resident(device, cluster_log2)));
  c.clusters = static_cast<int>(ceil_div(p.tiles, c.tiles));
  const size_t limit =
      std::min(device.shared_bytes_of_block, device.shared_bytes_of_sm - kL1Bytes - kReservedBytes);
  // As many tiles at a time as shared memory holds. Where that are not all, each group of tiles
  // waits for its sums.
  constexpr int kMostOwnTiles = kFewRowsThreads / kFewRowsTile;  // a thread for each row
  c.own_tiles = std::min(static_cast<int>(ceil_div(c.tiles, c.cluster())), kMostOwnTiles);
  for (; c.own_tiles > 0; --c.own_tiles) {
    lay_out(p.bytes_of_own_tile, &c);
    if (c.shared_bytes <= limit) break;
  }
  return c;
}

// Of the blocks of a cluster each wants a kilobyte of every row. The more there are, the less of x,
// and of common rows, each of them reads; but with 8 there are two microseconds more between two
// launches than with 4, so that those are for an x that is too long for the shared memory of 4.
inline FewRowsConfig choose(const FewRowsProblem& p, const DeviceTraits& device) {
  constexpr int64_t kFewestColumns = 16 * kFewRowsStepK;
  int log2 = 0;
  while (log2 < 2 && p.k >= kFewestColumns << (log2 + 1)) ++log2;
  FewRowsConfig c = choose(p, log2, device);
  while (c.own_tiles == 0 && log2 < kFewRowsMostClusterLog2) c = choose(p, ++log2, device);
  return c;
}

// Whether there is a kernel for it; its rows are read in pieces of 16 bytes.
inline bool can_run(const FewRowsProblem& p, DType dtype, const DeviceTraits& device) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return device.clusters && size_of(dtype) == 2 && p.rows >= 1 && p.rows <= kFewRowsMost &&
         p.tiles >= 1 && p.tiles < kMost / kFewRowsTile && p.k >= 8 && p.k < kMost &&
         p.k % 8 == 0 && choose(p, device).own_tiles > 0;
}

}  // namespace few_rows
}  // namespace fusedcuda
