// Whether a linear layer of few rows and its adapter are one launch (lora_decode.cuh), and how its
// blocks divide the weight. Pure host functions without CUDA calls.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/gemm_config.h"
#include "lora.h"

namespace fusedcuda {

constexpr int kLoraDecodeMostRows = 64;  // of x
constexpr int kLoraDecodeMostRank = 64;
constexpr int kLoraDecodeWarps = 8;  // of a block
constexpr int kLoraDecodeThreads = kLoraDecodeWarps * kWarpSize;
constexpr int kLoraDecodeTileRows = 16;  // of the weight, that a warp has at a time
// Values of k that a warp has of every row in one step: 16 bytes a lane, for two products of 16.
constexpr int kLoraDecodeStepK = 32;

// Blocks on an SM, and steps whose weights a warp asks for before it multiplies the first: 4 KB, or
// 8 where it has the registers of two. So 64 KB are under way on an SM, where the memory needs 32
// (4.25 TB/s for a microsecond).
constexpr int lora_decode_blocks_of_sm(int row_tiles) { return row_tiles < 4 ? 2 : 1; }
constexpr int lora_decode_steps_ahead(int row_tiles) { return row_tiles < 4 ? 4 : 8; }

// As the plan prints it. A cluster of blocks has `tiles` of 16 rows of the weight, and each of its
// blocks a part of their columns: `steps` of 32. In a block the warps take tiles in turn,
// `k_groups` of them a part of the steps each. (Numbers that the kernel divides by are powers of
// two: all weights wait for what comes before the first of them.)
struct LoraDecodeConfig {
  int row_tiles = 0;     // of 16 rows of x
  int rank_tiles = 0;    // of 16 ranks
  int rank_pitch = 0;    // elements between rows of all ranks in shared memory
  int cluster_log2 = 0;  // of the blocks of a cluster
  int clusters = 0;
  int tiles = 0;
  int own_tiles = 0;       // of them, those whose parts one block adds up; at a time
  int tiles_of_group = 0;  // of all blocks
  int k_groups_log2 = 0;
  int parts = 0;  // of one sum
  int steps = 0;
  int steps_of_warp = 0;          // the most, of a tile of the weight
  int steps_of_warp_of_down = 0;  // likewise, where all warps have a part
  // In shared memory, in bytes: rows of `up`; parts of t of the warps, and of the blocks; bias;
  // parts of the sums; the mailbox. At the beginning is the block's part of x.
  int up_offset = 0, t_of_warps_offset = 0, t_of_blocks_offset = 0;
  int bias_offset = 0, sums_offset = 0, mailbox_offset = 0;
  size_t shared_bytes = 0;
  bool dependent_launch = false;

