// Launcher of the one pass over a matrix for the skinny products (lora_pass.cuh).
#include "common/gemm_launch.cuh"
#include "common/launch.h"
#include "common/row_launch.cuh"
#include "common/tensor_map.h"
#include "lora.h"
#include "lora_pass.cuh"
#include "lora_pass_config.h"

namespace fusedcuda {
namespace lora_pass {

template <typename P>
cudaError_t start(const LoraPassParams& p, LoraPassKernelParams* params,
                  const LoraPassConfig& config, cudaStream_t stream) {
  cudaError_t status =
      make_tensor_map(gemm::boxed(p.x.data, p.rows, p.columns, p.x.stride, 64), &params->x);
  int box_rows = 64;  // of the factor
  if (status == cudaSuccess && P::kDown) {
    const int64_t rows = P::kFactorIsKInner ? p.rank : p.columns;
    const int64_t columns = P::kFactorIsKInner ? p.columns : params->pitch;
    // Without the ranks behind the pitch, whose sums nobody wants: rows of zeros take the copy
    // engine longer than others (28.3 us instead of 21.7 with 32 ranks; H200, 8192 x 4096).
    if (P::kFactorIsKInner) box_rows = params->pitch;
    status = make_tensor_map(gemm::boxed(p.factor, rows, columns, p.factor_stride, box_rows),
                             &params->factor);
  }
  if (status == cudaSuccess && P::kUp)
    status =
        make_tensor_map(gemm::boxed(p.t, p.rows, params->pitch, params->pitch, 64), &params->t);
  if (status != cudaSuccess) return status;
  params->stage_bytes = kTileBytes + (P::kUp ? kBoxBytes : kBoxes * box_rows * kSwizzleBytes);
  LaunchOptions options;
  options.dependent = config.dependent_launch;
  options.shared_bytes = P::kBytes;
  return launch(lora_pass_kernel_sm90<P>, dim3(config.lines.blocks), dim3(P::kWarps * kWarpSize),
                options, stream, *params);
}

template <typename T, int kRanks>
cudaError_t start_kind(const LoraPassParams& p, LoraPassKernelParams* params,
                       const LoraPassConfig& config, cudaStream_t stream) {
  const bool drops = p.dropout.seed != nullptr;
  if (p.down == nullptr)
    return drops ? start<Pass<T, kRanks, false, true, true>>(p, params, config, stream)
                 : start<Pass<T, kRanks, false, true, false>>(p, params, config, stream);
  if (p.up == nullptr)
    return drops ? start<Pass<T, kRanks, true, false, true>>(p, params, config, stream)
                 : start<Pass<T, kRanks, true, false, false>>(p, params, config, stream);
  return start<Pass<T, kRanks, true, true, false>>(p, params, config, stream);
}

template <typename T>
cudaError_t sum_parts(const LoraPassParams& p, const LoraPassKernelParams& params,
                      const LoraPassConfig& config, cudaStream_t stream) {
  LoraPassSumParams sums = {config.lines, config.width, params.down_parts, params.up_parts};
  sums.down_count = p.down != nullptr ? static_cast<uint32_t>(p.rows * params.pitch / 4) : 0;
  sums.up_count = p.up != nullptr ? static_cast<uint32_t>(p.columns * params.pitch / 4) : 0;
  sums.columns = p.columns;
  sums.pitch = params.pitch;
  sums.rank = p.rank;
  sums.down_scale = p.down_scale;
  sums.up_scale = p.up_scale;
  sums.down = p.down;
  sums.up = p.up;
  sums.transposed = p.transposed;
  const auto kernel =
      p.up_dtype == DType::kFloat32 ? lora_pass_sum_kernel<T, float> : lora_pass_sum_kernel<T, T>;
  const int64_t blocks = ceil_div(int64_t{sums.down_count} + sums.up_count, kLoraPassSumValues);
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kLoraPassSumThreads),
                config.dependent_launch, stream, sums);
}

template <typename T>
cudaError_t run(const LoraPassParams& p, const LoraPassConfig& config, void* workspace,
                cudaStream_t stream) {
  LoraPassKernelParams params;
  params.lines = config.lines;
  params.rows = p.rows;
  params.pitch = lora_pitch(p.rank);
  params.dropout = p.dropout;
  params.down_parts = static_cast<float*>(workspace);
  params.up_parts = params.down_parts + config.down_parts;
  const cudaError_t status = p.rank <= kLoraPassFewRanks
                                 ? start_kind<T, kLoraPassFewRanks>(p, &params, config, stream)
                                 : start_kind<T, kLoraPassMostRanks>(p, &params, config, stream);
  return status == cudaSuccess ? sum_parts<T>(p, params, config, stream) : status;
}

}  // namespace lora_pass

cudaError_t launch_lora_pass(const LoraPassParams& params, const LoraPassConfig& config,
                             void* workspace, cudaStream_t stream) {
  return with_half_type(params.dtype, [&](auto type) {
    return lora_pass::run<typename decltype(type)::type>(params, config, workspace, stream);
  });
}

}  // namespace fusedcuda
