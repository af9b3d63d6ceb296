// How a RoPE call is spread over threads. Pure host functions without CUDA calls or global state,
// so that every decision can be tested on a machine without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rope.h"

namespace fusedcuda {
namespace rope_detail {

// What a block reads side by side before it goes on elsewhere: a page of DRAM or two.
constexpr int64_t kStretchBytes = 2048;

// Heads are divided among blocks only until there are so many waves of them: a thread that takes
// several heads reads the tables once for all of them, but blocks of few waves end raggedly.
constexpr int64_t kWaves = 4;

constexpr int kMaxBlockZ = 64;

inline bool is_aligned(const void* data, const int64_t* strides, int count, int itemsize,
                       int64_t bytes) {
  if (strides[count] != 1 || reinterpret_cast<uintptr_t>(data) % bytes != 0) return false;
  return std::all_of(strides, strides + count,
                     [&](int64_t stride) { return stride * itemsize % bytes == 0; });
}

inline bool is_aligned(const RopeTensor& tensor, DType dtype) {
  const int itemsize = size_of(dtype);
  const RopeLayout &in = tensor.input, &out = tensor.output;
  return tensor.heads == 0 || (is_aligned(in.data, in.strides, 3, itemsize, kVectorBytes) &&
                               is_aligned(out.data, out.strides, 3, itemsize, kVectorBytes));
}

// Whether threads can take 16 bytes of either half of every row.
inline bool fits_vectors(const RopeParams& params) {
  if (params.dtype == DType::kFloat64) return false;  // there for gradcheck, not for speed
  const int vec = kVectorBytes / size_of(params.dtype);
  if (params.head_dim / 2 % vec != 0) return false;
  // A thread's values of a table, in pieces of at most 16 bytes.
  const int values = params.interleaved && params.half_tables ? vec / 2 : vec;
  const int itemsize = size_of(params.table_dtype);
  const int64_t piece = std::min(values * itemsize, kVectorBytes);
  const RopeTable &cos = params.cos, &sin = params.sin;
  return is_aligned(params.q, params.dtype) && is_aligned(params.k, params.dtype) &&
         is_aligned(cos.data, cos.strides, 2, itemsize, piece) &&
         is_aligned(sin.data, sin.strides, 2, itemsize, piece);
}

// Whether neighbouring heads lie closer together than neighbouring positions, as in a
// (batch, length, heads, head_dim) tensor whose transposed view is given.
inline bool heads_inside(const RopeParams& params) {
  if (params.length == 1) return true;
  const RopeTensor& larger = params.q.heads >= params.k.heads ? params.q : params.k;
  if (larger.heads == 1) return false;
  return larger.output.strides[1] < larger.output.strides[2];
}

// The rows of a block: a stretch of neighbours, and as many of these as the threads allow.
inline void choose_block(const RopeParams& params, RopePlan* plan) {
  plan->threads_x = static_cast<int>(std::min<int64_t>(plan->columns, kRopeThreads));
  const int64_t rows = kRopeThreads / plan->threads_x;
  const int64_t positions = params.batch * params.length;
  const int64_t inner = plan->heads_inside ? params.num_heads() : positions;
  const int64_t outer = plan->heads_inside ? positions : params.num_heads();
  const int64_t row_bytes = params.head_dim * size_of(params.dtype);
  const int64_t stretch = std::max<int64_t>(kStretchBytes / row_bytes, 1);
  int64_t y = std::min({stretch, rows, inner});
  const int64_t z = std::min({rows / y, outer, int64_t{kMaxBlockZ}});
  y = std::min(rows / z, inner);  // where there are few of the others
  plan->column_tiles = ceil_div(plan->columns, plan->threads_x);
  plan->threads_y = static_cast<int>(y);
  plan->threads_z = static_cast<int>(z);
}

}  // namespace rope_detail

inline RopePlan choose_rope_config(const RopeParams& params, const DeviceTraits& device) {
  RopePlan plan;
  if (params.is_empty()) return plan;
  plan.vec = rope_detail::fits_vectors(params) ? kVectorBytes / size_of(params.dtype) : 1;
  plan.columns = params.head_dim / 2 / plan.vec;
  plan.heads_inside = rope_detail::heads_inside(params);
  plan.dependent_launch = device.dependent_launch;
  rope_detail::choose_block(params, &plan);

  const int64_t position_tiles = ceil_div(params.batch * params.length, plan.tile_positions());
  const int64_t head_tiles = ceil_div(params.num_heads(), plan.tile_heads());
  const int64_t wanted = rope_detail::kWaves * kRopeResidentBlocks * device.num_sms;
  const int64_t groups = std::clamp<int64_t>(ceil_div(wanted, position_tiles), 1, head_tiles);
  plan.heads_per_block = static_cast<int>(ceil_div(head_tiles, groups)) * plan.tile_heads();
  plan.head_groups = static_cast<int>(ceil_div(params.num_heads(), plan.heads_per_block));
  plan.blocks = position_tiles * plan.head_groups;
  return plan;
}

}  // namespace fusedcuda
