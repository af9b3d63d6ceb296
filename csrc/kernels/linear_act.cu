// act(x @ weight.T + bias): a matrix product on the tensor cores whose sums never leave the chip
// before the bias and the activation have been applied.
//
//   y[m, n] = act(sum_k a[m, k] b[n, k] + bias[n])
//
// Memory for 16-bit elements: 2 (m k + n k + m n) bytes, and for the gradient m n / 8 (ReLU) or
// 2 m n (the derivative of the other activations). An epilogue in a kernel of its own would read
// and write 4 m n more: 65536 x 1024 x 480 takes as long for that as for the product.
//
// The gradient of a ReLU is two products of dz = dy * act'(z), which never exists in memory:
//
//   dx = dz @ weight      dweight = dz.T @ x, dbias = sum of dz over m
//
// Memory: dy and what was saved once for each, x, weight and the results once. dweight is split
// along m, and its parts are added up in a fixed order.
//
// And elementwise kernels for the products that cuBLASLt makes: y = act(z), dz = dy act'(z), the
// latter with its sum over m (linear_act_columns.cuh). Layers of few inputs, and the gradient of
// those of one output, have kernels of their own (linear_act_narrow.cuh,
// linear_act_one_output.cuh).
#include "common/gemm_launch.cuh"
#include "common/row_launch.cuh"
#include "common/run_gemm.cuh"
#include "common/sum_splits.cuh"
#include "linear_act.h"
#include "linear_act_bwd_epilogue.cuh"
#include "linear_act_columns.cuh"
#include "linear_act_config.h"
#include "linear_act_dot.cuh"
#include "linear_act_forward.cuh"
#include "linear_act_narrow.cuh"
#include "linear_act_one_output.cuh"
#include "linear_act_rows.cuh"

namespace fusedcuda {

// --------------------------------------------------------------------------------------------------
// Kernels
// --------------------------------------------------------------------------------------------------

// Without kActivates there is no activation, and nothing is saved.
template <typename Gemm, bool kActivates = true>
__global__ void __launch_bounds__(kGemmThreads, 1) linear_act_kernel_sm90(
    const __grid_constant__ GemmKernelParams<LinearActEpilogueParams> params) {
#if defined(FUSEDCUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_gemm<Gemm, LinearActEpilogue<Gemm, kActivates>>(params.factors, params.tiles,
                                                      params.epilogue);
#else
  __trap();
#endif
}

template <typename Gemm>
__global__ void __launch_bounds__(kGemmThreads, 1) linear_act_dx_kernel_sm90(
    const __grid_constant__ GemmKernelParams<PlainEpilogueParams> params) {
#if defined(FUSEDCUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_gemm<Gemm, PlainEpilogue<Gemm>>(params.factors, params.tiles, params.epilogue);
#else
  __trap();
#endif
}

// dweight and dbias, in parts.
template <typename Gemm>
__global__ void __launch_bounds__(kGemmThreads, 1) linear_act_dweight_kernel_sm90(
    const __grid_constant__ GemmKernelParams<PartialsEpilogueParams> params) {
#if defined(FUSEDCUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_gemm<Gemm, PartialsEpilogue<Gemm>>(params.factors, params.tiles, params.epilogue);
#else
  __trap();
#endif
}

// --------------------------------------------------------------------------------------------------
// Launchers
// --------------------------------------------------------------------------------------------------

