// How one pass over x (lora_pass.cuh) is divided into tiles, and where it can be made. Functions of
// the host without CUDA calls, and what the kernels share with them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/gemm_config.h"
#include "lora.h"

namespace fusedcuda {

constexpr int kLoraPassRows = 64, kLoraPassColumns = 256;  // of a tile of x
constexpr int kLoraPassRanks = 64;                         // at most

struct LoraPassTile {
  uint32_t row, column;  // in tiles
};

// The tiles of x, columns of them one behind the other, of which each block has an equal share: at
// most one column more than it is long, and the end of one and the start of the next.
struct LoraPassTiles {
  uint32_t rows = 0, columns = 0;  // in tiles
  uint32_t blocks = 0;

  FUSEDCUDA_HOST_DEVICE uint32_t count() const { return rows * columns; }
  FUSEDCUDA_HOST_DEVICE uint32_t first_of(uint32_t block) const {
    return static_cast<uint32_t>(uint64_t{count()} * block / blocks);
  }
  FUSEDCUDA_HOST_DEVICE LoraPassTile at(uint32_t index) const {
    return {index % rows, index / rows};
  }
  // first_of(block_of(i)) <= i < first_of(block_of(i) + 1)
  FUSEDCUDA_HOST_DEVICE uint32_t block_of(uint32_t index) const {
    return static_cast<uint32_t>(((uint64_t{index} + 1) * blocks - 1) / count());
  }
  // Which part of the sums of a column of tiles a block leaves. From block to block, and from
  // column to column, it is at least one more.
  FUSEDCUDA_HOST_DEVICE static uint32_t part_of(uint32_t column, uint32_t block) {
    return column + block;
  }
};

struct LoraPassConfig {
  LoraPassTiles tiles;
  int64_t down_parts = 0, up_parts = 0;  // of the workspace, in floats
  bool dependent_launch = false;

  int64_t workspace_size() const { return down_parts + up_parts; }
};

inline bool lora_pass_can_run(const LoraPassParams& p, const DeviceTraits& device) {
  constexpr int64_t kMost = (int64_t{1} << 31) / kLoraPassRanks;
  const int64_t tiles = ceil_div(p.rows, kLoraPassRows) * ceil_div(p.columns, kLoraPassColumns);
  const int pitch = lora_pitch(p.rank);
  return device.wgmma && size_of(p.dtype) == 2 && p.rank <= kLoraPassRanks && p.rows > 0 &&
         p.columns > 0 && p.rows < kMost && p.columns < kMost && tiles < kMost &&
         gemm::can_be_boxed(p.x.data, p.x.stride, p.dtype) &&
         (p.down == nullptr || gemm::can_be_boxed(p.factor, p.factor_stride, p.dtype)) &&
         (p.up == nullptr || gemm::can_be_boxed(p.t, pitch, p.dtype));
}

inline LoraPassConfig choose_lora_pass_config(const LoraPassParams& p, const DeviceTraits& device) {
  LoraPassConfig config;
  LoraPassTiles& tiles = config.tiles;
  tiles.rows = static_cast<uint32_t>(ceil_div(p.rows, kLoraPassRows));
  tiles.columns = static_cast<uint32_t>(ceil_div(p.columns, kLoraPassColumns));
  tiles.blocks = std::min(tiles.count(), static_cast<uint32_t>(device.num_sms));
  const int pitch = lora_pitch(p.rank);
  if (p.down != nullptr) config.down_parts = tiles.columns * p.rows * pitch;
  if (p.up != nullptr)
    config.up_parts = int64_t{tiles.columns + tiles.blocks} * kLoraPassColumns * pitch;
  config.dependent_launch = device.dependent_launch;
  return config;
}

}  // namespace fusedcuda
