// Whether a gated MLP of few rows is one launch, and how its blocks divide the weights. Pure host
// functions without CUDA calls.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/gemm_config.h"
#include "common/iteration.h"
#include "gated_mlp_decode.h"

namespace fusedcuda {

constexpr int kDecodeMostRows = 16;  // of x; with more, three products are faster
constexpr int kDecodeTileRows = 16;  // of weights
constexpr int kDecodePairs = 8;      // a row of w_gate and one of w_up each: half a tile
constexpr int kDecodeColumns = 8;    // rows of x that a product of a warp has
constexpr int kDecodeConsumers = 8;  // warps that multiply
constexpr int kDecodeProducers = 2;  // warps that start copies, each of half a tile
// Two warpgroups that multiply, and one of four other warps, which gives them its registers.
constexpr int kDecodeThreads = (kDecodeConsumers + 4) * 32;
// Values of k that a warp has of every row in one step: 16 bytes a lane, for two products of 16.
constexpr int kDecodeStepK = 32;
// Steps of a warp in a stage of the ring, which is 16 rows of 512 values, 1 KB each: so long are
// the copies. bench/tuning/gated_mlp_decode_configs.cu times others.
constexpr int kDecodeSteps = 2;

// A block keeps x, and later a part of h, in the registers of the warps that multiply: 128 of each
// thread. So these are the most values of k, or columns of w_down, that 8 rows of x go with; 16
// rows go with half as many.
constexpr int kDecodeFragments = 32;  // of 16 bytes a thread
constexpr int kDecodeMostColumns = kDecodeConsumers * kDecodeStepK * kDecodeFragments;  // 8192

namespace decode {

// Between rows in shared memory. Eight lanes load 16 bytes each at a time, from two rows: these are
// in all banks when the second row is 64 bytes further than a multiple of 128.
constexpr int row_pitch(int stage_columns) { return stage_columns * 2 + 64; }
constexpr int stage_columns(int steps) { return kDecodeConsumers * kDecodeStepK * steps; }
constexpr int stage_bytes(int steps) { return kDecodeTileRows * row_pitch(stage_columns(steps)); }

// Sums of a tile that a warp has: a float4 of each thread and 8 rows of x.
constexpr int kSumBytes = 32 * 16;
constexpr int kSumBuffers = 2;  // one is filled while the other one is finished

constexpr int kBarrierBytes = 8;
// 32 KB have to be on their way on each SM to keep the memory busy (4.25 TB/s for a microsecond),
// and as much again is multiplied or waits; with a shorter ring the launch is not worth it.
constexpr int kFewestStages = 4;
// Whatever is under way is in a queue before the memory, and what the blocks tell each other has to
// wait behind it. So a ring has room for more than is asked for at a time, for the time when nobody
// multiplies. 4096 x 14336 bf16 on an H200, microseconds with 48, 64, 80, 96, 128 and 192 KB under
// way: one row 84.7, 93.3, 95.0, 93.4, 90.5, 87.7; eight rows 88.1, 96.3, 98.5, 96.4, 95.2, 93.8.
constexpr int kBytesUnderWay = 48 << 10;

inline int column_tiles_of(int m) {
  return static_cast<int>(next_power_of_two(ceil_div(m, kDecodeColumns)));
}

// Divides the columns of w_down into so many passes, or fewer, of whole stages.
inline void divide_columns(int columns, int64_t passes, int steps, GatedMlpDecodeConfig* config) {
  const int of_stage = stage_columns(steps);
  config->pass_columns = static_cast<int>(ceil_div(ceil_div(columns, passes), of_stage)) * of_stage;
  config->passes = static_cast<int>(ceil_div(columns, config->pass_columns));
}

// Lays out shared memory with as many stages as it holds, if any.
inline void lay_out(int steps, size_t limit, GatedMlpDecodeConfig* config) {
  const int64_t of_tile = int64_t{kSumBytes} * config->column_tiles;
  const int64_t sums = kSumBuffers * kDecodeConsumers * of_tile;
  const int64_t totals = config->down_tiles * of_tile;
  const int64_t barriers = 2 * kSumBuffers + config->passes;
  const int64_t left = static_cast<int64_t>(limit) - sums - totals - kBarrierBytes * barriers;
  config->stages = static_cast<int>(left / (stage_bytes(steps) + 2 * kBarrierBytes));
  if (config->stages <= 0) return;
  const int filled = kDecodeTileRows * stage_columns(steps) * 2;
  config->under_way = std::min(config->stages, std::max(kBytesUnderWay / filled, 1));
  config->sums_offset = config->stages * stage_bytes(steps);
  config->totals_offset = config->sums_offset + static_cast<int>(sums);
  config->barriers_offset = config->totals_offset + static_cast<int>(totals);
  config->shared_bytes = config->barriers_offset + kBarrierBytes * (2 * config->stages + barriers);
}

inline GatedMlpDecodeConfig choose(const GatedMlpDecodeParams& p, int steps,
                                   const DeviceTraits& device) {
  GatedMlpDecodeConfig config;
  config.column_tiles = column_tiles_of(p.m);
  config.blocks = device.num_sms;
  config.rounds = static_cast<int>(ceil_div(p.f, int64_t{kDecodePairs} * config.blocks));
  // At least two passes: the first one is work for the time in which the end of h is made.
  const int most_columns = kDecodeMostColumns / config.column_tiles;
  const int64_t fewest_passes = config.rounds > 2 ? 2 : 1;
  divide_columns(p.f, std::max(ceil_div(p.f, most_columns), fewest_passes), steps, &config);
  // As many counters as passes, as far as there are: to count costs the finisher microseconds. (The
  // last counter is for the blocks that are through with the others.)
  const int counters = std::min(config.passes, kDecodeCounters - 1);
  config.rounds_counted = static_cast<int>(ceil_div(config.rounds, counters));
  config.down_tiles = static_cast<int>(ceil_div(ceil_div(p.n, config.blocks), kDecodeTileRows));
  lay_out(steps, device.shared_bytes_of_block, &config);
  return config;
}

}  // namespace decode

inline GatedMlpDecodeConfig choose_gated_mlp_decode_config(const GatedMlpDecodeParams& params,
                                                           const DeviceTraits& device) {
  return decode::choose(params, kDecodeSteps, device);
}

inline bool gated_mlp_decode_can_run(const GatedMlpDecodeParams& p, const DeviceTraits& device) {
  if (!device.wgmma) return false;  // nor registers that pass from warp to warp: not Hopper
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return false;
  if (p.m < 1 || p.m > kDecodeMostRows || p.k < 1 || p.f < 1 || p.n < 1) return false;
  // Copies are of whole pieces of 16 bytes.
  if (p.k % 8 != 0 || p.f % 8 != 0) return false;
  for (const GemmMatrix& matrix : {p.x, p.w_gate, p.w_up, p.w_down}) {
    if (!gemm::can_be_boxed(matrix.data, matrix.stride, p.dtype)) return false;
  }
  if (p.k > kDecodeMostColumns / decode::column_tiles_of(p.m)) return false;
  return choose_gated_mlp_decode_config(p, device).stages >= decode::kFewestStages;
}

}  // namespace fusedcuda
