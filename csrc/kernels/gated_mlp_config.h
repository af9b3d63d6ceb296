// Whether the Hopper kernel can compute the product of a gated MLP, and how it divides it. Pure
// host functions without CUDA calls.
#pragma once

#include "common/gemm_config.h"
#include "gated_mlp.h"

namespace fusedcuda {

namespace gated_mlp {

// Columns of h: as many of gate and of up are computed. With few rows blocks by themselves, and the
// narrower tile; with many, clusters of two, which fetch less.
constexpr int kTileRows = 128;
constexpr int kColumnsOfFew = 64, kColumnsOfMany = 96;
constexpr int64_t kMostOfFew = 1024;

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

// Measured on an H200 at its highest clock (bench/tuning/gated_mlp_configs.cu), K = 4096, F =
// 14336: of 8192 rows, 2407 us with 96 columns and clusters, 2447 with 64 and without, 2512 with 64
// and clusters, 2458 and more with both warpgroups together; of 512 rows 168.0, 162.7 and 167.5; of
// 128 rows 110, 65 and 122. (At its power limit it takes 2870, 3036 and 2936.)
inline GemmConfig choose_gated_product_config(const GatedProductParams& params,
                                              const DeviceTraits& device) {
  GemmConfig config;
  const bool has_few_rows = params.m <= gated_mlp::kMostOfFew;
  config.group = gemm::group_for(2 * params.f * params.k * size_of(params.dtype));
  config.tile_rows = gated_mlp::kTileRows;
  config.tile_columns = has_few_rows ? gated_mlp::kColumnsOfFew : gated_mlp::kColumnsOfMany;
  config.cluster = has_few_rows ? 1 : 2;
  gemm::set_blocks(params.m, params.f, device, &config);
  return config;
}

}  // namespace fusedcuda
