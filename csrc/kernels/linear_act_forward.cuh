// The forward product of a linear layer: its tiles, and what its kernels are given. For
// linear_act_product.cu and for the layer with an adapter (lora_product.cuh).
#pragma once

#include "common/gemm_launch.cuh"
#include "common/hopper_gemm.cuh"
#include "linear_act.h"
#include "linear_act_config.h"
#include "linear_act_epilogue.cuh"

namespace fusedcuda {
namespace linear_act {

template <typename T, bool kBKInner>
using InTurnsGemm =
    HopperGemm<T, kTileRows, kColumnsInTurns, true, 2, 5, true, kBKInner, GemmScale::kNone, 4>;
template <typename T, bool kBKInner>
using TogetherGemm = HopperGemm<T, kTileRows / 2, kColumnsTogether, false, 2, 4, true, kBKInner>;

template <typename Gemm>
cudaError_t describe_factors(const GemmFactor& a, const GemmFactor& b, int64_t m, int64_t n,
                             int64_t k, TensorMap* map_a, TensorMap* map_b) {
  const cudaError_t status = gemm::describe_a<Gemm>(a, m, k, map_a);
  return status == cudaSuccess ? gemm::describe_b<Gemm>(b, n, k, map_b) : status;
}

template <typename Gemm, typename EpilogueParams>
cudaError_t describe(const GemmFactor& a, const GemmFactor& b, int64_t m, int64_t n, int64_t k,
                     const GemmConfig& config, GemmKernelParams<EpilogueParams>* params) {
  params->tiles = gemm::make_tiles<Gemm>(m, n, k, config);
  return describe_factors<Gemm>(a, b, m, n, k, &params->factors.a, &params->factors.b);
}

template <typename Gemm>
cudaError_t describe_forward(const LinearActParams& p, const GemmConfig& config,
                             GemmKernelParams<LinearActEpilogueParams>* params) {
  LinearActEpilogueParams& epilogue = params->epilogue;
  cudaError_t status = describe<Gemm>(p.a, p.b, p.m, p.n, p.k, config, params);
  if (status == cudaSuccess && p.extra_k > 0) {
    params->tiles.extra_blocks = static_cast<int>(ceil_div(p.extra_k, kGemmK));
    status = describe_factors<Gemm>(p.extra_a, p.extra_b, p.m, p.n, p.extra_k,
                                    &params->factors.extra_a, &params->factors.extra_b);
  }
  if (status == cudaSuccess)
    status = gemm::describe_stored(p.output.data, p.m, p.n, p.output.stride, &epilogue.output);
  if (status == cudaSuccess && p.saves == SavedForBackward::kDerivative)
    status = gemm::describe_stored(p.saved, p.m, p.n, p.n, &epilogue.saved);
  epilogue.saves = p.saves;
  epilogue.mask = static_cast<uint8_t*>(p.saved);
  epilogue.mask_stride = mask_row_bytes(p.n);
  epilogue.bias = p.bias;
  epilogue.activation = p.activation;
  epilogue.m = static_cast<int>(p.m);
  epilogue.n = static_cast<int>(p.n);
  return status;
}

}  // namespace linear_act
}  // namespace fusedcuda