  int cluster() const { return 1 << cluster_log2; }
  int k_groups() const { return 1 << k_groups_log2; }
  int blocks() const { return clusters * cluster(); }
};

namespace lora_decode_detail {

// A block's own share of shared memory that the GPU takes for itself.
constexpr size_t kReservedBytes = 1 << 10;
// Of a warp, 16 x 16 sums; and as much of x in a step, 16 x 32 elements.
constexpr int kTileBytes = 1 << 10;

inline void lay_out(LoraDecodeConfig* c) {
  const int of_tile = c->row_tiles * kTileBytes, pitch = c->rank_pitch * 2;
  c->tiles_of_group = c->own_tiles * c->cluster();
  c->parts = c->cluster() * c->k_groups();
  int end = c->steps * of_tile;
  auto take = [&](int bytes) {
    const int offset = end;
    end += bytes;
    return offset;
  };
  c->up_offset = take(c->own_tiles * kLoraDecodeTileRows * pitch);
  c->t_of_warps_offset = take(kLoraDecodeWarps * c->rank_tiles * of_tile);
  c->t_of_blocks_offset = take(c->cluster() * c->rank_tiles * of_tile);
  c->bias_offset = take(c->own_tiles * kLoraDecodeTileRows * static_cast<int>(sizeof(float)));
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

inline void set_k_groups(int log2, LoraDecodeConfig* c) {
  c->k_groups_log2 = log2;
  c->steps_of_warp = static_cast<int>(ceil_div(c->steps, int64_t{1} << log2));
}

// Divides n rows of the weight among the clusters, and k among the warps of a block: so that the
// warp with the most steps has as few as possible, counted in pieces that are asked for together;
// an eighth fewer, or it is not worth twice as many parts of sums.
inline void divide(int64_t n, int clusters, LoraDecodeConfig* c) {
  const int64_t all = ceil_div(n, kLoraDecodeTileRows);
  c->tiles = static_cast<int>(ceil_div(all, clusters));
  c->clusters = static_cast<int>(ceil_div(all, c->tiles));
  c->steps_of_warp_of_down = static_cast<int>(ceil_div(c->steps, kLoraDecodeWarps));
  int64_t fewest = 0;
  int best = 0;
  for (int log2 = 0; kLoraDecodeWarps >> log2 > 0; ++log2) {
    set_k_groups(log2, c);
    const int64_t rounds = ceil_div(c->tiles, kLoraDecodeWarps >> log2);
    const int64_t pieces =
        rounds * ceil_div(c->steps_of_warp, lora_decode_steps_ahead(c->row_tiles));
    if (log2 > 0 && 8 * pieces > 7 * fewest) continue;
    fewest = pieces;
    best = log2;
  }
  set_k_groups(best, c);
}

// As many tiles at a time as `limit` bytes of shared memory hold. Where that are not all, each
// group of tiles waits for its sums: then rather with fewer parts of them. False: not even one.
inline bool fit(size_t limit, LoraDecodeConfig* c) {
  // A thread keeps one element of the bias.
  constexpr int kMostOwnTiles = kLoraDecodeThreads / kLoraDecodeTileRows;
  const int wanted = static_cast<int>(ceil_div(c->tiles, c->cluster()));
  for (;;) {
    for (c->own_tiles = std::min(wanted, kMostOwnTiles); c->own_tiles > 0; --c->own_tiles) {
      lay_out(c);
      if (c->shared_bytes <= limit) break;
    }
    if (c->own_tiles == wanted || c->k_groups_log2 == 0) return c->own_tiles > 0;
    set_k_groups(c->k_groups_log2 - 1, c);
  }
}

inline LoraDecodeConfig choose(const LoraProductParams& p, int cluster_log2,
                               const DeviceTraits& device) {
  const LinearActParams& linear = p.linear;
  LoraDecodeConfig c;
  c.row_tiles = static_cast<int>(next_power_of_two(ceil_div(linear.m, int64_t{16})));
  c.rank_tiles = static_cast<int>(ceil_div(p.rank, 16));
  c.rank_pitch = 16 * c.rank_tiles + 8;  // an odd number of 16-byte pieces: rows lie in all banks
  c.cluster_log2 = cluster_log2;
  c.steps = static_cast<int>(ceil_div(ceil_div(linear.k, int64_t{kLoraDecodeStepK}), c.cluster()));
  c.dependent_launch = device.dependent_launch;
  for (int blocks = lora_decode_blocks_of_sm(c.row_tiles); blocks >= 1; --blocks) {
    divide(linear.n, resident(device, cluster_log2, blocks), &c);
    const size_t limit =
        std::min(device.shared_bytes_of_block, device.shared_bytes_of_sm / blocks - kReservedBytes);
    if (fit(limit, &c)) return c;
  }
  return c;
}

// Blocks that share a part of the weight's rows: the more, the less of x and lora_a each of them
// reads, but each wants a few kilobytes of every row.
inline int cluster_log2_for(int64_t k) {
  constexpr int64_t kFewestColumns = 16 * kLoraDecodeStepK;
  constexpr int kMost = 3;  // 8 blocks: all GPUs with clusters have those
  int log2 = 0;
  while (log2 < kMost && k >= kFewestColumns << (log2 + 1)) ++log2;
  return log2;
}

}  // namespace lora_decode_detail

inline LoraDecodeConfig choose_lora_decode_config(const LoraProductParams& p,
                                                  const DeviceTraits& device) {
  return lora_decode_detail::choose(p, lora_decode_detail::cluster_log2_for(p.linear.k), device);
}

inline bool lora_decode_can_run(const LoraProductParams& p, const DeviceTraits& device) {
  const LinearActParams& l = p.linear;
  // Rows are read in pieces of 16 bytes.
  auto fits = [&](const GemmFactor& f) {
    return f.k_is_inner && gemm::can_be_boxed(f.data, f.stride, l.dtype);
  };
  return device.clusters && size_of(l.dtype) == 2 && l.m >= 1 && l.m <= kLoraDecodeMostRows &&
         l.n >= 1 && l.n < int64_t{1} << 30 && l.k >= 8 && l.k < int64_t{1} << 30 && l.k % 8 == 0 &&
         l.saves == SavedForBackward::kNone && p.rank >= 1 && p.rank <= kLoraDecodeMostRank &&
         fits(l.a) && fits(l.b) && fits(p.down) && fits(l.extra_b) &&
         choose_lora_decode_config(p, device).own_tiles > 0;
}

}  // namespace fusedcuda