namespace linear_act {

// --- Forward

template <typename Gemm, bool kActivates = true>
cudaError_t run(const LinearActParams& p, const GemmConfig& config, cudaStream_t stream) {
  GemmKernelParams<LinearActEpilogueParams> params;
  const cudaError_t status = describe_forward<Gemm>(p, config, &params);
  if (status != cudaSuccess) return status;
  return gemm::start<Gemm>(linear_act_kernel_sm90<Gemm, kActivates>, config, stream, params);
}

template <typename T, bool kBKInner>
cudaError_t run_tile(const LinearActParams& params, const GemmConfig& config, cudaStream_t stream) {
  return config.tile_columns == kColumnsTogether
             ? run<TogetherGemm<T, kBKInner>, /*kActivates=*/false>(params, config, stream)
             : run<InTurnsGemm<T, kBKInner>>(params, config, stream);
}

template <typename T>
cudaError_t run_layout(const LinearActParams& params, const GemmConfig& config,
                       cudaStream_t stream) {
  return params.b.k_is_inner ? run_tile<T, true>(params, config, stream)
                             : run_tile<T, false>(params, config, stream);
}

constexpr auto kAnyKernel = linear_act_kernel_sm90<InTurnsGemm<__nv_bfloat16, true>>;

// --- Gradient

// dweight has no chunks to store. Stages of b, and of the scaled factor, as many as there is room
// for.
template <typename T, int kColumns, bool kIsDx>
using BwdGemm = HopperGemm<T, kBwdTileRows / 2, kColumns, false, 2, kColumns == 256 ? 4 : 5, kIsDx,
                           false, GemmScale::kMask, kIsDx ? 2 : 0, 3>;

// What multiplies dy, in boxes of rows like those of the factor a.
template <typename Gemm>
cudaError_t describe_mask(const LinearActBwdParams& p, bool k_is_inner, TensorMap* map) {
  BoxedMatrix matrix = gemm::boxed(p.mask, p.m, mask_row_bytes(p.n), mask_row_bytes(p.n),
                                   k_is_inner ? Gemm::kTileRows : kGemmK);
  matrix.element_bytes = 1;
  return make_tensor_map(matrix, map);
}

template <typename Gemm>
cudaError_t run_dx(const LinearActBwdParams& p, const GemmConfig& config, cudaStream_t stream) {
  GemmKernelParams<PlainEpilogueParams> params;
  const GemmFactor dy = {p.dy.data, p.dy.stride, true};
  const GemmFactor weight = {p.weight.data, p.weight.stride, false};
  cudaError_t status = describe<Gemm>(dy, weight, p.m, p.k, p.n, config, &params);
  if (status == cudaSuccess) status = describe_mask<Gemm>(p, true, &params.factors.scale);
  if (status == cudaSuccess)
    status = gemm::describe_stored(p.dx.data, p.m, p.k, p.dx.stride, &params.epilogue.output);
  if (status != cudaSuccess) return status;
  params.epilogue.m = static_cast<int>(p.m);
  params.epilogue.n = static_cast<int>(p.k);
  return gemm::start<Gemm>(linear_act_dx_kernel_sm90<Gemm>, config, stream, params);
}

template <typename Gemm>
cudaError_t run_dweight(const LinearActBwdParams& p, const GemmConfig& config, void* workspace,
                        cudaStream_t stream) {
  GemmKernelParams<PartialsEpilogueParams> params;
  const GemmFactor dy = {p.dy.data, p.dy.stride, false};
  const GemmFactor x = {p.x.data, p.x.stride, false};
  cudaError_t status = describe<Gemm>(dy, x, p.n, p.k, p.m, config, &params);
  if (status == cudaSuccess) status = describe_mask<Gemm>(p, false, &params.factors.scale);
  if (status != cudaSuccess) return status;
  PartialsEpilogueParams& epilogue = params.epilogue;
  epilogue.m = static_cast<int>(p.n);
  epilogue.n = static_cast<int>(p.k);
  const auto kernel = linear_act_dweight_kernel_sm90<Gemm>;
  if (config.splits == 1) {
    epilogue.output = p.dweight;
    epilogue.row_sums_output = p.dbias;
    return gemm::start<Gemm>(kernel, config, stream, params);
  }
  SplitSum dweight = {nullptr, split_stride(p.n * p.k), p.n * p.k, p.dweight};
  SplitSum dbias = {nullptr, split_stride(p.n), p.n, p.dbias};
  epilogue.values = static_cast<float*>(workspace);
  epilogue.values_stride = dweight.stride;
  if (p.dbias != nullptr) {
    epilogue.row_sums = epilogue.values + config.splits * dweight.stride;
    epilogue.row_sums_stride = dbias.stride;
  }
  dweight.parts = epilogue.values;
  dbias.parts = epilogue.row_sums;
  status = gemm::start<Gemm>(kernel, config, stream, params);
  if (status != cudaSuccess) return status;
  return launch_sum_splits<typename Gemm::Element>(dweight, dbias, config.splits, true, stream);
}

// f(a type that holds the columns of the tile)
template <typename F>
cudaError_t with_columns(const GemmConfig& config, F f) {
  switch (config.tile_columns) {
    case 64:
      return f(std::integral_constant<int, 64>());
    case 192:
      return f(std::integral_constant<int, 192>());
    default:
      return f(std::integral_constant<int, 256>());
  }
}

template <typename T>
cudaError_t run_bwd(const LinearActBwdParams& params, const LinearActBwdConfig& config,
                    void* workspace, cudaStream_t stream) {
  if (params.dx.data != nullptr) {
    const cudaError_t status = with_columns(config.dx, [&](auto columns) {
      return run_dx<BwdGemm<T, columns, true>>(params, config.dx, stream);
    });
    if (status != cudaSuccess || params.dweight == nullptr) return status;
  }
  return with_columns(config.dweight, [&](auto columns) {
    return run_dweight<BwdGemm<T, columns, false>>(params, config.dweight, workspace, stream);
  });
}

}  // namespace linear_act

cudaError_t linear_act_device_traits(DeviceTraits* traits) {
  const cudaError_t status = describe_device(act_rows_kernel<float, 4>, traits);
  return status == cudaSuccess ? gemm::describe_products(linear_act::kAnyKernel, traits) : status;
}

cudaError_t launch_linear_act(const LinearActParams& params, const GemmConfig& config,
                              cudaStream_t stream) {
  return params.dtype == DType::kFloat16
             ? linear_act::run_layout<__half>(params, config, stream)
             : linear_act::run_layout<__nv_bfloat16>(params, config, stream);
}

cudaError_t launch_linear_act_bwd(const LinearActBwdParams& params,
                                  const LinearActBwdConfig& config, void* workspace,
                                  cudaStream_t stream) {
  return params.dtype == DType::kFloat16
             ? linear_act::run_bwd<__half>(params, config, workspace, stream)
             : linear_act::run_bwd<__nv_bfloat16>(params, config, workspace, stream);
}

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
