// How the kernels of norm.cu and norm_bwd.cu are launched: pure host functions, no CUDA.
#pragma once

#include <algorithm>

#include "common/row_pipeline.h"
#include "norm.h"

namespace fusedcuda {

// Vectors a thread holds: with four of them the forward has 64 registers. The backward also keeps
// its columns' sums in registers, 8 float32 for each vector of bf16; LayerNorm has two sums.
constexpr int kNormItems = 4;
constexpr int kLayerNormBwdItems = 2;
// Of rows that do not fit so many in a cluster: 2190 us by the stream path (1024x262144).
constexpr int kWideLayerNormBwdItems = 4;
// Threads of LayerNorm's backward of rows in phases, with 96 registers each.
constexpr int kPhasedLayerNormBwdThreads = 576;
// ... and of a block in the forward of rows in phases.
constexpr int kPhasedThreads = 320;
// Up to so many columns, unless they are whole vectors, a thread takes a row.
constexpr int kNarrowColumns = 8;
// Rows of one column that a thread has in flight.
constexpr int kNarrowRows = 4;
// Two blocks of an unaligned row in the forward have 72 registers a thread.
constexpr int kUnalignedRowThreads = 448;

// What the system takes of every block's shared memory.
constexpr int kSharedBytesTaken = 1 << 10;

namespace norm {

// What the pipeline path keeps in shared memory, and how it fills an SM.
struct Pipeline {
  int parameters;       // kept: weight, bias
  int tensors;          // streamed
  int value_size;       // of what is reduced
  int threads_of_sm;    // working at the same time
  int most_stages = 1;  // rows on their way, beside the one in registers
};

inline void choose_pipeline(int64_t rows, const Pipeline& pipeline, const DeviceTraits& device,
                            NormConfig* config) {
  RowConfig& row = config->row;
  row.path = RowPath::kPipeline;
  const int threads = row.threads_per_row * row.rows_per_block;
  const size_t vectors = size_t(row.items) * row.threads_per_row;
  const size_t fixed = row.scratch_bytes(pipeline.value_size) +
                       pipeline.parameters * sizeof(float) * vectors * row.vec;
  const size_t slots = pipeline_slots(row.items, row.threads_per_row, config->access);
  const size_t stage = kVectorBytes * slots * row.rows_per_block * pipeline.tensors;
  const size_t most = device.shared_bytes_of_block;
  const size_t of_sm = device.shared_bytes_of_sm;
  if (fixed + stage > most) {
    row.path = RowPath::kStream;  // a GPU with less shared memory than Hopper
    return;
  }
  int blocks = std::max(1, pipeline.threads_of_sm / threads);
  while (blocks > 1 && blocks * (fixed + stage + kSharedBytesTaken) > of_sm) --blocks;
  const size_t available = std::min(of_sm / blocks - kSharedBytesTaken, most);
  config->stages = static_cast<int>(
      std::clamp<size_t>((available - fixed) / stage, 1, size_t(pipeline.most_stages)));
  config->shared_bytes = fixed + config->stages * stage;

  // Every cluster that is launched runs at once, and takes its share of the rows.
  int64_t groups = int64_t{device.num_sms} * blocks;
  if (row.cluster > 1) {
    int log2 = 0;
    while (1 << log2 < row.cluster) ++log2;
    groups = blocks == 1 ? device.resident_clusters[0][log2]
                         : int64_t{device.resident_clusters[1][log2]} * blocks / 2;
  }
  const int64_t sets = ceil_div(ceil_div(rows, config->phases), row.rows_per_block);
  groups = std::clamp<int64_t>(groups, 1, config->phases * sets);
  row.blocks = groups * row.cluster;
  config->partials = groups + config->phases - 1;  // one a segment, see RowSets
}

// How pipelines reach rows of all these matrices, and the number of their phases.
inline void choose_access(const RowMatrix* matrices, int count, int64_t rows, int itemsize,
                          bool aligned, NormConfig* config) {
  config->access = aligned ? RowAccess::kAligned : RowAccess::kShifted;
  config->phases = 1;
  if (aligned || rows >= int64_t{1} << 30) return;  // the kernels count rows in phases in 32 bits
  const int64_t vec = kVectorBytes / itemsize;
  const RowMatrix& first = matrices[0];
  for (int i = 0; i < count; ++i) {
    if (matrices[i].data == nullptr) continue;
    const uintptr_t distance =
        reinterpret_cast<uintptr_t>(matrices[i].data) - reinterpret_cast<uintptr_t>(first.data);
    if (distance % kVectorBytes != 0 || (matrices[i].stride - first.stride) % vec != 0) return;
  }
  config->access = RowAccess::kPhased;
  // Phases come back after vec / gcd(stride, vec) rows.
  int64_t phases = vec;
  while (phases > 1 && first.stride % vec * (phases / 2) % vec == 0) phases /= 2;
  config->phases = static_cast<int>(phases);
}

// What rows in phases need: threads with several vectors, and warps that no rows share.
inline bool has_whole_warps(const RowConfig& row) {
  return row.items > 1 && row.threads_per_row % kWarpSize == 0;
}

// Rows of so few columns that a thread takes one, or several.
inline bool is_narrow(int64_t rows, int columns, DType dtype, bool aligned) {
  return rows > 0 && columns > 0 && columns <= kNarrowColumns && !aligned &&
         dtype != DType::kFloat64;
}

inline void choose_narrow(int64_t rows, int columns, int64_t most_blocks, NormConfig* config) {
  RowConfig& row = config->row;
  config->narrow = true;
  row.items = row.threads_per_row = row.cluster = 1;
  row.rows_per_block = kRowThreads;
  const int64_t rows_of_thread = columns == 1 ? kNarrowRows : 1;
  row.blocks = std::min(most_blocks, ceil_div(rows, rows_of_thread * row.rows_per_block));
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

// Times are microseconds of 2^28 bf16 elements on an H200 (bench/tuning/norm_configs.cu).
inline NormConfig choose_norm_config(const NormParams& params, const DeviceTraits& device) {
  const RowMatrix matrices[] = {params.x, params.residual, params.sum, params.y};
  const bool aligned = rows_are_aligned(matrices, 4, params.columns, size_of(params.dtype)) &&
                       is_aligned(params.weight.data) && is_aligned(params.bias.data);
  const bool is_rms = params.kind == NormKind::kRms;
  const int value_size = compute_size_of(params.dtype);
  NormConfig config;
  // A row in one block up to 512 threads: 263 instead of 279 by a cluster of two (16,384 columns).
  // LayerNorm, which synchronises twice, gains by the cluster: 298 instead of 307.
  RowConfig& row = config.row;
  // More threads than kRowThreads only in clusters: norm_kernel has no registers for them.
  norm::choose_access(matrices, 4, params.rows, size_of(params.dtype), aligned, &config);
  const bool shifted = config.access == RowAccess::kShifted;
  const int in_clusters = shifted ? kUnalignedRowThreads : kWideRowThreads;
  const int most_threads = device.clusters ? in_clusters : kRowThreads;
  const int usual_threads = is_rms ? std::min(kRowThreads, most_threads) : kRowThreads / 2;
  row = choose_row_config(params.rows, params.columns, params.dtype, aligned, kNormItems, device,
                          most_threads, usual_threads);
  if (!aligned && !norm::has_whole_warps(row)) {
    config.access = RowAccess::kShifted;
    config.phases = 1;
  }
  const bool phased = config.access == RowAccess::kPhased;
  if (norm::is_narrow(params.rows, params.columns, params.dtype, aligned)) {
    norm::choose_narrow(params.rows, params.columns, params.rows, &config);
  } else if (row.path == RowPath::kRegister && (row.cluster > 1 || phased)) {
    norm::Pipeline pipeline;
    pipeline.parameters = is_rms ? 1 : 2;
    pipeline.tensors = params.residual.data != nullptr ? 2 : 1;
    pipeline.value_size = value_size;
    // Clusters of two are on all SMs with one block each (275, with two 285), larger ones are not.
    pipeline.threads_of_sm = row.cluster == 2 ? kRowThreads : 2 * kRowThreads;
    pipeline.most_stages = aligned || phased ? 1 : 2;
    if (row.cluster == 1) {
      // Three or more blocks an SM, of which one loads while others reduce.
      row.rows_per_block = std::max(1, kPhasedThreads / row.threads_per_row);
    }
    norm::choose_pipeline(params.rows, pipeline, device, &config);
  } else if (row.path == RowPath::kRegister) {
    // Of two rows in a block of 256 threads one loads while the other reduces: 256.4 instead of
    // 260.5 (4,096 columns), and with a warp a row 255.1 with 16 rows, 260.0 with 4 (1,024). The
    // rows of LayerNorm, or of three warps, wait for each other: 3 to 20 % slower.
    if (row.items > 1 && row.threads_per_row == kWarpSize) {
      row.rows_per_block = kRowThreads / kWarpSize;
    } else if (row.items > 1 && is_rms && row.threads_per_row == kRowBlockThreads) {
      row.rows_per_block = 2;
    }
    row.blocks = ceil_div(params.rows, row.rows_per_block);
    config.shared_bytes = row.scratch_bytes(value_size);
  }
  if (row.path == RowPath::kStream) norm::choose_stream(params.rows, value_size, &config);
  return config;
}

inline NormConfig choose_norm_bwd_config(const NormBwdParams& params, const DeviceTraits& device) {
  const RowMatrix matrices[] = {params.h, params.dy, params.dh, params.dx};
  const bool aligned = rows_are_aligned(matrices, 4, params.columns, size_of(params.dtype));
  const bool is_rms = params.kind == NormKind::kRms;
  const int value_size = compute_size_of(params.dtype);
  const int num_sums = (params.dweight.data != nullptr) + (params.dbias.data != nullptr);
  NormConfig config;
  RowConfig& row = config.row;
  norm::choose_access(matrices, 4, params.rows, size_of(params.dtype), aligned, &config);
  int items = is_rms ? kNormItems : kLayerNormBwdItems;
  auto choose_row = [&](int usual_threads) {
    return choose_row_config(params.rows, params.columns, params.dtype, aligned, items, device,
                             kRowThreads, usual_threads);
  };
  // Blocks of 256 threads. LayerNorm's rows are in one of 512 or two of these: 479 instead of 523
  // by a cluster of four (16,384 columns). Unaligned rows prefer them, too: 518 instead of 551
  // (4096x50257). From clusters of four on RMSNorm's blocks have 128 threads: 411 instead of 433
  // (32,768), 420 instead of 432 (65,536).
  const int64_t bytes = params.columns * int64_t{size_of(params.dtype)};
  const int64_t bytes_of_block = int64_t{kRowThreads} * items * kVectorBytes;
  const bool is_wide = !aligned || (!is_rms && bytes <= 2 * bytes_of_block);
  row = choose_row(is_wide ? kRowThreads : kRowThreads / 2);
  if (is_rms && aligned && row.cluster >= 4) row = choose_row(kRowThreads / 4);
  if (row.path == RowPath::kStream && !is_rms && aligned && device.clusters &&
      params.rows < int64_t{1} << 30) {
    items = kWideLayerNormBwdItems;
    row = choose_row(kRowThreads);
  }
  // By phases LayerNorm's rows of one block take 741 us instead of 961 (65536x4097); in clusters
  // 841 instead of 760 (4096x50257), and RMSNorm's 769 instead of 560, and 577 instead of 517.
  const bool gains = !is_rms && row.cluster == 1 && norm::has_whole_warps(row);
  if (!aligned && !gains) {
    config.access = RowAccess::kShifted;
    config.phases = 1;
  }
  const bool phased = config.access == RowAccess::kPhased;
  if (norm::is_narrow(params.rows, params.columns, params.dtype, aligned)) {
    norm::choose_narrow(params.rows, params.columns, int64_t{2} * device.num_sms, &config);
    config.partials = row.blocks;
  } else if (row.path == RowPath::kRegister) {
    // Shifted, threads with several vectors are whole warps: addresses are then constants apart.
    if (config.access == RowAccess::kShifted && row.items > 1 && row.threads_per_row < kWarpSize) {
      row.threads_per_row *= row.items;
      row.rows_per_block /= row.items;
      row.items = 1;
    }
    norm::Pipeline pipeline;
    pipeline.parameters = 1;
    pipeline.tensors = params.dh.data != nullptr ? 3 : 2;
    pipeline.value_size = (is_rms ? 1 : 2) * value_size;
    // 128 registers a thread: 512 threads on an SM at most. Of RMSNorm 256 are faster, with two
    // stages: 382 instead of 419 (4,096 columns), 389 instead of 432 (8,192), 395 instead of 434
    // (16,384). The small blocks of larger clusters wait longer for each other and need more, and
    // so do rows of one warp (391 with 384 threads and one stage, 405 with 256 and three).
    pipeline.threads_of_sm = kRowThreads;
    pipeline.most_stages = 2;
    const bool is_warp = row.threads_per_row <= kWarpSize;
    const bool is_small = row.threads_per_row <= kRowThreads / 4 && row.cluster >= 4;
    if (is_rms && aligned && (is_warp || is_small)) {
      pipeline.threads_of_sm = kRowThreads * 3 / 4;
      const bool early = params.dh.data == nullptr;  // the next row is fetched early
      pipeline.most_stages = early && row.cluster <= 8 ? 1 : 2;
    } else if (is_rms && aligned && row.cluster <= 2) {
      pipeline.threads_of_sm = kRowThreads / 2;
    } else if (!is_rms && phased && row.items == kLayerNormBwdItems) {
      pipeline.threads_of_sm = kPhasedLayerNormBwdThreads;
    }
    if (!is_warp && row.cluster == 1) {
      // About as many threads as that, of whole rows.
      const int half_a_row = pipeline.threads_of_sm < kRowThreads ? row.threads_per_row / 2 : 0;
      row.rows_per_block = std::max(1, (pipeline.threads_of_sm + half_a_row) / row.threads_per_row);
      if (!is_rms && aligned && kRowThreads % row.threads_per_row != 0) row.rows_per_block = 1;
    }
    norm::choose_pipeline(params.rows, pipeline, device, &config);
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
