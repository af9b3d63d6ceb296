// Launching a kernel on rows, and choosing it by the run-time values it is instantiated for.
#pragma once

#include <type_traits>

#include "convert.cuh"
#include "launch.h"
#include "row.h"

namespace fusedcuda {

// Blocks of (threads_per_row, rows_per_block) threads.
template <typename... Params, typename... Args>
cudaError_t launch_rows_with(void (*kernel)(Params...), const RowConfig& config,
                             size_t shared_bytes, cudaStream_t stream, const Args&... args) {
  LaunchOptions options;
  options.dependent = config.dependent_launch;
  options.cluster = config.cluster;
  options.shared_bytes = shared_bytes;
  const dim3 grid(static_cast<unsigned>(config.blocks));
  const dim3 block(config.threads_per_row, config.rows_per_block);
  return launch(kernel, grid, block, options, stream, args...);
}

// With shared memory for nothing but reductions, of type Value.
template <typename Value, typename... Params, typename... Args>
cudaError_t launch_rows(void (*kernel)(Params...), const RowConfig& config, cudaStream_t stream,
                        const Args&... args) {
  return launch_rows_with(kernel, config, config.scratch_bytes(sizeof(Value)), stream, args...);
}

template <typename T>
struct TypeTag {
  using type = T;
};

// f(TypeTag<T>()) for the element type.
template <typename F>
cudaError_t with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat64:
      return f(TypeTag<double>());
    case DType::kFloat32:
      return f(TypeTag<float>());
    case DType::kFloat16:
      return f(TypeTag<__half>());
    default:
      return f(TypeTag<__nv_bfloat16>());
  }
}

// The same of the types of 16 bits.
template <typename F>
cudaError_t with_half_type(DType dtype, F f) {
  return dtype == DType::kFloat16 ? f(TypeTag<__half>()) : f(TypeTag<__nv_bfloat16>());
}

// f(items, aligned), two integral constants. kMostItems: as given to choose_row_config for aligned
// rows; for others it is 4.
template <int kMostItems, typename F>
cudaError_t with_slice(const RowConfig& config, F f) {
  auto with_items = [&](auto items) {
    return config.aligned ? f(items, std::true_type()) : f(items, std::false_type());
  };
  if constexpr (kMostItems > 4) {
    if (config.items == kMostItems)
      return f(std::integral_constant<int, kMostItems>(), std::true_type());
  }
  if (config.items == 1) return with_items(std::integral_constant<int, 1>());
  return with_items(std::integral_constant<int, 4>());
}

}  // namespace fusedcuda
