// How the products of lora.cu are launched. Pure host functions without CUDA calls or global state,
// so that every decision can be tested on a machine without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora.h"

namespace fusedcuda {

constexpr int kLoraThreads = 256;
constexpr int kLoraStages = 4;  // one is multiplied, the others are on their way
constexpr int kLoraRanks = 64;  // the most of a block: 32 sums a thread
// Columns of x in a block of lora_up: 16 for each of its warps.
constexpr int kLoraUpColumns = 128;

namespace lora_detail {

// A block's own share of shared memory that the GPU takes for itself.
constexpr size_t kReservedBytes = 1 << 10;
// Elements between rows in shared memory beyond their length. The same piece of eight neighbours
// then lies in all 32 banks: rows are an odd number of 16-byte pieces, or of 4-byte elements, of
// which a thread reads two along a row or two below each other, 8 or 4 banks apart.
constexpr int kPadding = 8;
constexpr int kPaddingBelow = 4;

inline bool is_aligned_matrix(const void* data, int64_t stride, DType dtype) {
  return is_aligned(data) && stride * size_of(dtype) % kVectorBytes == 0;
}

inline void choose_ranks(int rank, LoraConfig* config) {
  config->rank_groups = static_cast<int>(ceil_div(std::min(rank, kLoraRanks), 16));
  config->chunks = static_cast<int>(ceil_div(rank, kLoraRanks));
}

inline void lay_out(int x_bytes, int factor_bytes, LoraConfig* config) {
  config->factor_offset = x_bytes;
  config->bytes_of_stage = x_bytes + factor_bytes;
  config->shared_bytes = size_t{kLoraStages} * config->bytes_of_stage;
}

// What a block may have: all, where each gets an SM of its own, else half.
inline size_t shared_limit(int64_t blocks, const DeviceTraits& device) {
  if (blocks <= device.num_sms) return device.shared_bytes_of_block;
  return std::min(device.shared_bytes_of_block, device.shared_bytes_of_sm / 2 - kReservedBytes);
}

inline bool fills_card(int64_t blocks, const DeviceTraits& device) {
  return blocks * 8 >= int64_t{7} * device.num_sms;
}

// Rows of x in a block of lora_down: 64, or fewer where most SMs would have nothing to do, but so
// many that the block reads no more of the factor, `factor_bytes` a column, than of x. Then its
// columns are split instead.
inline int rows_of_block(int64_t rows, int factor_bytes, const DeviceTraits& device) {
  int least = 16;
  while (least < 64 && least < rows && 2 * least < factor_bytes) least *= 2;
  for (int of_block = 64; of_block > least; of_block /= 2) {
    if (fills_card(ceil_div(rows, of_block), device)) return of_block;
  }
  return least;
}

// Parts of a sum of `stages` steps by `blocks` blocks each, so that there are two blocks an SM. A
// sum is only worth a second kernel where that gives at least twice as many.
inline int splits_of(int64_t stages, int64_t blocks, const DeviceTraits& device) {
  const int64_t wanted = int64_t{2} * device.num_sms / blocks;
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(stages, 1)));
}

}  // namespace lora_detail

inline LoraConfig choose_lora_down_config(const LoraDownParams& p, const DeviceTraits& device) {
  LoraConfig config;
  if (p.rows == 0) return config;
  config.dependent_launch = device.dependent_launch;
  config.aligned_x = lora_detail::is_aligned_matrix(p.x.data, p.x.stride, p.dtype);
  config.aligned_factor = lora_detail::is_aligned_matrix(p.factor, p.factor_stride, p.factor_dtype);
  lora_detail::choose_ranks(p.rank, &config);
  const int ranks = 16 * config.rank_groups, itemsize = size_of(p.factor_dtype);
  config.rows_of_stage = lora_detail::rows_of_block(p.rows, ranks * itemsize, device);
  config.tiles = ceil_div(p.rows, config.rows_of_stage);
  const int64_t blocks = config.tiles * config.chunks;
  // Blocks that nearly fill the SMs are not split: t would pass through memory once more.
  const bool fills = lora_detail::fills_card(blocks, device);
  // 16 KB of x a stage keep the memory busy; where the columns are split, parts can be short.
  for (int depth = fills ? 8192 / config.rows_of_stage : 128; depth >= 32; depth /= 2) {
    config.columns_of_stage = depth;
    const int64_t stages = ceil_div(p.columns, depth);
    config.splits = fills ? 1 : lora_detail::splits_of(stages, blocks, device);
    config.x_pitch = depth + lora_detail::kPadding;
    config.factor_pitch = p.rank_is_inner ? ranks + (itemsize == 4 ? lora_detail::kPaddingBelow
                                                                   : lora_detail::kPadding)
                                          : depth + lora_detail::kPadding;
    lora_detail::lay_out(config.rows_of_stage * config.x_pitch * 2,
                         (p.rank_is_inner ? depth : ranks) * config.factor_pitch * itemsize,
                         &config);
    if (config.shared_bytes <= lora_detail::shared_limit(config.blocks(), device)) break;
  }
  // At the end the sums of each warp, of 16 rows, take the place of the stages.
  const size_t sums = size_t{kLoraThreads / 2} * (ranks + lora_detail::kPadding) * sizeof(float);
  config.shared_bytes = std::max(config.shared_bytes, sums);
  if (config.splits > 1) config.workspace_size = config.splits * p.rows * lora_pitch(p.rank);
  return config;
}

inline LoraConfig choose_lora_up_config(const LoraUpParams& p, const DeviceTraits& device) {
  LoraConfig config;
  if (p.columns == 0) return config;
  config.dependent_launch = device.dependent_launch;
  config.aligned_x = lora_detail::is_aligned_matrix(p.x.data, p.x.stride, p.dtype);
  config.aligned_factor = true;
  lora_detail::choose_ranks(p.rank, &config);
  config.columns_of_stage = kLoraUpColumns;
  config.tiles = ceil_div(p.columns, kLoraUpColumns);
  config.x_pitch = kLoraUpColumns + lora_detail::kPadding;
  config.factor_pitch = 16 * config.rank_groups + lora_detail::kPadding;
  for (int depth : {64, 32}) {
    config.rows_of_stage = depth;
    const int64_t stages = ceil_div(p.rows, depth);
    config.splits = lora_detail::splits_of(stages, config.tiles * config.chunks, device);
    lora_detail::lay_out(depth * config.x_pitch * 2, depth * config.factor_pitch * 2, &config);
    if (config.shared_bytes <= lora_detail::shared_limit(config.blocks(), device)) break;
  }
  // Of no rows there are no parts, and the sums of none are zero.
  if (p.rows == 0) config.splits = 0;
  config.workspace_size = int64_t{config.splits} * p.rank * p.columns;
  return config;
}

}  // namespace fusedcuda
