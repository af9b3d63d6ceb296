// Which kernel a pointwise call takes, how it reaches each tensor, and its grid. Pure host
// functions without CUDA calls or global state, so that every decision can be tested on a machine
// without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pointwise.h"

namespace fusedcuda {
namespace pointwise {

// Threads of a block with sums along the columns, the others on neighbouring rows; a wider tile
// leaves more partial sums.
constexpr int kSumTileX = 32;

constexpr int64_t kMaxGridY = 65535;

// Whether a thread can take `vec` columns of every tensor at once: the innermost dimension has
// whole vectors (a single row without sums may leave a rest), and each tensor either has them side
// by side and aligned, or is constant along them.
inline bool fits_vectors(const PointwiseParams& params, const PointwisePlan& plan, int num_inputs,
                         int vec) {
  const Iteration& space = plan.space;
  const int last = space.num_dims - 1;
  if (last < plan.split) return false;
  const bool may_have_rest =
      plan.path == PointwisePath::kBroadcast && space.num_dims == 1 && plan.columns > vec;
  if (space.sizes[last] % vec != 0 && !may_have_rest) return false;
  for (int t = 0; t < space.num_tensors; ++t) {
    if (plan.access[t] == Access::kAbsent || plan.access[t] == Access::kNumber) continue;
    const int64_t* strides = space.strides[t];
    if (strides[last] == 0 && t < num_inputs) continue;
    if (strides[last] != 1) return false;
    if (reinterpret_cast<uintptr_t>(params.tensors[t].data) % kVectorBytes != 0) return false;
    for (int d = 0; d < last; ++d) {
      if (strides[d] % vec != 0) return false;
    }
  }
  return true;
}

// Whether a tensor is one aligned piece of memory in the order of the iteration.
inline bool is_contiguous(const PointwiseParams& params, const Iteration& space, int t) {
  if (reinterpret_cast<uintptr_t>(params.tensors[t].data) % kVectorBytes != 0) return false;
  int64_t size = 1;
  for (int d = space.num_dims - 1; d >= 0; --d) {
    if (space.strides[t][d] != size) return false;
    size *= space.sizes[d];
  }
  return true;
}

// Where not all tensors have whole vectors: those that are contiguous still move in vectors, in a
// flat walk, if all that is written does. (Single elements are written well by the other walk only;
// gather.cuh has the reasons.)
inline void choose_access_without_vectors(const PointwiseParams& params, int num_inputs, int width,
                                          PointwisePlan* plan) {
  const Iteration& space = plan->space;
  const int last = space.num_dims - 1;
  if (width == 1 || last < plan->split) return;  // a thread takes one element anyway
  bool flat = plan->path == PointwisePath::kBroadcast;
  for (int t = num_inputs; flat && t < space.num_tensors; ++t) {
    flat = plan->access[t] == Access::kAbsent || is_contiguous(params, space, t);
  }
  if (flat) {
    plan->path = PointwisePath::kFlat;
    plan->vec = width;
  }
  for (int t = 0; t < space.num_tensors; ++t) {
    if (plan->access[t] != Access::kElement) continue;
    if (flat && is_contiguous(params, space, t)) {
      plan->access[t] = Access::kVector;
    } else if (space.strides[t][last] == 1) {
      plan->access[t] = Access::kUnaligned;
    }
  }
}

// Fills plan->vec and plan->access, and makes the path kFlat where that is better; tensors from
// num_inputs on are outputs, and `written` tells which are wanted.
inline void choose_access(const PointwiseParams& params, int num_inputs, unsigned written,
                          PointwisePlan* plan) {
  const Iteration& space = plan->space;
  for (int t = 0; t < space.num_tensors; ++t) {
    const bool is_output = t >= num_inputs;
    const bool absent = is_output && !(written >> (t - num_inputs) & 1);
    if (absent) {
      plan->access[t] = Access::kAbsent;
    } else {
      plan->access[t] = params.tensors[t].data == nullptr ? Access::kNumber : Access::kElement;
    }
  }
  const int width = vector_width(params.dtype);
  if (width == 1 || !fits_vectors(params, *plan, num_inputs, width)) {
    choose_access_without_vectors(params, num_inputs, width, plan);
    return;
  }
  plan->vec = width;
  if (space.num_dims == 1) {
    plan->rest = plan->columns % width;
    plan->columns -= plan->rest;
  }
  for (int t = 0; t < space.num_tensors; ++t) {
    if (plan->access[t] != Access::kElement) continue;
    plan->access[t] = space.strides[t][space.num_dims - 1] == 0 ? Access::kSplat : Access::kVector;
  }
}

// Whether the linear kernel applies: one dimension, which every tensor walks in steps of one from
// an aligned start.
inline bool is_linear(const PointwiseParams& params, const PointwisePlan& plan) {
  if (params.dtype == DType::kFloat64) return false;  // there for gradcheck, not for speed
  if (plan.space.num_dims > 1) return false;
  for (int t = 0; t < plan.space.num_tensors; ++t) {
    if (params.tensors[t].data == nullptr) continue;
    if (plan.space.num_dims == 1 && plan.space.strides[t][0] != 1) return false;
    if (reinterpret_cast<uintptr_t>(params.tensors[t].data) % kVectorBytes != 0) return false;
  }
  return true;
}

// Fills what follows from plan->space and plan->split.
inline void count_rows_and_columns(PointwisePlan* plan) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  const Iteration& space = plan->space;
  plan->rows = plan->columns = 1;
  plan->simple = plan->split <= 1 && space.num_dims - plan->split <= 1;
  for (int d = 0; d < space.num_dims; ++d) {
    (d < plan->split ? plan->rows : plan->columns) *= space.sizes[d];
    plan->simple = plan->simple && space.sizes[d] < kLimit;
    for (int t = 0; t < space.num_tensors; ++t) {
      plan->simple = plan->simple && space.strides[t][d] < kLimit;
    }
  }
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

// Without sums: blocks_x covers the columns, blocks_y and blocks_z the rows; in a flat walk
// blocks_x covers everything. A thread takes as many elements as fill a vector, whether it has
// vectors or not: more take registers, and the resident threads they cost are worth more. Two
// vectors are 10 to 20 % slower, four 50 % (H200, bias_act and act_mul_packed of bf16).
inline void choose_grid(const DeviceTraits& device, int width, PointwisePlan* plan) {
  plan->threads = kPointwiseThreads;
  plan->dependent_launch = device.dependent_launch;
  if (plan->path == PointwisePath::kFlat) {
    plan->tile_x = kPointwiseThreads;
    plan->blocks_x =
        ceil_div(plan->rows * plan->columns, static_cast<int64_t>(kPointwiseThreads) * width);
    plan->blocks_y = 1;
    return;
  }
  const int64_t vectors = ceil_div(plan->columns, width);
  // The longest stretch of a row: 1 % faster than 512 bytes of each of eight rows.
  plan->tile_x = static_cast<int>(std::min<int64_t>(kPointwiseThreads, next_power_of_two(vectors)));
  plan->blocks_x = ceil_div(vectors, plan->tile_x);
  const int64_t row_tiles = ceil_div(plan->rows, kPointwiseThreads / plan->tile_x);
  plan->blocks_z = ceil_div(row_tiles, kMaxGridY);
  plan->blocks_y = ceil_div(row_tiles, plan->blocks_z);
}

// With sums: blocks_x covers the side on which threads stand still, blocks_y slices the side along
// which they walk. The slices are bounded, since each leaves partial sums.
//
// Without vectors a block takes the columns in stretches that end with a line, so that a thread's
// elements are equally far apart whatever the number of dimensions.
inline void choose_sum_grid(const DeviceTraits& device, PointwiseOp op, int width,
                            PointwisePlan* plan) {
  const Iteration& space = plan->space;
  const bool vectors = plan->vec > 1;
  const bool has_columns = space.num_dims > plan->split;
  plan->line = vectors || !has_columns ? plan->columns : space.sizes[space.num_dims - 1];
  const int64_t in_line = ceil_div(plan->line, width);  // vectors, or as many elements
  const int64_t tile_width = next_power_of_two(in_line);
  plan->threads = kPointwiseSumThreads;
  plan->dependent_launch = device.dependent_launch;
  plan->down = plan->path == PointwisePath::kColumns;
  // Along the rows, short ones go several a warp, long ones a block each, in slices.
  plan->tile_x =
      static_cast<int>(plan->down ? std::min<int64_t>(kSumTileX, tile_width)
                                  : (tile_width <= kWarpSize ? tile_width : kPointwiseSumThreads));
  plan->stretches_in_line = ceil_div(in_line, plan->tile_x);
  const int64_t stretches = plan->stretches_in_line * (plan->columns / plan->line);
  const int64_t row_tiles = ceil_div(plan->rows, kPointwiseSumThreads / plan->tile_x);
  plan->blocks_x = plan->down ? stretches : row_tiles;
  const int64_t slices = plan->down ? row_tiles : stretches;
  const int64_t enough =
      static_cast<int64_t>(device.num_sms) * pointwise_sum_blocks(op) / plan->blocks_x;
  plan->blocks_y = std::clamp<int64_t>(slices, 1, std::clamp<int64_t>(enough, 1, kMaxGridY));
}

}  // namespace pointwise

inline bool choose_pointwise_config(const PointwiseParams& params, const DeviceTraits& device,
                                    PointwisePlan* plan) {
  using namespace pointwise;
  const int output = num_operands(params.op);
  *plan = PointwisePlan();
  if (!merge_dimensions(params.space, 0, output, output, &plan->space, &plan->split)) return false;
  if (plan->space.numel() == 0) return true;
  if (is_linear(params, *plan)) {
    plan->path = PointwisePath::kLinear;
    plan->vec = vector_width(params.dtype);
    plan->rows = 1;
    plan->columns = plan->space.numel();
    for (int t = 0; t <= output; ++t) {
      plan->access[t] = params.tensors[t].data == nullptr ? Access::kNumber : Access::kVector;
    }
    plan->dependent_launch = device.dependent_launch;
    plan->threads = plan->tile_x = kPointwiseThreads;
    plan->blocks_x = ceil_div(plan->columns, static_cast<int64_t>(kPointwiseThreads) * plan->vec);
    plan->blocks_y = 1;
    return true;
  }
  plan->path = PointwisePath::kBroadcast;
  plan->split = std::max(plan->space.num_dims - 1, 0);
  count_rows_and_columns(plan);
  choose_access(params, output, 1, plan);
  choose_grid(device, vector_width(params.dtype), plan);
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

  // By rows, a total is left as one partial sum a row. Beside very many rows it gets a launch of
  // its own.
  constexpr int64_t kMaxPartialsOfTotal = 4096;
  int64_t kept = 1;
  for (int d = 0; d < raw.num_dims; ++d) {
    if (!(reduced >> d & 1)) kept *= raw.sizes[d];
  }
  if (first_reduced >= 0 && kept > kMaxPartialsOfTotal) {
    for (int k = 0; k < n; ++k) {
      if (plan->gradients[k] != GradientKind::kTotal) continue;
      plan->gradients[k] = GradientKind::kNone;
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
  if (plan->path == PointwisePath::kBroadcast) plan->split = std::max(plan->space.num_dims - 1, 0);
  count_rows_and_columns(plan);
  if (plan->rows * plan->columns == 0) {
    plan->path = PointwisePath::kEmpty;
    return true;
  }
  unsigned written = 0;
  for (int k = 0; k < n; ++k) written |= (plan->gradients[k] == GradientKind::kFull) << k;
  choose_access(params, n + 1, written, plan);
  if (plan->path == PointwisePath::kBroadcast || plan->path == PointwisePath::kFlat) {
    choose_grid(device, vector_width(params.dtype), plan);
    return true;
  }
  choose_sum_grid(device, params.op, vector_width(params.dtype), plan);
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
    case PointwisePath::kFlat:
      return "flat";
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
