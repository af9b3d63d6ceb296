// How the kernels of dlrm.cu are launched. Pure host functions without CUDA calls or global state,
// so that every decision can be tested on a machine without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dlrm.h"
#include "dlrm_layout.h"

namespace fusedcuda {
namespace dlrm_detail {

// A block's own share of shared memory that the GPU takes for itself.
constexpr size_t kReservedBytes = 1 << 10;

inline bool all_multiples(int64_t unit, std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [=](int64_t v) { return v % unit == 0; });
}

inline bool vectors_are_aligned(const DotVectors& p) {
  const int64_t vec = kVectorBytes / size_of(p.dtype);
  return is_aligned(p.dense) && is_aligned(p.embeddings) &&
         all_multiples(vec, {p.columns, p.dense_stride, p.sample_stride, p.vector_stride});
}

inline bool rows_are_aligned(const DotVectors& p, const void* data, int64_t stride) {
  return is_aligned(data) && all_multiples(kVectorBytes / size_of(p.dtype), {p.width, stride});
}

// What an SM has at a time.
struct DotResidency {
  int64_t warps_of_block = 0, blocks = 0;

  int64_t warps() const { return warps_of_block * blocks; }
};

// With blocks of as many warps as let most of them be on an SM together.
inline DotResidency choose_residency(const DotLayout& layout, int tiles, bool is_backward,
                                     const DeviceTraits& device) {
  const int64_t most_blocks = tiles == kFewDotTiles ? kFewTilesBlocks : kManyTilesBlocks;
  DotResidency best;
  for (int64_t warps = kDotWarps; warps >= 1; warps /= 2) {
    const size_t bytes = layout.block_bytes(is_backward, warps);
    if (bytes > device.shared_bytes_of_block) continue;
    const int64_t fitting = device.shared_bytes_of_sm / (bytes + kReservedBytes);
    const DotResidency residency = {warps, std::min(fitting, most_blocks * kDotWarps / warps)};
    if (residency.warps() > best.warps()) best = residency;
  }
  return best;
}

inline void choose_warps(const DotVectors& p, bool is_backward, const DeviceTraits& device,
                         DotConfig* config) {
  config->tiles = p.vectors <= 16 * kFewDotTiles ? kFewDotTiles : kManyDotTiles;
  config->stages = kDotStages;
  const DotResidency residency =
      choose_residency(DotLayout(p, config->tiles, kDotStages), config->tiles, is_backward, device);
  // Of few samples all SMs have some.
  int64_t warps = residency.warps_of_block;
  while (warps > 1 && ceil_div(p.batch, warps) < device.num_sms) warps /= 2;
  config->threads = static_cast<int>(warps) * kWarpSize;
  config->shared_bytes =
      DotLayout(p, config->tiles, config->stages).block_bytes(is_backward, warps);
  config->blocks = std::min(ceil_div(p.batch, warps), residency.blocks * device.num_sms);
}

inline DotConfig choose_dot_config(const DotVectors& p, bool is_backward, const void* row,
                                   int64_t row_stride, const DeviceTraits& device) {
  DotConfig config;
  if (p.batch == 0) return config;
  config.aligned = vectors_are_aligned(p);
  config.aligned_row = rows_are_aligned(p, row, row_stride);
  config.dependent_launch = device.dependent_launch;
  const size_t itemsize = size_of(p.dtype);
  if (itemsize == 2) {
    config.path = DotPath::kTensorCores;
    choose_warps(p, is_backward, device, &config);
    return config;
  }
  config.path = DotPath::kThreads;
  const DotChunkLayout layout(p, static_cast<int>(itemsize));
  const int elements = is_backward ? layout.backward_elements() : layout.forward_elements();
  const int tiles = is_backward ? layout.backward_tiles() : layout.forward_tiles();
  config.threads = std::min<int>(ceil_div(tiles, kWarpSize) * kWarpSize, kDotThreads);
  config.shared_bytes = elements * itemsize;
  config.blocks = std::min<int64_t>(p.batch, int64_t{kDotBlocksOfSm} * device.num_sms);
  return config;
}

}  // namespace dlrm_detail

inline DotConfig choose_dot_interaction_config(const DotParams& p, const DeviceTraits& device) {
  return dlrm_detail::choose_dot_config(p, false, p.output, p.width, device);
}

inline DotConfig choose_dot_interaction_bwd_config(const DotBwdParams& p,
                                                   const DeviceTraits& device) {
  return dlrm_detail::choose_dot_config(p, true, p.grad, p.grad_stride, device);
}

// A warp a row, kBceRows rows at a time.
inline BceConfig choose_linear_sigmoid_bce_config(const BceParams& p, const DeviceTraits& device) {
  BceConfig config;
  config.aligned = rows_are_aligned(&p.x, 1, p.columns, size_of(p.dtype)) && is_aligned(p.weight);
  config.vec = config.aligned ? vector_width(p.dtype) : 1;
  config.threads_x = kWarpSize;
  config.threads_y = kBceThreads / kWarpSize;
  const int64_t wanted = ceil_div(p.rows, int64_t{config.threads_y} * kBceRows);
  // One block at least: also the loss of no rows is written.
  config.blocks = std::clamp<int64_t>(wanted, 1, int64_t{kBceBlocksOfSm} * device.num_sms);
  config.workspace_size = p.reduced ? config.blocks : 0;
  config.dependent_launch = device.dependent_launch;
  return config;
}

inline OneOutputConfig choose_linear_sigmoid_bce_bwd_config(const BceBwdParams& p,
                                                            const DeviceTraits& device) {
  return choose_one_output_config(p, p.dtype, device);
}

}  // namespace fusedcuda
