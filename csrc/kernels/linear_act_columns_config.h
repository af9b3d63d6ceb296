// How the sums of columns are divided among blocks: pure host functions, no CUDA.
#pragma once

#include <algorithm>

#include "common/iteration.h"
#include "common/row.h"
#include "linear_act.h"

namespace fusedcuda {

constexpr int kColumnSumsThreads = 256;
// Blocks on an SM. A thread loads 64 to 128 bytes before it uses the first, so 64 to 128 KB are on
// their way to an SM; the copy bandwidth takes 32, and some warps are at their sums.
constexpr int kColumnSumsBlocksOfSm = 3;

// Rows that a thread loads before it uses the first. An activation is code for each of them.
template <SavedForBackward kSaves>
constexpr int kRowsAhead = kSaves == SavedForBackward::kPreActivation ? 2 : 4;

struct ColumnSumsConfig {
  bool vectors = false;         // 16 bytes of a row a load, or one element
  int threads_along = 1;        // of a block, along a row; the others have rows of their own
  int64_t column_blocks = 1;    // of a matrix
  int slices = 1;               // blocks that share the rows of the same columns
  int64_t workspace_bytes = 0;  // of their sums: [slices, batch, n] of the compute type

  int rows_of_block() const { return kColumnSumsThreads / threads_along; }
};

namespace linear_act {

inline bool can_load_vectors(const ActRowsParams& p) {
  const int vec = vector_width(p.dtype);
  auto fits = [&](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % vec == 0;
  };
  const bool has_elements = p.saved != nullptr && p.saves != SavedForBackward::kMask;
  return p.n % vec == 0 && fits(p.input.data, p.input.stride) &&
         fits(p.output.data, p.output.stride) && (!has_elements || fits(p.saved, p.n));
}

}  // namespace linear_act

// As many slices as blocks run at the same time, but none of fewer rows than threads have on their
// way; and a single one, which needs no second kernel, where the rows are few.
inline ColumnSumsConfig choose_column_sums_config(const ColumnSumsParams& params,
                                                  const DeviceTraits& device) {
  const ActRowsParams& p = params.rows;
  ColumnSumsConfig config;
  config.vectors = linear_act::can_load_vectors(p);
  const int64_t vec = config.vectors ? vector_width(p.dtype) : 1;
  const int64_t vectors_of_row = ceil_div(p.n, vec);
  config.threads_along = threads_along_row(vectors_of_row);
  config.column_blocks = ceil_div(vectors_of_row, config.threads_along);

  constexpr int64_t kFewRounds = 2;
  const int64_t m = params.batch > 0 ? p.m / params.batch : 0;
  const int rows_ahead = p.saves == SavedForBackward::kPreActivation
                             ? kRowsAhead<SavedForBackward::kPreActivation>
                             : kRowsAhead<SavedForBackward::kNone>;
  const int64_t rounds = ceil_div(m, config.rows_of_block() * rows_ahead);
  const int64_t of_columns = std::max<int64_t>(config.column_blocks * params.batch, 1);
  const int64_t resident = int64_t{device.num_sms} * kColumnSumsBlocksOfSm;
  if (rounds > kFewRounds)
    config.slices = static_cast<int>(std::clamp<int64_t>(resident / of_columns, 1, rounds));
  if (config.slices > 1) {
    config.workspace_bytes = config.slices * params.batch * p.n * compute_size_of(p.dtype);
  }
  return config;
}

}  // namespace fusedcuda
