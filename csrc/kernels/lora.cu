// A low-rank adapter (LoRA; Hu et al., arXiv:2106.09685) beside a linear layer:
//
//   z = x @ weight.T + bias + t @ B.T,   t = scale * dropout(x) @ A.T
//
// The skinny products, with a side of r = 1 to 512 ranks: t (lora_down.cuh), in the backward
// dt = scale * dz @ B by the same kernel, and the gradients of A and B, dt.T @ dropout(x) and
// dz.T @ t (lora_up.cuh). All are bound by the one read of x, or dz: 8192 x 4096 elements of two
// bytes are 67 MB, beside which t (0.26 MB with 16 ranks) is nothing, and 1.1 GFLOP are little.
// So they are copies with a product on the way: rows go to shared memory by asynchronous copies,
// 50 KB or more of them in flight on an SM, and warps multiply there with mma.sync. Up to 64 ranks
// are one pass over x, more are one for each 64.
//
// On Hopper one pass over many rows makes them faster, and two of one matrix at once
// (lora_pass.cu). Where t is made beside the product that needs it all is one launch
// (lora_one_launch.cu).
//
// Dropout is a function of the seed and the place of an element (philox.cuh): 10 instructions an
// element that hide behind the copies, and no mask in memory.

#include <algorithm>

#include "common/convert.cuh"
#include "common/iteration.h"
#include "common/launch.h"
#include "common/philox.cuh"
#include "common/row_launch.cuh"
#include "common/sum_partials.cuh"
#include "common/vec.cuh"
#include "lora.h"
#include "lora_branch.cuh"
#include "lora_config.h"
#include "lora_down.cuh"
#include "lora_up.cuh"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Kernels
// ------------------------------------------------------------------------------------------------

// Eight neighbours of a row a thread.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kLoraThreads)
    lora_dropout_kernel(const __grid_constant__ LoraDropoutParams p, int64_t count,
                        const __grid_constant__ Divider of_row) {
  using C = Compute<T>;
  constexpr int kVec = kAligned ? kVectorWidth<T> : 1;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const DropoutMask mask(p.dropout.seed, p.dropout.threshold);
  const int64_t step = int64_t{gridDim.x} * kLoraThreads;
  for (int64_t i = int64_t{blockIdx.x} * kLoraThreads + threadIdx.x; i < count; i += step) {
    int64_t group;
    const int64_t row = of_row.divide(i, &group);
    const int column = static_cast<int>(group) * 8;
    const T* const from = static_cast<const T*>(p.x.data) + row * p.x.stride + column;
    T* const to = static_cast<T*>(p.output) + row * p.columns + column;
    const uint4 kept = mask.of_eight(row, column);
    const uint32_t words[4] = {kept.x, kept.y, kept.z, kept.w};
#pragma unroll
    for (int j = 0; j < 8; j += kVec) {
      if (column + j >= p.columns) break;
      C values[kVec];
      unpack(load_vector<T, kVec>(from + j), values);
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        const bool keeps = words[(j + k) / 2] >> ((j + k) % 2 * 16) & 1;
        values[k] = keeps ? values[k] * static_cast<C>(p.scale) : C(0);
      }
      store_vector(to + j, pack<T, kVec>(values));
    }
  }
}

// ------------------------------------------------------------------------------------------------
// Launchers
// ------------------------------------------------------------------------------------------------

