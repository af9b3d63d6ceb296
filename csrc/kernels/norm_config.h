// How norm.cu's kernels are launched: pure host functions, no CUDA.
#pragma once

#include <algorithm>

#include "norm.h"

namespace fusedcuda {

// Vectors a thread holds: with four of them the forward has 64 registers. The backward also keeps
// its columns' sums in registers, 8 float32 for each vector of bf16; LayerNorm has two sums.
constexpr int kNormItems = 4;
constexpr int kLayerNormBwdItems = 2;

// What the system takes of every block's shared memory.
constexpr int kSharedBytesTaken = 1 << 10;
// Threads on an SM, by registers: 64 a thread forward, 128 backward.
constexpr int kNormThreadsOfSm = 1024;
constexpr int kNormBwdThreadsOfSm = 512;

namespace norm {

// Shared memory and grid of the pipeline path. `parameters`, `tensors`: how many are kept, and
// streamed, in shared memory. A second stage helps where a block cannot fetch the next row as soon
// as it has read one; otherwise one is 1 to 2 % faster (H200).
inline void choose_pipeline(int64_t rows, DType dtype, int parameters, int tensors,
                            size_t scratch, int threads_of_sm, int most_stages,
                            const DeviceTraits& device, NormConfig* config) {
  RowConfig& row = config->row;
  row.path = RowPath::kPipeline;
  const int threads = row.threads_per_row * row.rows_per_block;
  const size_t compute_size = dtype == DType::kFloat64 ? 8 : 4;
  const size_t fixed = scratch + parameters * compute_size * row.items * row.vec *
                                     size_t(row.threads_per_row);
  const size_t slots = size_t(row.items) * row.threads_per_row + (row.aligned ? 0 : 1);
  const size_t stage = kVectorBytes * slots * row.rows_per_block * tensors;
  const size_t most = device.shared_bytes_of_block;
  const size_t of_sm = device.shared_bytes_of_sm;
  if (fixed + stage > most) {
    config->row.path = RowPath::kStream;  // a GPU with less shared memory than Hopper
    return;
  }
  int blocks = std::max(1, threads_of_sm / threads);
  while (blocks > 1 && blocks * (fixed + stage + kSharedBytesTaken) > of_sm) --blocks;
  const size_t available = std::min(of_sm / blocks - kSharedBytesTaken, most);
  config->stages = static_cast<int>(
      std::clamp<size_t>((available - fixed) / stage, 1, static_cast<size_t>(most_stages)));
  config->shared_bytes = fixed + config->stages * stage;

  const int64_t sets = ceil_div(rows, row.rows_per_block);
  int cluster_log2 = 0;
  while (1 << cluster_log2 < row.cluster) ++cluster_log2;
  const int64_t resident =
      cluster_log2 == 0 ? device.num_sms : device.resident_clusters[cluster_log2];
  config->partials = std::clamp<int64_t>(resident * blocks, 1, sets);
  row.blocks = config->partials * row.cluster;
}

// Rows that a block walks along, or sums down columns.
inline void choose_stream(int64_t rows, size_t value_size, NormConfig* config) {
  RowConfig& row = config->row;
  row.threads_per_row = kRowThreads;
  row.rows_per_block = row.cluster = 1;
  row.blocks = rows;
  config->stages = 0;
  config->shared_bytes = row.scratch_bytes(static_cast<int>(value_size));
}

}  // namespace norm

inline NormConfig choose_norm_config(const NormParams& params, const DeviceTraits& device) {
  const RowMatrix matrices[] = {params.x, params.residual, params.sum, params.y};
  const bool aligned = rows_are_aligned(matrices, 4, params.columns, size_of(params.dtype)) &&
                       is_aligned(params.weight.data) && is_aligned(params.bias.data);
  const int value_size = params.dtype == DType::kFloat64 ? 8 : 4;
  NormConfig config;
  RowConfig& row = config.row;
  row = choose_row_config(params.rows, params.columns, params.dtype, aligned, kNormItems, device,
                          kWideRowThreads, kRowThreads);
  // Of two rows in a block of 256 threads one loads while the other reduces: 256.4 us instead of
  // 260.5 (65536x4096), and for one warp a row 256.5 with 16 rows instead of 260.0 with 4
  // (262144x1024). LayerNorm, which synchronises twice, and whatever does not fill the 256 threads
  // lose 3 to 20 %.
  if (row.path == RowPath::kRegister && row.threads_per_row == kWarpSize && row.rows_per_block > 1 &&
      row.items > 1) {
    row.rows_per_block = kRowThreads / kWarpSize;
  } else if (row.path == RowPath::kRegister && params.kind == NormKind::kRms &&
             row.threads_per_row == kRowBlockThreads && row.items > 1) {
    row.rows_per_block = 2;
  }
  row.blocks = ceil_div(params.rows, row.rows_per_block) * row.cluster;
  config.shared_bytes = row.scratch_bytes(value_size);
  if (row.path == RowPath::kRegister && row.cluster > 1) {
    norm::choose_pipeline(params.rows, params.dtype, params.kind == NormKind::kLayer ? 2 : 1,
                          params.residual.data != nullptr ? 2 : 1, row.scratch_bytes(value_size),
                          kNormThreadsOfSm, aligned ? 1 : 2, device, &config);
  }
  if (row.path == RowPath::kStream) norm::choose_stream(params.rows, value_size, &config);
  return config;
}

inline NormConfig choose_norm_bwd_config(const NormBwdParams& params, const DeviceTraits& device) {
  const RowMatrix matrices[] = {params.h, params.dy, params.dh, params.dx};
  const bool aligned = rows_are_aligned(matrices, 4, params.columns, size_of(params.dtype));
  const size_t value_size = params.dtype == DType::kFloat64 ? 8 : 4;
  const size_t num_values = params.kind == NormKind::kLayer ? 2 : 1;
  const int num_sums = (params.dweight.data != nullptr) + (params.dbias.data != nullptr);
  NormConfig config;
  config.row = choose_row_config(
      params.rows, params.columns, params.dtype, aligned,
      params.kind == NormKind::kRms ? kNormItems : kLayerNormBwdItems, device);
  if (config.row.path == RowPath::kRegister) {
    // Blocks of 256 threads, two on an SM; with a warp a row 128, three on an SM: 394 us instead of
    // 417 with four (262144x1024), 400 instead of 411 (65536x4096, 128 threads a row).
    RowConfig& row = config.row;
    const bool is_warp = row.threads_per_row <= kWarpSize;
    if (!is_warp && row.cluster == 1)
      row.rows_per_block = std::max(1, kRowThreads / 2 / row.threads_per_row);
    const bool late = !aligned || params.dh.data != nullptr;
    norm::choose_pipeline(params.rows, params.dtype, 1, params.dh.data != nullptr ? 3 : 2,
                          row.scratch_bytes(static_cast<int>(num_values * value_size)),
                          is_warp ? kNormBwdThreadsOfSm * 3 / 4 : kNormBwdThreadsOfSm,
                          late ? 2 : 1, device, &config);
  }
  if (config.row.path == RowPath::kStream) {
    norm::choose_stream(params.rows, 2 * value_size, &config);
    // The sums over the rows by a kernel of its own: blocks of columns times slices of rows.
    config.weight_blocks_x = ceil_div(params.columns, kWarpSize);
    const int64_t slices = ceil_div(params.rows, kRowThreads / kWarpSize);
    const int64_t wave = ceil_div(int64_t{4} * device.num_sms, config.weight_blocks_x);
    config.weight_blocks_y = std::clamp<int64_t>(wave, 1, slices);
    config.partials = config.weight_blocks_y;
  }
  config.workspace_size = config.partials * params.columns * num_sums;
  return config;
}

}  // namespace fusedcuda
