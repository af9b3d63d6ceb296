// RMSNorm and LayerNorm over the last dimension:
//
//   h = x + residual (rounded, and returned)       or h = x
//   y = (h - mean) * rstd * (weight + offset) + bias, rstd = 1 / sqrt(var + eps)
//
// RMSNorm: mean = 0, var = mean of h^2, no bias (Zhang & Sennrich, arXiv:1910.07467). LayerNorm:
// var = mean of (h - mean)^2, in two passes (Ba, Kiros & Hinton, arXiv:1607.06450).
//
// Bound by memory. The forward reads x once and writes y once: 4 bytes an element for 16-bit types,
// 8 with a residual. A row at work is in registers, as the raw 16-byte vectors, above 16,384
// columns of 16 bits in the registers of a cluster of blocks; so nothing is read twice up to
// 262,144 columns. The statistics cost one barrier (LayerNorm: two).
//
// - norm_kernel: a row in a block, or less of one;
// - norm_pipeline_kernel: a row in a cluster of blocks; rows that begin inside of a vector;
// - norm_narrow_kernel: a row in a thread, of up to eight columns;
// - norm_stream_kernel: a block walks along its row two or three times. For rows beyond clusters,
//   GPUs without them, and float64.
//
// Kernels: norm_fwd.cuh. The backward: norm_bwd.cu.

#include <type_traits>

#include "common/row_launch.cuh"
#include "norm_config.h"
#include "norm_fwd.cuh"
#include "norm_narrow.cuh"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Launchers
// ------------------------------------------------------------------------------------------------

namespace norm {

template <typename T>
cudaError_t forward(const NormParams& p, const NormConfig& config, cudaStream_t stream) {
  const RowConfig& row = config.row;
  if (row.path == RowPath::kStream) {
    return launch_rows_with(norm_stream_kernel<T>, row, config.shared_bytes, stream, p);
  }
  if constexpr (!std::is_same_v<T, double>) {
    auto start = [&](auto kernel) {
      return launch_rows_with(kernel, row, config.shared_bytes, stream, p);
    };
    if (config.narrow) {
      return start(p.columns == 1 ? norm_narrow_kernel<T, 1>
                                  : norm_narrow_kernel<T, kNarrowColumns>);
    }
    // The unaligned kernel looks for a residual itself: fewer kernels to compile.
    const bool residual = p.residual.data != nullptr;
    auto choose = [&](auto items, auto centered) {
      constexpr int kItems = decltype(items)::value;
      constexpr bool kCentered = decltype(centered)::value;
      if (!row.aligned) return start(norm_kernel<T, kItems, false, true, kCentered>);
      return residual ? start(norm_kernel<T, kItems, true, true, kCentered>)
                      : start(norm_kernel<T, kItems, true, false, kCentered>);
    };
    auto choose_items = [&](auto centered) {
      constexpr bool kCentered = decltype(centered)::value;
      if (row.path == RowPath::kPipeline) {
        auto start_pipeline = [&](auto kernel) {
          return launch_rows_with(kernel, row, config.shared_bytes, stream, p, config.stages,
                                  config.phases);
        };
        switch (config.access) {
          case RowAccess::kAligned:
            return start_pipeline(
                norm_pipeline_kernel<T, kNormItems, RowAccess::kAligned, kCentered>);
          case RowAccess::kPhased:
            return start_pipeline(
                norm_pipeline_kernel<T, kNormItems, RowAccess::kPhased, kCentered>);
          default:
            return start_pipeline(
                norm_pipeline_kernel<T, kNormItems, RowAccess::kShifted, kCentered>);
        }
      }
      return row.items == 1 ? choose(std::integral_constant<int, 1>(), centered)
                            : choose(std::integral_constant<int, kNormItems>(), centered);
    };
    return p.kind == NormKind::kRms ? choose_items(std::false_type())
                                    : choose_items(std::true_type());
  }
  return cudaErrorInvalidValue;
}

}  // namespace norm

cudaError_t launch_norm(const NormParams& params, const NormConfig& config, cudaStream_t stream) {
  if (config.row.path == RowPath::kEmpty) return cudaSuccess;
  return with_type(params.dtype, [&](auto type) {
    return norm::forward<typename decltype(type)::type>(params, config, stream);
  });
}

}  // namespace fusedcuda
