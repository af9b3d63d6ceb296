// Whether the Hopper kernel can compute the product of a gated MLP, and how it divides it. Pure
// host functions without CUDA calls.
#pragma once

#include "common/gemm_config.h"
#include "gated_mlp.h"

namespace fusedcuda {

namespace gated_mlp {

constexpr int kTileRows = 128;
constexpr int kTileColumns = 64;  // of h: as many of gate and of up are computed

}  // namespace gated_mlp

inline bool gated_product_can_run(const GatedProductParams& p, const DeviceTraits& device) {
  const bool factors_fit = gemm::can_be_boxed(p.x.data, p.x.stride, p.dtype) &&
                           gemm::can_be_boxed(p.w_gate.data, p.w_gate.stride, p.dtype) &&
                           gemm::can_be_boxed(p.w_up.data, p.w_up.stride, p.dtype);
  // up begins in the middle of a row of gate_up.
  const bool results_fit = gemm::can_be_boxed(p.h.data, p.h.stride, p.dtype) &&
                           (p.gate_up == nullptr || gemm::can_be_boxed(p.gate_up, p.f, p.dtype));
  return gemm::can_run(p.dtype, p.m, p.f, p.k, device) && factors_fit && results_fit;
}

// Tiles of 128 x 96 (2747 us instead of 2713 at 8192 x 14336 x 4096), of both warpgroups together
// (2807) and single blocks (2903) lost (H200, bench/tuning/gated_mlp_configs.cu).
inline GemmConfig choose_gated_product_config(const GatedProductParams& params,
                                              const DeviceTraits& device) {
  GemmConfig config;
  config.group = gemm::group_for(2 * params.f * params.k * size_of(params.dtype));
  config.tile_rows = gated_mlp::kTileRows;
  config.tile_columns = gated_mlp::kTileColumns;
  gemm::set_blocks(params.m, params.f, device, &config);
  return config;
}

}  // namespace fusedcuda
