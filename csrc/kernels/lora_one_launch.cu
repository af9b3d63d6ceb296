// A linear layer with its adapter in one launch, t included: of few rows lora_decode.cuh, of many
// rows and up to 16 ranks lora_product.cuh.
#include "common/gemm_launch.cuh"
#include "common/launch.h"
#include "common/row_launch.cuh"
#include "lora.h"
#include "lora_decode.cuh"
#include "lora_product.cuh"

namespace fusedcuda {

cudaError_t lora_product_device_traits(DeviceTraits* traits) {
  const cudaError_t status = describe_device(lora_product::kAnyKernel, traits);
  return status == cudaSuccess ? gemm::describe_products(lora_product::kAnyKernel, traits) : status;
}

cudaError_t lora_decode_device_traits(DeviceTraits* traits) {
  const auto kernel = lora_decode_detail::kernel_for<__nv_bfloat16>(1);
  cudaError_t status = describe_device(kernel, traits);
  // The kernel's registers fill an SM with one block.
  for (int log2 = 1; log2 <= kFewRowsMostClusterLog2 && traits->clusters; ++log2) {
    if (status == cudaSuccess)
      status = resident_clusters(kernel, kFewRowsThreads, 1 << log2,
                                 &traits->resident_clusters[0][log2]);
  }
  return status;
}

cudaError_t launch_lora_decode(const LoraProductParams& params, const FewRowsConfig& config,
                               cudaStream_t stream) {
  return with_half_type(params.linear.dtype, [&](auto type) {
    return lora_decode_detail::run<typename decltype(type)::type>(params, config, stream);
  });
}

cudaError_t launch_lora_product(const LoraProductParams& params, const GemmConfig& config,
                                cudaStream_t stream) {
  return with_half_type(params.linear.dtype, [&](auto type) {
    return lora_product::run_type<typename decltype(type)::type>(params, config, stream);
  });
}

}  // namespace fusedcuda
