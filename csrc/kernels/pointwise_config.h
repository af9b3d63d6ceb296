// Which kernel a pointwise call takes, how it reaches each tensor, and its grid. Pure host
// functions without CUDA calls or global state, so that every decision can be tested on a machine
// without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pointwise.h"

namespace fusedcuda {
namespace pointwise {

// Column and row kernels: enough blocks that the last wave is short, few enough that the partial
// sums stay below 1 % of the traffic.
constexpr int kBlocksPerSm = 8;

inline int64_t next_power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

inline int vector_width_of(DType dtype) {
  return dtype == DType::kFloat64 ? 1 : kVectorBytes / size_of(dtype);
}

inline bool is_dense(const Iteration& space, int tensor) {
  int64_t stride = 1;
  for (int d = space.num_dims - 1; d >= 0; --d) {
    if (space.strides[tensor][d] != stride) return false;
    stride *= space.sizes[d];
  }
  return true;
}

// `is_output`: a value cannot be written once for a whole vector.
inline Access choose_access(const PointwisePlan& plan, const PointwiseTensor& tensor, int index,
                            int element_size, bool is_output) {
  if (tensor.data == nullptr) return is_output ? Access::kAbsent : Access::kNumber;
  const Iteration& space = plan.space;
  const int last = space.num_dims - 1;
  const int64_t* strides = space.strides[index];
  const bool base_aligned =
      reinterpret_cast<uintptr_t>(tensor.data) % (plan.vec * element_size) == 0;
  const bool rows_aligned = plan.rows == 1 || plan.columns % plan.vec == 0;
  if (base_aligned && rows_aligned && is_dense(space, index)) return Access::kLinear;
  // A thread's vector starts at a multiple of vec and ends with its row, so it leaves the innermost
  // dimension only where there are several column dimensions.
  const bool within_innermost =
      space.num_dims - plan.split <= 1 || space.sizes[last] % plan.vec == 0;
  const int64_t innermost_stride = last >= plan.split ? strides[last] : 0;
  if (within_innermost && innermost_stride == 0 && !is_output) return Access::kOuter;
  bool aligned = base_aligned;
  for (int d = 0; d < last; ++d) aligned = aligned && strides[d] % plan.vec == 0;
  if (within_innermost && innermost_stride == 1 && aligned) return Access::kInner;
  return Access::kGather;
}

inline bool is_plain(const PointwisePlan& plan) {
  for (int t = 0; t < plan.space.num_tensors; ++t) {
    const Access access = plan.access[t];
    if (access != Access::kLinear && access != Access::kNumber && access != Access::kAbsent)
      return false;
  }
  return true;
}

// Dimensions over which the gradient `index` is summed.
inline uint64_t broadcast_mask(const RawIteration& raw, int index) {
  uint64_t mask = 0;
  for (int d = 0; d < raw.num_dims; ++d) {
    if (raw.sizes[d] > 1 && raw.strides[index][d] == 0) mask |= uint64_t{1} << d;
  }
  return mask;
}

inline bool same_layout(const RawIteration& raw, int a, int b) {
  for (int d = 0; d < raw.num_dims; ++d) {
    if (raw.sizes[d] > 1 && raw.strides[a][d] != raw.strides[b][d]) return false;
  }
  return true;
}

// The tensor whose layout the iteration follows: a full gradient that is written, else an operand
// that is read in full, else the incoming gradient.
inline int choose_leader(const PointwiseParams& params, unsigned wanted) {
  const int n = num_operands(params.op);
  for (int k = 0; k < n; ++k) {
    if ((wanted >> k & 1) && broadcast_mask(params.space, n + 1 + k) == 0) return n + 1 + k;
  }
  for (int k = 0; k < n; ++k) {
    if (params.tensors[k].data != nullptr && broadcast_mask(params.space, k) == 0) return k;
  }
  return n;
}

inline int64_t innermost_dimension(const RawIteration& raw, int leader) {
  int innermost = -1;
  for (int d = 0; d < raw.num_dims; ++d) {
    if (raw.sizes[d] == 1) continue;
    if (innermost < 0 || raw.strides[leader][d] <= raw.strides[leader][innermost]) innermost = d;
  }
  return innermost;
}

inline void choose_grid(const DeviceTraits& device, PointwisePlan* plan) {
  const int64_t vectors = ceil_div(plan->columns, plan->vec);
  const int64_t target = static_cast<int64_t>(device.num_sms) * kBlocksPerSm;
  plan->threads = kPointwiseThreads;
  plan->dependent_launch = device.dependent_launch;
  switch (plan->path) {
    case PointwisePath::kColumns: {
      // A warp covers 512 consecutive bytes of a row, or several narrow rows.
      plan->tile_x = static_cast<int>(std::min<int64_t>(kWarpSize, next_power_of_two(vectors)));
      const int tile_y = kPointwiseThreads / plan->tile_x;
      plan->blocks_x = ceil_div(vectors, plan->tile_x);
      plan->blocks_y = std::clamp<int64_t>(target / plan->blocks_x, 1,
                                           std::min<int64_t>(65535, ceil_div(plan->rows, tile_y)));
      break;
    }
    case PointwisePath::kRows: {
      // Short rows: several a warp. Long rows: a block each, in slices if there are few.
      const int64_t width = next_power_of_two(vectors);
      plan->tile_x = width <= kWarpSize ? static_cast<int>(width) : kPointwiseThreads;
      plan->blocks_x = ceil_div(plan->rows, kPointwiseThreads / plan->tile_x);
      plan->blocks_y = std::clamp<int64_t>(
          target / plan->blocks_x, 1, std::min<int64_t>(65535, ceil_div(vectors, plan->tile_x)));
      break;
    }
    default:
      plan->tile_x = kPointwiseThreads;
      plan->blocks_x = ceil_div(vectors, plan->threads);
      plan->blocks_y = 1;
  }
}

}  // namespace pointwise

inline bool choose_pointwise_config(const PointwiseParams& params, const DeviceTraits& device,
                                    PointwisePlan* plan) {
  using namespace pointwise;
  const int output = num_operands(params.op);
  *plan = PointwisePlan();
  if (!merge_dimensions(params.space, 0, output, output, &plan->space, &plan->split)) return false;
  plan->rows = 1;
  plan->columns = plan->space.numel();
  if (plan->columns == 0) return true;
  plan->vec = vector_width_of(params.dtype);
  plan->threads = kPointwiseThreads;
  for (int t = 0; t <= output; ++t) {
    plan->access[t] =
        choose_access(*plan, params.tensors[t], t, size_of(params.dtype), t == output);
  }
  // float64 is there for gradcheck, not for speed: it has no linear kernel.
  const bool linear = is_plain(*plan) && params.dtype != DType::kFloat64;
  plan->path = linear ? PointwisePath::kLinear : PointwisePath::kBroadcast;
  plan->needs_offsets = !is_plain(*plan);
  choose_grid(device, plan);
  return true;
}

inline bool choose_pointwise_bwd_config(const PointwiseParams& params, unsigned wanted,
                                        const DeviceTraits& device, PointwisePlan* plan,
                                        unsigned* remaining) {
  using namespace pointwise;
  const RawIteration& raw = params.space;
  const int n = num_operands(params.op);
  *plan = PointwisePlan();
  *remaining = 0;

  // The first operand summed over some of the dimensions decides which; the others join or wait for
  // another launch.
  uint64_t all = 0, reduced = 0;
  for (int d = 0; d < raw.num_dims; ++d) {
    if (raw.sizes[d] > 1) all |= uint64_t{1} << d;
  }
  int first_reduced = -1;
  bool any_total = false;
  for (int k = 0; k < n; ++k) {
    if (!(wanted >> k & 1)) continue;
    const int gradient = n + 1 + k;
    const uint64_t mask = broadcast_mask(raw, gradient);
    if (mask == 0) {
      plan->gradients[k] = GradientKind::kFull;
    } else if (mask == all) {
      plan->gradients[k] = GradientKind::kTotal;
      any_total = true;
    } else if (first_reduced < 0) {
      first_reduced = gradient;
      reduced = mask;
      plan->gradients[k] = GradientKind::kColumns;  // or kRows, see below
    } else if (mask == reduced && same_layout(raw, gradient, first_reduced)) {
      plan->gradients[k] = GradientKind::kColumns;
    } else {
      *remaining |= 1u << k;
    }
  }

  const int leader = choose_leader(params, wanted & ~*remaining);
  uint64_t outer = 0;
  int outer_leader = leader, inner_leader = leader;
  plan->path = any_total ? PointwisePath::kRows : PointwisePath::kBroadcast;
  if (first_reduced >= 0) {
    // Sum down the columns where neighbours in memory belong to different sums, along the rows
    // where they belong to the same. The sums are laid out like the gradient.
    const int innermost = static_cast<int>(innermost_dimension(raw, leader));
    if (reduced >> innermost & 1) {
      plan->path = PointwisePath::kRows;
      outer = all & ~reduced;
      outer_leader = first_reduced;
      for (GradientKind& kind : plan->gradients) {
        if (kind == GradientKind::kColumns) kind = GradientKind::kRows;
      }
    } else {
      plan->path = PointwisePath::kColumns;
      outer = reduced;
      inner_leader = first_reduced;
    }
  }
  if (!merge_dimensions(raw, outer, outer_leader, inner_leader, &plan->space, &plan->split))
    return false;
  plan->rows = plan->columns = 1;
  for (int d = 0; d < plan->space.num_dims; ++d) {
    (d < plan->split ? plan->rows : plan->columns) *= plan->space.sizes[d];
  }
  if (plan->rows * plan->columns == 0) {
    plan->path = PointwisePath::kEmpty;
    return true;
  }
  plan->vec = vector_width_of(params.dtype);
  plan->threads = kPointwiseThreads;
  for (int t = 0; t < raw.num_tensors; ++t) {
    const bool is_output = t > n;
    PointwiseTensor tensor = params.tensors[t];
    if (is_output && plan->gradients[t - n - 1] != GradientKind::kFull) tensor.data = nullptr;
    plan->access[t] = choose_access(*plan, tensor, t, size_of(params.dtype), is_output);
  }
  plan->needs_offsets = !is_plain(*plan);
  choose_grid(device, plan);
  int64_t most_values = 1;
  for (int k = 0; k < n; ++k) {
    switch (plan->gradients[k]) {
      case GradientKind::kColumns:
        plan->num_values[k] = plan->columns;
        plan->num_partials[k] = plan->blocks_y;
        break;
      case GradientKind::kRows:
        plan->num_values[k] = plan->rows;
        plan->num_partials[k] = plan->blocks_y;
        break;
      case GradientKind::kTotal:
        plan->num_values[k] = 1;
        plan->num_partials[k] =
            plan->blocks_y * (plan->path == PointwisePath::kRows ? plan->rows : plan->blocks_x);
        break;
      default:
        break;
    }
    most_values = std::max(most_values, plan->num_values[k]);
    plan->workspace_size += plan->num_values[k] * plan->num_partials[k];
  }
  plan->sum_tile_x = static_cast<int>(std::min<int64_t>(kWarpSize, next_power_of_two(most_values)));
  return true;
}

inline const char* name_of(PointwisePath path) {
  switch (path) {
    case PointwisePath::kEmpty:
      return "empty";
    case PointwisePath::kLinear:
      return "linear";
    case PointwisePath::kBroadcast:
      return "broadcast";
    case PointwisePath::kColumns:
      return "columns";
    default:
      return "rows";
  }
}

inline const char* name_of(GradientKind kind) {
  switch (kind) {
    case GradientKind::kNone:
      return "none";
    case GradientKind::kFull:
      return "full";
    case GradientKind::kColumns:
      return "columns";
    case GradientKind::kRows:
      return "rows";
    default:
      return "total";
  }
}

}  // namespace fusedcuda
