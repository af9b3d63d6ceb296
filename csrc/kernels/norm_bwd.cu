// Launcher of the backward of RMSNorm and LayerNorm (norm_bwd.cuh), and of the sums of what its
// blocks leave of the gradients of weight and bias.

#include <type_traits>
#include <utility>

#include "common/iteration.h"
#include "common/launch.h"
#include "common/row_launch.cuh"
#include "common/sum_partials.cuh"
#include "norm_bwd.cuh"
#include "norm_config.h"
#include "norm_narrow.cuh"

namespace fusedcuda {
namespace norm {

template <typename T>
cudaError_t backward(const NormBwdParams& p, const NormConfig& config, void* workspace,
                     cudaStream_t stream) {
  using C = Compute<T>;
  const RowConfig& row = config.row;
  NormPartials partials;
  C* next = static_cast<C*>(workspace);
  for (auto [parameter, place] :
       {std::pair{&p.dweight, &partials.dweight}, std::pair{&p.dbias, &partials.dbias}}) {
    if (parameter->data == nullptr) continue;
    *place = next;
    next += config.partials * p.columns;
  }
  auto start_rows = [&](auto kernel, size_t shared, const auto&... args) {
    return launch_rows_with(kernel, row, shared, stream, args...);
  };
  cudaError_t status = cudaSuccess;
  if (row.path == RowPath::kStream) {
    if (p.dx.data != nullptr) {
      status = start_rows(norm_bwd_stream_kernel<T>, config.shared_bytes, p);
    }
    if (status == cudaSuccess && config.workspace_size > 0) {
      const dim3 grid(static_cast<unsigned>(config.weight_blocks_x),
                      static_cast<unsigned>(config.weight_blocks_y));
      const dim3 block(kWarpSize, kRowThreads / kWarpSize);
      status =
          launch(norm_bwd_weight_kernel<T>, grid, block, row.dependent_launch, stream, p, partials);
    }
  } else if constexpr (!std::is_same_v<T, double>) {
    auto start = [&](auto kernel) {
      return start_rows(kernel, config.shared_bytes, p, partials, config.stages, config.phases);
    };
    auto choose = [&](auto items, auto access, auto centered) {
      constexpr int kItems = decltype(items)::value;
      constexpr RowAccess kAccess = decltype(access)::value;
      constexpr bool kCentered = decltype(centered)::value;
      if constexpr (kItems > 1 && kAccess != RowAccess::kPhased) {
        if (row.cluster > 1) return start(norm_bwd_kernel<T, kItems, kAccess, kCentered, true>);
      }
      if constexpr (kCentered && kItems == kWideLayerNormBwdItems) {
        return cudaErrorInvalidValue;  // only in clusters
      } else {
        return start(norm_bwd_kernel<T, kItems, kAccess, kCentered, false>);
      }
    };
    auto choose_items = [&](auto access, auto centered) {
      constexpr RowAccess kAccess = decltype(access)::value;
      constexpr bool kCentered = decltype(centered)::value;
      if constexpr (kAccess != RowAccess::kPhased) {
        if (row.items == 1) return choose(std::integral_constant<int, 1>(), access, centered);
      }
      if constexpr (kCentered && kAccess == RowAccess::kAligned) {
        if (row.items == kWideLayerNormBwdItems)
          return choose(std::integral_constant<int, kWideLayerNormBwdItems>(), access, centered);
      }
      constexpr int kUsual = kCentered ? kLayerNormBwdItems : kNormItems;
      return choose(std::integral_constant<int, kUsual>(), access, centered);
    };
    auto choose_access = [&](auto centered) {
      switch (config.access) {
        case RowAccess::kAligned:
          return choose_items(std::integral_constant<RowAccess, RowAccess::kAligned>(), centered);
        case RowAccess::kPhased:
          if constexpr (decltype(centered)::value)
            return choose_items(std::integral_constant<RowAccess, RowAccess::kPhased>(), centered);
          return cudaErrorInvalidValue;  // never chosen
        default:
          return choose_items(std::integral_constant<RowAccess, RowAccess::kShifted>(), centered);
      }
    };
    if (config.narrow) {
      status = start_rows(
          p.columns == 1 ? norm_bwd_narrow_kernel<T, 1> : norm_bwd_narrow_kernel<T, kNarrowColumns>,
          0, p, partials);
    } else {
      status = p.kind == NormKind::kRms ? choose_access(std::false_type())
                                        : choose_access(std::true_type());
    }
  }
  if (status != cudaSuccess || config.workspace_size == 0) return status;

  const int along = config.narrow ? static_cast<int>(next_power_of_two(p.columns)) : kWarpSize;
  // dweight and dbias may differ in dtype: one launch for each dtype.
  SumPartialsParams of_rows_type = {}, of_float32 = {};
  unsigned num_rows_type = 0, num_float32 = 0;
  for (auto [parameter, place] :
       {std::pair{&p.dweight, partials.dweight}, std::pair{&p.dbias, partials.dbias}}) {
    if (parameter->data == nullptr) continue;
    SumPartialsParams& sums = parameter->is_float32 ? of_float32 : of_rows_type;
    unsigned& count = parameter->is_float32 ? num_float32 : num_rows_type;
    sums.partials[count] = place;
    sums.outputs[count] = parameter->data;
    sums.values[count] = p.columns;
    sums.partials_per_value[count] = config.partials;
    ++count;
  }
  if (num_rows_type > 0) {
    status =
        launch_sum_partials<T, C>(of_rows_type, num_rows_type, along, row.dependent_launch, stream);
  }
  if (num_float32 > 0 && status == cudaSuccess) {
    status =
        launch_sum_partials<float, C>(of_float32, num_float32, along, row.dependent_launch, stream);
  }
  return status;
}

}  // namespace norm

cudaError_t norm_device_traits(DeviceTraits* traits) {
  const auto kernel = norm_bwd_kernel<__nv_bfloat16, kNormItems, RowAccess::kAligned, false, true>;
  cudaError_t status = describe_device(kernel, traits);
  if (!traits->clusters) return status;
  // kRowThreads threads of this kernel's 128 registers fill an SM.
  for (int blocks = 1; blocks <= 2; ++blocks) {
    for (int i = 1; i < 5 && status == cudaSuccess; ++i) {
      status = resident_clusters(kernel, kRowThreads / blocks, 1 << i,
                                 &traits->resident_clusters[blocks - 1][i]);
    }
  }
  return status;
}

// No rows: the binding fills the parameters' gradients with zeros.
cudaError_t launch_norm_bwd(const NormBwdParams& params, const NormConfig& config, void* workspace,
                            cudaStream_t stream) {
  if (config.row.path == RowPath::kEmpty) return cudaSuccess;
  return with_type(params.dtype, [&](auto type) {
    return norm::backward<typename decltype(type)::type>(params, config, workspace, stream);
  });
}

}  // namespace fusedcuda
