// The ops of a DLRM (Naumov et al., arXiv:1906.00091) between and behind its linear layers.
//
// Interaction: the dense vector of a sample, and the dot products of all pairs of its vectors, as
// one row. Bound by memory: each vector is read once and each row is written once (27 vectors of
// 128 elements of 2 bytes: 6912 bytes in, 960 out), backward vectors and incoming row are read and
// the gradients written once. The products themselves are small: tensor cores do them on the way.
// - dlrm_interaction.cuh: 16-bit types, a warp a sample, many warps at a time;
// - dlrm_interaction_threads.cuh: float32 and float64, a block a sample;
// - dlrm_lookup.cuh: vectors that are rows of a table, which either kernel reads where they are. So
//   what was looked up is neither written nor read again: of 27 x 16, 2 x 832 bytes a sample beside
//   the 1808 that are moved (rows, indices, the dense vector, and the output).
//
// Gradient of the table: the rows' gradients, sorted and added up by row (dlrm_sort.cuh,
// dlrm_gradient.cuh).
//
// Head: a linear layer of one output with sigmoid and binary cross-entropy (dlrm_head.cuh). x is
// read once forward, and once backward, where its gradient is written.

#include <type_traits>

#include "common/launch.h"
#include "common/row_launch.cuh"
#include "common/sum_partials.cuh"
#include "dlrm.h"
#include "dlrm_gradient.cuh"
#include "dlrm_head.cuh"
#include "dlrm_interaction.cuh"
#include "dlrm_interaction_threads.cuh"
#include "dlrm_layout.h"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Launchers
// ------------------------------------------------------------------------------------------------

namespace dlrm {

template <typename... Params, typename... Args>
cudaError_t launch_dot(void (*kernel)(Params...), const DotConfig& config, cudaStream_t stream,
                       const Args&... args) {
  LaunchOptions options;
  options.dependent = config.dependent_launch;
  options.shared_bytes = config.shared_bytes;
  return launch(kernel, dim3(static_cast<unsigned>(config.blocks)), dim3(config.threads), options,
                stream, args...);
}

// f(tiles), f(lookup, aligned), integral constants: the kernels that dlrm_config.h chooses from.
template <typename F>
cudaError_t with_tiles(const DotConfig& config, F f) {
  if (config.tiles == kManyDotTiles) return f(std::integral_constant<int, kManyDotTiles>());
  return f(std::integral_constant<int, kFewDotTiles>());
}
template <typename F>
cudaError_t with_loader(const DotVectors& p, const DotConfig& config, F f) {
  constexpr std::true_type yes;
  constexpr std::false_type no;
  // Of no vectors beside the dense one there are no indices either.
  if (p.lookup.indices != nullptr && p.vectors > 1)
    return config.aligned ? f(yes, yes) : f(yes, no);
  return config.aligned ? f(no, yes) : f(no, no);
}

DotSteps steps_of(const DotVectors& p, int64_t row_stride, const DotConfig& config) {
  const int piece = config.aligned ? kVectorBytes / 2 : 1;
  return DotSteps(p, row_stride, piece, config.blocks * (config.threads / kWarpSize));
}

template <typename T>
cudaError_t interact(const DotParams& p, const DotConfig& config, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    return with_tiles(config, [&](auto tiles) {
      return with_loader(p, config, [&](auto lookup, auto aligned) {
        return launch_dot(dot_interaction_kernel<T, tiles(), kDotStages, lookup(), aligned()>,
                          config, stream, p, steps_of(p, p.width, config), config.aligned_row);
      });
    });
  } else {
    return with_loader(p, config, [&](auto lookup, auto aligned) {
      return launch_dot(dot_interaction_threads_kernel<T, lookup(), aligned()>, config, stream, p,
                        config.aligned_row);
    });
  }
}

template <typename T>
cudaError_t interact_bwd(const DotBwdParams& p, const DotConfig& config, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    return with_tiles(config, [&](auto tiles) {
      return with_loader(p, config, [&](auto lookup, auto aligned) {
        return launch_dot(dot_interaction_bwd_kernel<T, tiles(), kDotStages, lookup(), aligned()>,
                          config, stream, p, steps_of(p, p.grad_stride, config),
                          config.aligned_row);
      });
    });
  } else {
    return with_loader(p, config, [&](auto lookup, auto aligned) {
      return launch_dot(dot_interaction_bwd_threads_kernel<T, lookup(), aligned()>, config, stream,
                        p);
    });
  }
}

template <typename T>
cudaError_t head(const BceParams& p, const BceConfig& config, void* workspace,
                 cudaStream_t stream) {
  using C = Compute<T>;
  const auto kernel =
      config.aligned ? linear_sigmoid_bce_kernel<T, true> : linear_sigmoid_bce_kernel<T, false>;
  const cudaError_t status = launch(kernel, dim3(static_cast<unsigned>(config.blocks)),
                                    dim3(config.threads_x, config.threads_y),
                                    config.dependent_launch, stream, p, static_cast<C*>(workspace));
  if (status != cudaSuccess || !p.reduced) return status;
  const SumPartialsParams sums = {{workspace}, {p.loss}, {1}, {config.blocks}};
  return launch_sum_partials<C>(sums, 1, kWarpSize, config.dependent_launch, stream);
}

template <typename T>
cudaError_t head_bwd(const BceBwdParams& p, const OneOutputConfig& config, void* workspace,
                     cudaStream_t stream) {
  return run_one_output_bwd<T>(config.aligned ? linear_sigmoid_bce_bwd_kernel<T, true>
                                              : linear_sigmoid_bce_bwd_kernel<T, false>,
                               p, config, workspace, stream);
}

}  // namespace dlrm

cudaError_t dlrm_device_traits(DeviceTraits* traits) {
  return describe_device(dot_interaction_threads_kernel<float, false, false>, traits);
}

cudaError_t launch_dot_interaction(const DotParams& params, const DotConfig& config,
                                   cudaStream_t stream) {
  if (config.path == DotPath::kEmpty) return cudaSuccess;
  return with_type(params.dtype, [&](auto type) {
    return dlrm::interact<typename decltype(type)::type>(params, config, stream);
  });
}

cudaError_t launch_dot_interaction_bwd(const DotBwdParams& params, const DotConfig& config,
                                       cudaStream_t stream) {
  if (config.path == DotPath::kEmpty) return cudaSuccess;
  return with_type(params.dtype, [&](auto type) {
    return dlrm::interact_bwd<typename decltype(type)::type>(params, config, stream);
  });
}

cudaError_t launch_table_gradient(const TableGradientParams& params,
                                  const TableGradientConfig& config, void* workspace,
                                  cudaStream_t stream) {
  return with_type(params.dtype, [&](auto type) {
    return dlrm::table_gradient<typename decltype(type)::type>(params, config, workspace, stream);
  });
}

cudaError_t launch_linear_sigmoid_bce(const BceParams& params, const BceConfig& config,
                                      void* workspace, cudaStream_t stream) {
  return with_type(params.dtype, [&](auto type) {
    return dlrm::head<typename decltype(type)::type>(params, config, workspace, stream);
  });
}

cudaError_t launch_linear_sigmoid_bce_bwd(const BceBwdParams& params, const OneOutputConfig& config,
                                          void* workspace, cudaStream_t stream) {
  return with_type(params.dtype, [&](auto type) {
    return dlrm::head_bwd<typename decltype(type)::type>(params, config, workspace, stream);
  });
}

}  // namespace fusedcuda
