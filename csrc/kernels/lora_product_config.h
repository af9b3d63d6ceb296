// Whether a linear layer and its adapter are one launch (lora_product.cuh), and how it is divided.
// Pure host functions without CUDA calls.
#pragma once

#include <cstdint>

#include "common/gemm_config.h"
#include "linear_act_config.h"
#include "lora.h"

namespace fusedcuda {

constexpr int kLoraProductRows = linear_act::kTileRows;  // that a counter stands for
constexpr int kLoraProductMostRank = 16;                 // sums of a warp that makes t

// Floats of a block for parts of t: of two turns, of two of the three warps that make it.
constexpr int kLoraProductParts = 2 * 16 * 16;
inline int64_t lora_product_parts(int blocks) { return int64_t{2} * kLoraProductParts * blocks; }

inline int64_t lora_product_counters(int64_t rows) { return ceil_div(rows, kLoraProductRows); }

inline bool lora_product_can_run(const LoraProductParams& p, const DeviceTraits& device) {
  return hopper_can_run(p.linear, device) && p.rank <= kLoraProductMostRank &&
         p.linear.k % 8 == 0 && gemm::can_be_boxed(p.down.data, p.down.stride, p.linear.dtype);
}

inline GemmConfig choose_lora_product_config(const LoraProductParams& p,
                                             const DeviceTraits& device) {
  GemmConfig config = linear_act::forward_tiles(p.linear, linear_act::kColumnsTogether);
  gemm::set_blocks(p.linear.m, p.linear.n, device, &config);
  return config;
}

}  // namespace fusedcuda