namespace lora {

template <typename... Params, typename... Args>
cudaError_t launch_product(void (*kernel)(Params...), const LoraConfig& config, cudaStream_t stream,
                           const Args&... args) {
  LaunchOptions options;
  options.dependent = config.dependent_launch;
  options.shared_bytes = config.shared_bytes;
  const dim3 grid(static_cast<unsigned>(config.tiles), config.chunks, config.splits);
  return launch(kernel, grid, dim3(kLoraThreads), options, stream, args...);
}

// output[v] = sum of the parts of value v, with a thread for each part of many values.
template <typename T>
cudaError_t sum_parts(const LoraConfig& config, const void* partials, void* output, int64_t values,
                      cudaStream_t stream) {
  const SumPartialsParams sums = {{partials}, {output}, {values}, {config.splits}};
  const int64_t along = kSumPartialsThreads / next_power_of_two(config.splits);
  return launch_sum_partials<T, float>(sums, 1, std::max<int>(along, kWarpSize),
                                       config.dependent_launch, stream);
}

template <typename T>
cudaError_t down(const LoraDownParams& p, const LoraConfig& config, void* workspace,
                 cudaStream_t stream) {
  const auto kernel =
      p.factor_dtype == DType::kFloat32
          ? (p.rank_is_inner ? lora_down_kernel<T, float, true> : lora_down_kernel<T, float, false>)
          : (p.rank_is_inner ? lora_down_kernel<T, T, true> : lora_down_kernel<T, T, false>);
  const cudaError_t status =
      launch_product(kernel, config, stream, p, config, static_cast<float*>(workspace));
  if (status != cudaSuccess || config.splits == 1) return status;
  return sum_parts<T>(config, workspace, p.t, p.rows * lora_pitch(p.rank), stream);
}

template <typename T>
cudaError_t up(const LoraUpParams& p, const LoraConfig& config, void* workspace,
               cudaStream_t stream) {
  if (config.splits > 0) {
    const cudaError_t status = launch_product(lora_up_kernel<T>, config, stream, p, config,
                                              static_cast<float*>(workspace));
    if (status != cudaSuccess) return status;
  }
  const int64_t values = int64_t{p.rank} * p.columns;
  return p.output_dtype == DType::kFloat32
             ? sum_parts<float>(config, workspace, p.output, values, stream)
             : sum_parts<T>(config, workspace, p.output, values, stream);
}

}  // namespace lora

cudaError_t lora_device_traits(DeviceTraits* traits) {
  return describe_device(lora_dropout_kernel<float, false>, traits);
}

cudaError_t launch_lora_down(const LoraDownParams& params, const LoraConfig& config,
                             void* workspace, cudaStream_t stream) {
  if (config.is_empty()) return cudaSuccess;
  return with_half_type(params.dtype, [&](auto type) {
    return lora::down<typename decltype(type)::type>(params, config, workspace, stream);
  });
}

cudaError_t launch_lora_up(const LoraUpParams& params, const LoraConfig& config, void* workspace,
                           cudaStream_t stream) {
  if (config.is_empty()) return cudaSuccess;
  return with_half_type(params.dtype, [&](auto type) {
    return lora::up<typename decltype(type)::type>(params, config, workspace, stream);
  });
}

cudaError_t launch_lora_dropout(const LoraDropoutParams& params, const DeviceTraits& device,
                                cudaStream_t stream) {
  const int64_t groups = ceil_div(params.columns, 8), count = params.rows * groups;
  if (count == 0) return cudaSuccess;
  const RowMatrix output = {params.output, params.columns};
  const RowMatrix matrices[] = {params.x, output};
  const bool aligned = rows_are_aligned(matrices, 2, params.columns, size_of(params.dtype));
  constexpr int kBlocksOfSm = 16;
  const int64_t blocks =
      std::min(ceil_div(count, kLoraThreads), int64_t{kBlocksOfSm} * device.num_sms);
  return with_type(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel = aligned ? lora_dropout_kernel<T, true> : lora_dropout_kernel<T, false>;
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kLoraThreads),
                  device.dependent_launch, stream, params, count, Divider::make(groups));
  });
}

cudaError_t launch_lora_branch(const LoraBranchParams& params, bool dependent,
                               cudaStream_t stream) {
  return with_half_type(params.dtype, [&](auto type) {
    return launch(lora_branch_kernel<typename decltype(type)::type>,
                  dim3(static_cast<unsigned>(params.rows.config.blocks())), dim3(kNarrowThreads),
                  dependent, stream, params);
  });
}

}  // namespace fusedcuda
