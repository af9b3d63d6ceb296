// Whether the Hopper kernels can compute a linear layer, and how they divide it.
#pragma once

#include <algorithm>

#include "common/hopper_gemm.h"
#include "linear_act.h"

namespace fusedcuda {

// Blocks that take tiles of the result; see hopper_gemm.cuh.
struct LinearActConfig {
  int tile_rows = 128;
  int tile_columns = 128;
  bool in_turns = true;  // the two computing warpgroups; else they share every tile
  int cluster = 2;       // blocks along the rows
  int group = 8;         // rows of clusters of tiles
  int splits = 1;        // of k
  int blocks = 0;
};

// The gradient is two products, of which the second one is split.
struct LinearActBwdConfig {
  LinearActConfig dx;
  LinearActConfig dweight;
  int64_t workspace_bytes = 0;
};

namespace linear_act {

// Of the products of the gradient, whose columns are those of x.
constexpr int kBwdTileRows = 128, kBwdTileColumns = 256, kNarrowTileColumns = 64;

// The copy engine wants 16-byte aligned rows.
inline bool can_be_boxed(const void* data, int64_t stride, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * size_of(dtype) % 16 == 0;
}

inline bool can_run(DType dtype, int64_t m, int64_t n, int64_t k, const DeviceTraits& device) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const bool two_bytes = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  return device.wgmma && two_bytes && m > 0 && n > 0 && k > 0 && m < kMost && n < kMost &&
         k < kMost;
}

// As many blocks as there are clusters of tiles, and no more than run at the same time.
inline void set_blocks(int64_t rows, int64_t columns, const DeviceTraits& device,
                       LinearActConfig* config) {
  const int64_t tiles = ceil_div(rows, int64_t{config->tile_rows} * config->cluster) *
                        ceil_div(columns, config->tile_columns) * config->splits;
  const int log2 = config->cluster == 1 ? 0 : config->cluster == 2 ? 1 : 2;
  const int64_t resident =
      std::min(device.num_sms / config->cluster, device.resident_clusters[0][log2]);
  config->blocks = static_cast<int>(std::min(tiles, resident)) * config->cluster;
}

}  // namespace linear_act

inline bool hopper_can_run(const LinearActParams& p, const DeviceTraits& device) {
  using linear_act::can_be_boxed;
  const bool saved_fits =
      p.saves == SavedForBackward::kNone ||
      (p.saves == SavedForBackward::kMask && p.activation == Activation::kRelu) ||
      (p.saves == SavedForBackward::kDerivative && p.activation != Activation::kRelu &&
       can_be_boxed(p.saved, p.n, p.dtype));
  const bool extra_fits =
      p.extra_k == 0 || (p.extra_a.k_is_inner && p.extra_b.k_is_inner == p.b.k_is_inner &&
                         can_be_boxed(p.extra_a.data, p.extra_a.stride, p.dtype) &&
                         can_be_boxed(p.extra_b.data, p.extra_b.stride, p.dtype));
  return linear_act::can_run(p.dtype, p.m, p.n, p.k, device) && p.a.k_is_inner && extra_fits &&
         can_be_boxed(p.a.data, p.a.stride, p.dtype) &&
         can_be_boxed(p.b.data, p.b.stride, p.dtype) &&
         can_be_boxed(p.output.data, p.output.stride, p.dtype) && saved_fits;
}

// One of the two tiles that the kernel is compiled for.
inline LinearActConfig with_tile(const LinearActParams& params, const DeviceTraits& device,
                                 bool in_turns) {
  LinearActConfig config;
  config.in_turns = in_turns;
  config.tile_columns = in_turns ? 128 : 256;
  linear_act::set_blocks(params.m, params.n, device, &config);
  return config;
}

// Long products are worth the larger tile, which needs a third less traffic.
inline LinearActConfig choose_linear_act_config(const LinearActParams& params,
                                                const DeviceTraits& device) {
  return with_tile(params, device, params.k < 2048 || params.n < 256);
}

inline bool hopper_can_run(const LinearActBwdParams& p, const DeviceTraits& device) {
  using linear_act::can_be_boxed;
  const bool saved_fits =
      p.saves == SavedForBackward::kMask ||
      (p.saves == SavedForBackward::kDerivative && can_be_boxed(p.saved, p.n, p.dtype));
  const bool dx_fits =
      p.dx.data == nullptr || (can_be_boxed(p.weight.data, p.weight.stride, p.dtype) &&
                               can_be_boxed(p.dx.data, p.dx.stride, p.dtype));
  const bool dweight_fits = p.dweight == nullptr || can_be_boxed(p.x.data, p.x.stride, p.dtype);
  return linear_act::can_run(p.dtype, p.m, p.n, p.k, device) && saved_fits && dx_fits &&
         dweight_fits && can_be_boxed(p.dy.data, p.dy.stride, p.dtype) &&
         (p.dbias == nullptr || p.dweight != nullptr);
}

// Whether they are faster than cuBLASLt's products with what those need around them. Nothing has
// been measured yet, so nothing is claimed.
inline bool hopper_is_faster(const LinearActParams&, const DeviceTraits&) { return false; }
inline bool hopper_is_faster(const LinearActBwdParams&, const DeviceTraits&) { return false; }

inline LinearActBwdConfig choose_linear_act_bwd_config(const LinearActBwdParams& params,
                                                       const DeviceTraits& device) {
  LinearActBwdConfig config;
  for (LinearActConfig* product : {&config.dx, &config.dweight}) {
    product->in_turns = false;
    product->tile_rows = linear_act::kBwdTileRows;
    product->tile_columns = params.k <= linear_act::kNarrowTileColumns
                                ? linear_act::kNarrowTileColumns
                                : linear_act::kBwdTileColumns;
  }
  linear_act::set_blocks(params.m, params.k, device, &config.dx);
  if (params.dweight == nullptr) return config;
  // dweight has few tiles and a long k (the rows of x): parts of it for all multiprocessors, of
  // 512 values at least.
  LinearActConfig& dweight = config.dweight;
  const int64_t tiles = ceil_div(params.n, int64_t{dweight.tile_rows} * dweight.cluster) *
                        ceil_div(params.k, dweight.tile_columns);
  const int64_t resident = device.num_sms / dweight.cluster;
  const int64_t most = std::max<int64_t>(1, params.m / (8 * kGemmK));
  dweight.splits = static_cast<int>(std::clamp<int64_t>(resident / tiles, 1, most));
  linear_act::set_blocks(params.n, params.k, device, &dweight);
  if (dweight.splits > 1) {
    config.workspace_bytes = dweight.splits *
                             (split_stride(params.n * params.k) + split_stride(params.n)) *
                             static_cast<int64_t>(sizeof(float));
  }
  return config;
}

}  // namespace fusedcuda
