// act(x @ weight.T + bias) on Hopper: a matrix product on the tensor cores whose sums never leave
// the chip before the bias and the activation have been applied.
//
//   y[m, n] = act(sum_k a[m, k] b[n, k] + bias[n])
//
// Memory for 16-bit elements: 2 (m k + n k + m n) bytes, and for what is saved m n / 8 (ReLU) or
// 2 m n (the derivative of the other activations). An epilogue in a kernel of its own would read
// and write 4 m n more: 65536 x 1024 x 480 takes as long for that as for the product.
#include "common/gemm_launch.cuh"
#include "common/launch.h"
#include "common/row_launch.cuh"
#include "common/run_gemm.cuh"
#include "linear_act.h"
#include "linear_act_config.h"
#include "linear_act_forward.cuh"

namespace fusedcuda {

// --------------------------------------------------------------------------------------------------
// Kernel
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

// --------------------------------------------------------------------------------------------------
// Launcher
// --------------------------------------------------------------------------------------------------

namespace linear_act {

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

}  // namespace linear_act

cudaError_t linear_act_device_traits(DeviceTraits* traits) {
  const cudaError_t status = describe_device(linear_act::kAnyKernel, traits);
  return status == cudaSuccess ? gemm::describe_products(linear_act::kAnyKernel, traits) : status;
}

cudaError_t launch_linear_act(const LinearActParams& params, const GemmConfig& config,
                              cudaStream_t stream) {
  return with_half_type(params.dtype, [&](auto type) {
    return linear_act::run_layout<typename decltype(type)::type>(params, config, stream);
  });
}

}  // namespace fusedcuda
