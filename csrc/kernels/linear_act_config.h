// Whether the Hopper kernels can compute a linear layer, and how they divide it.
#pragma once

#include <algorithm>

#include "common/gemm_config.h"
#include "common/narrow_rows.h"
#include "linear_act.h"

namespace fusedcuda {

// The gradient is two products, of which the second one is split.
struct LinearActBwdConfig {
  GemmConfig dx;
  GemmConfig dweight;
  int64_t workspace_bytes = 0;
};

namespace linear_act {

// Of the forward product: tiles that the warpgroups compute in turns, so that an epilogue is hidden
// by the other's products; or together, with a third less traffic, while the tensor cores wait for
// the epilogue, which is then short: no activation.
constexpr int kTileRows = 128, kColumnsInTurns = 128, kColumnsTogether = 256;

// Of the products of the gradient, whose columns are those of x.
constexpr int kBwdTileRows = 128, kNarrowTileColumns = 64;
constexpr int kBwdTileColumns[] = {256, 192};

}  // namespace linear_act

inline bool hopper_can_run(const LinearActParams& p, const DeviceTraits& device) {
  const bool saved_fits =
      p.saves == SavedForBackward::kNone ||
      (p.saves == SavedForBackward::kMask && p.activation == Activation::kRelu) ||
      (p.saves == SavedForBackward::kDerivative && p.activation != Activation::kRelu &&
       gemm::can_be_boxed(p.saved, p.n, p.dtype));
  const bool extra_fits =
      p.extra_k == 0 || (p.extra_a.k_is_inner && p.extra_b.k_is_inner == p.b.k_is_inner &&
                         gemm::can_be_boxed(p.extra_a.data, p.extra_a.stride, p.dtype) &&
                         gemm::can_be_boxed(p.extra_b.data, p.extra_b.stride, p.dtype));
  return gemm::can_run(p.dtype, p.m, p.n, p.k, device) && p.a.k_is_inner && extra_fits &&
         gemm::can_be_boxed(p.a.data, p.a.stride, p.dtype) &&
         gemm::can_be_boxed(p.b.data, p.b.stride, p.dtype) &&
         gemm::can_be_boxed(p.output.data, p.output.stride, p.dtype) && saved_fits;
}

namespace linear_act {

// How long a tile of the forward product takes, in columns times blocks of k. Measured on an H200
// at its highest clock (bench/tuning/linear_products.cu), 2048 to 8192 x 4096 to 14336 x 4096 to
// 14336: by the time of a round, columns of a tile computed together cost 7 % less each, and the
// tile 1.6 us more, for what is then not hidden. (192 columns in turns cost 4 % less, without room
// for an epilogue beside the sums.)
inline double estimate_tile(int64_t k, int columns) {
  constexpr double kExposed = 620;  // 1.6 us
  const double products = static_cast<double>(ceil_div(k, kGemmK)) * columns;
  return columns == kColumnsTogether ? 0.93 * products + kExposed : products;
}

}  // namespace linear_act

namespace linear_act {

inline GemmConfig forward_tiles(const LinearActParams& p, int columns) {
  GemmConfig config;
  config.group = gemm::group_for(p.n * p.k * size_of(p.dtype));
  config.tile_rows = kTileRows;
  config.tile_columns = columns;
  return config;
}

}  // namespace linear_act

inline GemmConfig choose_linear_act_config(const LinearActParams& params,
                                           const DeviceTraits& device) {
  const GemmConfig in_turns = linear_act::forward_tiles(params, linear_act::kColumnsInTurns);
  const GemmConfig together = linear_act::forward_tiles(params, linear_act::kColumnsTogether);
  auto estimate = [&](const GemmConfig& config) {
    const auto rounds = static_cast<double>(gemm::count_rounds(params.m, params.n, device, config));
    return rounds * linear_act::estimate_tile(params.k, config.tile_columns);
  };
  const bool is_plain =
      params.activation == Activation::kNone && params.saves == SavedForBackward::kNone;
  GemmConfig best = is_plain && estimate(together) < estimate(in_turns) ? together : in_turns;
  gemm::set_blocks(params.m, params.n, device, &best);
  return best;
}

inline bool hopper_can_run(const LinearActBwdParams& p, const DeviceTraits& device) {
  const bool dx_fits =
      p.dx.data == nullptr || (gemm::can_be_boxed(p.weight.data, p.weight.stride, p.dtype) &&
                               gemm::can_be_boxed(p.dx.data, p.dx.stride, p.dtype));
  const bool dweight_fits =
      p.dweight == nullptr || gemm::can_be_boxed(p.x.data, p.x.stride, p.dtype);
  return gemm::can_run(p.dtype, p.m, p.n, p.k, device) && p.mask != nullptr && dx_fits &&
         dweight_fits && gemm::can_be_boxed(p.dy.data, p.dy.stride, p.dtype) &&
         (p.dbias == nullptr || p.dweight != nullptr);
}

// Whether it is faster than cuBLASLt's product with what that needs around it: where its tiles fill
// the card. bench/tuning/linear_act_configs.cu on an H200, against the algorithm that cuBLASLt
// recommends, 65536x512x16 to 8192x14336x4096: 1.04 to 1.28 times as fast without anything for the
// gradient, 0.99 for gelu_tanh at 65536x1024x480; cuBLASLt stores a mask or z in a second kernel.
// Where tiles are half empty cuBLASLt has smaller ones, or splits k: 16x14336x4096 takes it 31 us,
// and tiles of 128 rows 92; 128x14336x4096 34 and 65. Where n or k is not a multiple of 8, cuBLASLt
// takes 5 to 8 times as long although the rows lie at multiples of 16 bytes: 512x768x50257 315 us,
// ours with two of eleven tiles useful 239; 1024x768x50257 672 and 249; 4096x50257x768 3571 and
// 446.
inline bool hopper_is_faster(const LinearActParams& params, const DeviceTraits& device) {
  const bool is_even = params.n % 8 == 0 && params.k % 8 == 0;
  const double least_useful_part = is_even ? 0.7 : 0.15;
  const GemmConfig config = choose_linear_act_config(params, device);
  return gemm::useful_part(params.m, params.n, device, config) >= least_useful_part;
}

// The gradient of a layer of one output (linear_act_one_output.cuh), whose x is in rows. Of 16-bit
// types a forward saves no z.
inline bool one_output_can_run(const OneOutputBwdParams& p) {
  return size_of(p.dtype) == 2 && p.columns > 0 && (p.dx.data != nullptr || p.dweight != nullptr) &&
         p.saves != SavedForBackward::kPreActivation;
}

// Layers of few inputs (linear_act_narrow.cuh).
constexpr int narrow_blocks_of_sm(bool is_plain) { return is_plain ? 4 : 2; }

// No activation or a ReLU, and nothing is saved: kernels that need fewer registers.
inline bool is_plain(const LinearActParams& p) {
  return p.saves == SavedForBackward::kNone &&
         (p.activation == Activation::kNone || p.activation == Activation::kRelu);
}

inline NarrowParams narrow_params(const LinearActParams& p) {
  return {p.m,      p.n, static_cast<int>(std::min<int64_t>(p.k, kNarrowMostK + 1)),
          p.a.data, p.b, p.bias,
          p.output, {}};
}

inline bool narrow_can_run(const LinearActParams& p) {
  const bool saves_elements = p.saves == SavedForBackward::kDerivative;
  return narrow_can_run(narrow_params(p), p.dtype) && p.extra_k == 0 && p.a.k_is_inner &&
         (p.m == 1 || p.a.stride == p.k) && p.b.k_is_inner &&
         p.saves != SavedForBackward::kPreActivation &&
         (!saves_elements || gemm::can_be_boxed(p.saved, p.n, p.dtype));
}

inline NarrowConfig choose_narrow_config(const LinearActParams& p, int num_sms) {
  return choose_narrow_config(p.m, p.n, num_sms, narrow_blocks_of_sm(is_plain(p)));
}

namespace linear_act {

// How long it takes to write and read the parts of an m x n result and add them up, in columns of
// tiles times blocks of k. Measured: a block of 256 columns takes 0.7 us; 4e6 bytes a us, 3 us for
// the second kernel.
inline double estimate_parts(int64_t m, int64_t n, const GemmConfig& config) {
  constexpr double kUsPerColumn = 0.7 / 256, kBytesPerUs = 4e6, kLaunchUs = 3;
  const double us =
      config.splits == 1 ? 0 : kLaunchUs + config.splits * (8.0 * m * n) / kBytesPerUs;
  return us / kUsPerColumn;
}

// How long a product m x n x k takes, in the same unit: rounds of tiles one behind the other.
inline double estimate(int64_t m, int64_t n, int64_t k, const DeviceTraits& device,
                       const GemmConfig& config) {
  const int64_t rounds = gemm::count_rounds(m, n, device, config);
  const int64_t blocks = ceil_div(ceil_div(k, kGemmK), config.splits);
  return static_cast<double>(rounds * blocks * config.tile_columns) + estimate_parts(m, n, config);
}

// Of dweight and dbias.
inline int64_t bytes_of_parts(const LinearActBwdParams& p, int splits) {
  const int64_t values = split_stride(p.n * p.k) + split_stride(p.n);
  return splits == 1 ? 0 : splits * values * static_cast<int64_t>(sizeof(float));
}

// Of the tiles and numbers of parts the fastest. `most_splits` of k.
inline GemmConfig choose_bwd_product(int64_t m, int64_t n, int64_t k, int64_t most_splits,
                                     const DeviceTraits& device) {
  GemmConfig best;
  double least = 0;
  auto consider = [&](int columns) {
    GemmConfig config;
    config.tile_rows = kBwdTileRows;
    config.tile_columns = columns;
    // With every cluster always busy. More parts than add to that what has been found are not worth
    // the host's time: a call chooses anew.
    const double busy = static_cast<double>(gemm::count_tiles(m, n, config) * ceil_div(k, kGemmK)) *
                        columns / static_cast<double>(gemm::resident_clusters(device, config));
    for (config.splits = 1; config.splits <= most_splits; ++config.splits) {
      if (least > 0 && busy + estimate_parts(m, n, config) >= least) break;
      const double time = estimate(m, n, k, device, config);
      if (least == 0 || time < least) {
        least = time;
        best = config;
      }
    }
  };
  if (n <= kNarrowTileColumns) {
    consider(kNarrowTileColumns);
  } else {
    for (const int columns : kBwdTileColumns) consider(columns);
  }
  gemm::set_blocks(m, n, device, &best);
  return best;
}

}  // namespace linear_act

inline LinearActBwdConfig choose_linear_act_bwd_config(const LinearActBwdParams& params,
                                                       const DeviceTraits& device) {
  using linear_act::choose_bwd_product;
  LinearActBwdConfig config;
  config.dx = choose_bwd_product(params.m, params.k, params.n, 1, device);
  if (params.dweight == nullptr) return config;
  // dweight has few tiles and a long k (the rows of x): parts of 512 values at least.
  const int64_t most = std::clamp<int64_t>(params.m / (8 * kGemmK), 1, device.num_sms);
  config.dweight = choose_bwd_product(params.n, params.k, params.m, most, device);
  config.workspace_bytes = linear_act::bytes_of_parts(params, config.dweight.splits);
  return config;
}

// Whether it is faster than dz by a kernel of its own and cuBLASLt's products of that. Measured on
// an H200 (bench/tuning/linear_act_training.py), in times of ours: 65536 x 512 x 16, 1.6; x 1024 x
// 480, 1.17; x 256 x 512, 1.11; x 512 x 1024, 1.05; x 1024 x 1024, 1.02; x 4096 x 1024, 1.0; x 3072
// x 768, 0.98; x 1024 x 4096, 0.94; 8192 x 512 x 1024 to 4096 x 1024, 0.94 to 0.91, x 3072 x 768,
// 0.82; 2048 x 1024 x 4096, 0.88. A product of ours takes a fifth longer, for which it saves a pass
// over dy; the pass is short where the products are long (k) and where dz stays in the L2. (So many
// rows are 128 tiles of clusters or more, which keep a Hopper GPU busy.)
inline bool hopper_is_faster(const LinearActBwdParams& params, const DeviceTraits& /*device*/) {
  constexpr int64_t kManyRows = 32768, kMostInputs = 1024, kFewestOutputs = 4 * kGemmK;
  return params.m >= kManyRows && params.k <= kMostInputs && params.n >= kFewestOutputs;
}

}  // namespace fusedcuda
