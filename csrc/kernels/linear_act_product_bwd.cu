// The gradient of act(x @ weight.T + bias) with a ReLU, on Hopper: two products of dz = dy *
// act'(z), which never exists in memory:
//
//   dx = dz @ weight      dweight = dz.T @ x, dbias = sum of dz over m
//
// Memory: dy and what was saved once for each, x, weight and the results once. dweight is split
// along m, and its parts are added up in a fixed order.
#include <type_traits>

#include "common/gemm_launch.cuh"
#include "common/row_launch.cuh"
#include "common/run_gemm.cuh"
#include "common/sum_splits.cuh"
#include "linear_act.h"
#include "linear_act_bwd_epilogue.cuh"
#include "linear_act_config.h"
#include "linear_act_forward.cuh"

namespace fusedcuda {

// --------------------------------------------------------------------------------------------------
// Kernels
// --------------------------------------------------------------------------------------------------

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
// Launcher
// --------------------------------------------------------------------------------------------------

namespace linear_act {

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

cudaError_t launch_linear_act_bwd(const LinearActBwdParams& params,
                                  const LinearActBwdConfig& config, void* workspace,
                                  cudaStream_t stream) {
  return with_half_type(params.dtype, [&](auto type) {
    return linear_act::run_bwd<typename decltype(type)::type>(params, config, workspace, stream);
  });
}

}  // namespace fusedcuda
