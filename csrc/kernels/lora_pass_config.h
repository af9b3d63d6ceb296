// How one pass over x (lora_pass.cuh) is divided among blocks, and where it can be made. Functions
// of the host without CUDA calls, and what the kernels share with them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/gemm_config.h"
#include "lora.h"

namespace fusedcuda {

constexpr int kLoraPassRows = 64, kLoraPassColumns = 256;       // of a tile of x
constexpr int kLoraPassFewRanks = 16, kLoraPassMostRanks = 64;  // that there are kernels for

// Lines of tiles, one behind the other, of which each block has an equal share: the end of one, the
// start of the next and, of short ones, some between. Where `up` is made a line goes down, or else
// along the rows, so that what is added up along it stays with a block. Tiles times blocks are
// below 2^32: the threads of the sums divide, and those of 64 bits are slow.
struct LoraPassLines {
  uint32_t count = 0, length = 0;
  uint32_t blocks = 0;

  FUSEDCUDA_HOST_DEVICE uint32_t tiles() const { return count * length; }
  FUSEDCUDA_HOST_DEVICE uint32_t first_of(uint32_t block) const { return tiles() * block / blocks; }
  // first_of(block_of(i)) <= i < first_of(block_of(i) + 1)
  FUSEDCUDA_HOST_DEVICE uint32_t block_of(uint32_t index) const {
    return ((index + 1) * blocks - 1) / tiles();
  }
  // Which part of the sums of a line a block leaves: from block to block, and from line to line, at
  // least one more.
  FUSEDCUDA_HOST_DEVICE static uint32_t part_of(uint32_t line, uint32_t block) {
    return line + block;
  }
  FUSEDCUDA_HOST_DEVICE uint32_t parts() const { return count + blocks; }
};

struct LoraPassConfig {
  LoraPassLines lines;
  int width = 0;                         // of a line, in rows or columns
  int64_t down_parts = 0, up_parts = 0;  // of the workspace, in floats
  bool dependent_launch = false;

  int64_t workspace_size() const { return down_parts + up_parts; }
};

inline bool lora_pass_can_run(const LoraPassParams& p, const DeviceTraits& device) {
  constexpr int64_t kMost = (int64_t{1} << 31) / kLoraPassMostRanks;
  const int64_t tiles = ceil_div(p.rows, kLoraPassRows) * ceil_div(p.columns, kLoraPassColumns);
  return device.wgmma && size_of(p.dtype) == 2 && p.rank <= kLoraPassMostRanks && p.rows > 0 &&
         p.columns > 0 && p.rows < kMost && p.columns < kMost &&
         tiles * device.num_sms < int64_t{1} << 32 &&
         gemm::can_be_boxed(p.x.data, p.x.stride, p.dtype) &&
         (p.down == nullptr || gemm::can_be_boxed(p.factor, p.factor_stride, p.dtype)) &&
         (p.up == nullptr || gemm::can_be_boxed(p.t, lora_pitch(p.rank), p.dtype));
}

// Tiles side by side in a line. Of both and few ranks there is room for the sums of two, and half
// as many parts of `down`: 26.3 us of 8192 x 4096 elements with one, 25.2 with two (H200).
constexpr int lora_pass_tiles_of_line(bool makes_down, bool makes_up, int most_ranks) {
  return makes_down && makes_up && most_ranks == kLoraPassFewRanks ? 2 : 1;
}

inline LoraPassConfig choose_lora_pass_config(const LoraPassParams& p, const DeviceTraits& device) {
  const bool down = p.down != nullptr, up = p.up != nullptr;
  const int most_ranks = p.rank <= kLoraPassFewRanks ? kLoraPassFewRanks : kLoraPassMostRanks;
  LoraPassConfig config;
  LoraPassLines& lines = config.lines;
  config.width =
      up ? lora_pass_tiles_of_line(down, up, most_ranks) * kLoraPassColumns : kLoraPassRows;
  lines.count = static_cast<uint32_t>(ceil_div(up ? p.columns : p.rows, config.width));
  lines.length = static_cast<uint32_t>(up ? ceil_div(p.rows, kLoraPassRows)
                                          : ceil_div(p.columns, kLoraPassColumns));
  lines.blocks = std::min(lines.tiles(), static_cast<uint32_t>(device.num_sms));
  const int pitch = lora_pitch(p.rank);
  const int64_t of_lines = int64_t{lines.parts()} * config.width * pitch;
  if (down) config.down_parts = up ? lines.count * p.rows * pitch : of_lines;
  if (up) config.up_parts = of_lines;
  config.dependent_launch = device.dependent_launch;
  return config;
}

}  // namespace fusedcuda
