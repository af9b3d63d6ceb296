// The first half of a gated MLP (Shazeer, arXiv:2002.05202), one matrix product for both weights:
//
//   h[m, f] = act(sum_k x[m, k] w_gate[f, k]) * (sum_k x[m, k] w_up[f, k])
//
// A tile has the same columns of gate and of up, side by side as if w_gate and w_up were one matrix
// with 64 rows of each in turn: a thread has both sums of an element in its registers, and the
// product with the activation never leaves them before it is rounded.
//
// Memory for 16-bit elements: 2 (m k + 2 f k + m f) bytes, and 4 m f more where gate and up are
// kept for the gradient. As two products and an elementwise kernel it is 8 m f more either way,
// which is nearly twice what the operands and h are of 8192 x 14336 x 4096.
//
// Of few rows the whole layer is one launch: gated_mlp_decode.cuh.
#include "common/gemm_launch.cuh"
#include "common/row_launch.cuh"
#include "common/run_gemm.cuh"
#include "gated_mlp.h"
#include "gated_mlp_config.h"
#include "gated_mlp_decode.cuh"
#include "gated_mlp_epilogue.cuh"

namespace fusedcuda {

// --------------------------------------------------------------------------------------------------
// Kernel
// --------------------------------------------------------------------------------------------------

template <typename Gemm>
__global__ void __launch_bounds__(kGemmThreads, 1) gated_product_kernel_sm90(
    const __grid_constant__ GemmKernelParams<GatedEpilogueParams, typename Gemm::Factors> params) {
#if defined(FUSEDCUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  run_gemm<Gemm, GatedEpilogue<Gemm>>(params.factors, params.tiles, params.epilogue);
#else
  __trap();
#endif
}

// --------------------------------------------------------------------------------------------------
// Launcher
// --------------------------------------------------------------------------------------------------

namespace gated_mlp {

// Two computing warpgroups in turns, so that an epilogue costs nothing beside the other's products.
// bench/tuning/gated_mlp_configs.cu times other tiles.
template <typename T, int kColumns>
using ProductGemm = HopperGemm<T, kTileRows, 2 * kColumns, true, kColumns == kColumnsOfFew ? 1 : 2,
                               kColumns == kColumnsOfFew ? 5 : 4, true, true, GemmScale::kNone,
                               kColumns == kColumnsOfFew ? 4 : 2, 0, /*kBIsPair=*/true>;

template <typename Gemm>
cudaError_t describe(const GatedProductParams& p, const GemmConfig& config,
                     GemmKernelParams<GatedEpilogueParams, PairedGemmFactors>* params) {
  PairedGemmFactors& factors = params->factors;
  const GemmFactor x = {p.x.data, p.x.stride}, w_gate = {p.w_gate.data, p.w_gate.stride},
                   w_up = {p.w_up.data, p.w_up.stride};
  params->tiles = gemm::make_tiles<Gemm>(p.m, p.f, p.k, config);
  cudaError_t status = gemm::describe_a<Gemm>(x, p.m, p.k, &factors.a);
  if (status == cudaSuccess) status = gemm::describe_b<Gemm>(w_gate, p.f, p.k, &factors.b);
  if (status == cudaSuccess) status = gemm::describe_b<Gemm>(w_up, p.f, p.k, &factors.second_b);
  GatedEpilogueParams& epilogue = params->epilogue;
  if (status == cudaSuccess)
    status = gemm::describe_stored(p.h.data, p.m, p.f, p.h.stride, &epilogue.h);
  epilogue.saves = p.gate_up != nullptr;
  epilogue.activation = p.activation;
  epilogue.m = static_cast<int>(p.m);
  epilogue.f = static_cast<int>(p.f);
  if (status != cudaSuccess || !epilogue.saves) return status;
  const auto gate = static_cast<typename Gemm::Element*>(p.gate_up);
  status = gemm::describe_stored(gate, p.m, p.f, 2 * p.f, &epilogue.gate);
  if (status != cudaSuccess) return status;
  return gemm::describe_stored(gate + p.f, p.m, p.f, 2 * p.f, &epilogue.up);
}

template <typename Gemm>
cudaError_t run(const GatedProductParams& p, const GemmConfig& config, cudaStream_t stream) {
  GemmKernelParams<GatedEpilogueParams, PairedGemmFactors> params;
  const cudaError_t status = describe<Gemm>(p, config, &params);
  if (status != cudaSuccess) return status;
  return gemm::start<Gemm>(gated_product_kernel_sm90<Gemm>, config, stream, params);
}

template <typename T>
cudaError_t run_tile(const GatedProductParams& p, const GemmConfig& config, cudaStream_t stream) {
  return config.tile_columns == kColumnsOfFew
             ? run<ProductGemm<T, kColumnsOfFew>>(p, config, stream)
             : run<ProductGemm<T, kColumnsOfMany>>(p, config, stream);
}

}  // namespace gated_mlp

cudaError_t gated_mlp_device_traits(DeviceTraits* traits) {
  const auto kernel =
      gated_product_kernel_sm90<gated_mlp::ProductGemm<__nv_bfloat16, gated_mlp::kColumnsOfMany>>;
  const cudaError_t status = describe_device(kernel, traits);
  return status == cudaSuccess ? gemm::describe_products(kernel, traits) : status;
}

cudaError_t launch_gated_product(const GatedProductParams& params, const GemmConfig& config,
                                 cudaStream_t stream) {
  return with_half_type(params.dtype, [&](auto type) {
    return gated_mlp::run_tile<typename decltype(type)::type>(params, config, stream);
  });
}

}  // namespace fusedcuda
