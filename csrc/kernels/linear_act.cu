// What a linear layer act(x @ weight.T + bias) consists of beside its products of our own
// (linear_act_product.cu, linear_act_product_bwd.cu):
//
// - elementwise kernels for the products that cuBLASLt makes, y = act(z) and dz = dy act'(z)
//   (linear_act_rows.cuh), the latter with its sum over m (linear_act_columns.cuh);
// - layers of few inputs (linear_act_narrow.cuh), products of one output (linear_act_dot.cuh), and
//   the gradient of a layer of one output (linear_act_one_output.cuh).
#include <algorithm>
#include <cstdint>

#include "common/iteration.h"
#include "common/launch.h"
#include "common/row_launch.cuh"
#include "linear_act.h"
#include "linear_act_columns.cuh"
#include "linear_act_config.h"
#include "linear_act_dot.cuh"
#include "linear_act_narrow.cuh"
#include "linear_act_one_output.cuh"
#include "linear_act_rows.cuh"

namespace fusedcuda {

cudaError_t launch_act_rows(const ActRowsParams& p, cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return cudaSuccess;
  const bool is_mask = p.saves == SavedForBackward::kMask;
  ActRowsKernelParams params = {};
  params.input = p.input.data;
  params.output = p.output.data;
  params.saved = p.saved;
  params.input_stride = p.input.stride;
  params.output_stride = p.output.stride;
  params.saved_stride = is_mask ? mask_row_bytes(p.n) : p.n;
  params.activation = p.activation;
  params.saves = p.saves;
  return with_type(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kVec = kVectorWidth<T>;
    auto start = [&](auto kernel, int64_t of_row, const auto&... more) {
      constexpr int64_t kMostBlocks = 1 << 16;
      params.count = p.m * of_row;
      params.of_row = Divider::make(of_row);
      const int64_t blocks = std::min(ceil_div(params.count, kActRowsThreads), kMostBlocks);
      return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kActRowsThreads), p.dependent,
                    stream, params, more...);
    };
    const bool vectors = linear_act::can_load_vectors(p);
    if (is_mask && !p.backward) {
      // Of whole bytes.
      return vectors && p.n % 8 == 0 ? start(relu_mask_kernel<T, kVec>, p.n / 8, p.n)
                                     : start(relu_mask_kernel<T, 1>, ceil_div(p.n, 8), p.n);
    }
    if (p.backward) {
      return vectors ? start(act_rows_bwd_kernel<T, kVec>, p.n / kVec)
                     : start(act_rows_bwd_kernel<T, 1>, p.n);
    }
    return vectors ? start(act_rows_kernel<T, kVec>, p.n / kVec)
                   : start(act_rows_kernel<T, 1>, p.n);
  });
}

cudaError_t launch_column_sums(const ColumnSumsParams& params, const ColumnSumsConfig& config,
                               void* workspace, cudaStream_t stream) {
  if (params.batch == 0 || params.rows.n == 0) return cudaSuccess;
  return with_type(params.rows.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return linear_act::run_column_sums<T>(params, config, workspace, stream);
  });
}

cudaError_t launch_pad_rows(const PadRowsParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.padded_columns == 0) return cudaSuccess;
  constexpr int64_t kRowsOfBlock = kActRowsThreads / kWarpSize, kMostBlocks = 1 << 14;
  const int64_t blocks = std::min(ceil_div(params.rows, kRowsOfBlock), kMostBlocks);
  return launch(pad_rows_kernel<uint16_t>, dim3(static_cast<unsigned>(blocks)),
                dim3(kActRowsThreads), params.dependent, stream, params);
}

cudaError_t launch_dot_rows(const DotRowsParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.m == 0) return cudaSuccess;
  constexpr int kVec = kVectorBytes / 2;
  auto in_vectors = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 && stride % kVec == 0;
  };
  const bool vectors = p.k % kVec == 0 && p.x.k_is_inner && p.weight_step == 1 &&
                       in_vectors(p.x.data, p.x.stride | p.x_batch) &&
                       in_vectors(p.weight, p.weight_batch);
  constexpr int64_t kRowsOfBlock = 4 * kDotRowsThreads / kWarpSize, kMostBlocks = 1 << 14;
  const dim3 grid(static_cast<unsigned>(std::min(ceil_div(p.m, kRowsOfBlock), kMostBlocks)),
                  static_cast<unsigned>(p.batch));
  auto start = [&](auto kernel) {
    return launch(kernel, grid, dim3(kDotRowsThreads), p.dependent, stream, p);
  };
  if (p.dtype == DType::kFloat16)
    return start(vectors ? dot_rows_kernel<__half, kVec> : dot_rows_kernel<__half, 1>);
  return start(vectors ? dot_rows_kernel<__nv_bfloat16, kVec> : dot_rows_kernel<__nv_bfloat16, 1>);
}

cudaError_t launch_one_output_bwd(const OneOutputBwdParams& params, const OneOutputConfig& config,
                                  void* workspace, cudaStream_t stream) {
  return params.dtype == DType::kFloat16
             ? linear_act::run_one_output_bwd<__half>(params, config, workspace, stream)
             : linear_act::run_one_output_bwd<__nv_bfloat16>(params, config, workspace, stream);
}

cudaError_t launch_linear_narrow(const LinearActParams& p, const NarrowConfig& config,
                                 bool dependent, cudaStream_t stream) {
  LinearNarrowParams params = {narrow_params(p), p.activation, p.saves, p.saved,
                               mask_row_bytes(p.n)};
  params.rows.config = config;
  auto start = [&](auto kernel) {
    return launch(kernel, dim3(static_cast<unsigned>(config.blocks())), dim3(kNarrowThreads),
                  dependent, stream, params);
  };
  auto start_type = [&](auto zero) {
    using T = decltype(zero);
    return is_plain(p) ? start(linear_narrow_kernel<T, true>)
                       : start(linear_narrow_kernel<T, false>);
  };
  return p.dtype == DType::kFloat16 ? start_type(__half()) : start_type(__nv_bfloat16());
}

}  // namespace fusedcuda
