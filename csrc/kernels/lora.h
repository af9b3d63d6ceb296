// The skinny products of a low-rank adapter, and the dropout of its input: parameters,
// configurations, launchers. Kernels: lora*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "common/gemm_config.h"
#include "common/launch.h"
#include "common/narrow_rows.h"
#include "common/row.h"
#include "linear_act.h"

namespace fusedcuda {

constexpr int kMaxLoraRank = 512;

// Elements from row to row of t: the rank, and zeros up to a multiple of 16 bytes.
inline int lora_pitch(int rank) { return (rank + 7) / 8 * 8; }

// Drops the elements of x whose 16 random bits are below `threshold`; see DropoutMask.
struct LoraDropout {
  const int64_t* seed = nullptr;  // on the device; null: keeps all
  uint32_t threshold = 0;
};

// t[m, r] = scale * sum over k of dropout(x)[m, k] * factor[r, k], without dropout's own factor.
struct LoraDownParams {
  DType dtype = DType::kBFloat16;         // of x and t: 16 bits
  DType factor_dtype = DType::kBFloat16;  // the same, or float32, which is rounded to it
  int64_t rows = 0;
  int columns = 0;
  int rank = 0;
  RowMatrix x;
  const void* factor = nullptr;
  int64_t factor_stride = 0;   // between ranks or, if these are neighbours, between columns
  bool rank_is_inner = false;  // the ranks are neighbours
  float scale = 1;
  LoraDropout dropout;
  void* t = nullptr;  // [rows, lora_pitch(rank)], contiguous
};

// output[r, k] = scale * sum over m of t[m, r] * dropout(x)[m, k], or its transpose.
struct LoraUpParams {
  DType dtype = DType::kBFloat16;         // of x and t: 16 bits
  DType output_dtype = DType::kBFloat16;  // the same, or float32
  int64_t rows = 0;
  int columns = 0;
  int rank = 0;
  const void* t = nullptr;  // as lora_down leaves it, aligned to 16 bytes
  RowMatrix x;
  float scale = 1;
  LoraDropout dropout;
  bool transposed = false;
  void* output = nullptr;  // [rank, columns] or [columns, rank], contiguous
};

struct LoraDropoutParams {
  DType dtype = DType::kFloat32;  // any
  int64_t rows = 0;
  int columns = 0;
  RowMatrix x;
  double scale = 1;
  LoraDropout dropout;
  void* output = nullptr;  // [rows, columns], contiguous
};

// output = dropout(rows.a @ rows.b.T): of `rows.a` = t and `rows.b` = a factor, stored by ranks.
struct LoraBranchParams {
  DType dtype = DType::kBFloat16;  // of everything: 16 bits
  NarrowParams rows;
  float scale = 1;
  LoraDropout dropout;
};
constexpr int kLoraBranchBlocksOfSm = 4;

// A linear layer and its adapter in one launch: `linear` with extra_a = t, which it makes, and
// extra_b = up. lora_product is for many rows, without an activation; lora_decode for few.
struct LoraProductParams {
  LinearActParams linear;
  int rank = 0;
  GemmFactor down;  // rank x k, stored row by row
  float scale = 1;
  // For lora_product, as many as lora_product_config.h says: zeros, and floats for parts of t.
  unsigned* counters = nullptr;
  float* parts = nullptr;
};

// What one pass over x gives (lora_pass.cuh): `down` = down_scale * dropout(x) @ factor, `up` =
// up_scale * dropout(x).T @ t, or both without dropout.
struct LoraPassParams {
  DType dtype = DType::kBFloat16;  // of x, factor, t and down: 16 bits
  int64_t rows = 0;
  int columns = 0;
  int rank = 0;
  RowMatrix x;
  LoraDropout dropout;
  // For `down`: rank x columns, stored rank by rank; with `up` columns x lora_pitch(rank).
  const void* factor = nullptr;
  int64_t factor_stride = 0;
  float down_scale = 1;
  void* down = nullptr;  // [rows, lora_pitch(rank)], contiguous; null: not wanted
  // For `up`: as lora_down leaves it, aligned to 16 bytes.
  const void* t = nullptr;
  float up_scale = 1;
  DType up_dtype = DType::kBFloat16;  // the same as the others, or float32
  bool transposed = false;            // `up` has its ranks side by side
  void* up = nullptr;  // [rank, columns] or [columns, rank], contiguous; null: not wanted
};

// One launch of a product, as lora_config.h chooses it and the plans print it. What is multiplied
// passes through shared memory in stages, of which each has a piece of x and one of the other
// factor (of lora_up: t).
struct LoraConfig {
  bool aligned_x = false;             // rows of x begin at multiples of 16 bytes
  bool aligned_factor = false;        // so do those of the other factor
  int rows_of_stage = 0;              // of x
  int columns_of_stage = 0;           // likewise
  int rank_groups = 0;                // of 16 ranks, that a block has
  int chunks = 0;                     // of so many ranks
  int64_t tiles = 0;                  // of rows (lora_down) or of columns (lora_up)
  int splits = 0;                     // parts of the sum, which are added up by a second kernel
  int x_pitch = 0, factor_pitch = 0;  // in shared memory, in elements
  int factor_offset = 0, bytes_of_stage = 0;  // in bytes
  size_t shared_bytes = 0;
  int64_t workspace_size = 0;  // in floats
  bool dependent_launch = false;

  bool is_empty() const { return tiles == 0; }
  int64_t blocks() const { return tiles * chunks * splits; }
};

cudaError_t launch_lora_down(const LoraDownParams& params, const LoraConfig& config,
                             void* workspace, cudaStream_t stream);
cudaError_t launch_lora_up(const LoraUpParams& params, const LoraConfig& config, void* workspace,
                           cudaStream_t stream);
cudaError_t launch_lora_dropout(const LoraDropoutParams& params, const DeviceTraits& device,
                                cudaStream_t stream);

// Of what lora_pass_can_run() accepts (lora_pass_config.h).
struct LoraPassConfig;
cudaError_t launch_lora_pass(const LoraPassParams& params, const LoraPassConfig& config,
                             void* workspace, cudaStream_t stream);

// Of what narrow_can_run() accepts; by `rows.config`.
cudaError_t launch_lora_branch(const LoraBranchParams& params, bool dependent, cudaStream_t stream);

// Of what lora_product_can_run() accepts.
cudaError_t launch_lora_product(const LoraProductParams& params, const GemmConfig& config,
                                cudaStream_t stream);

// Of what lora_decode_can_run() accepts (lora_decode_config.h).
struct FewRowsConfig;  // common/few_rows_config.h
cudaError_t launch_lora_decode(const LoraProductParams& params, const FewRowsConfig& config,
                               cudaStream_t stream);

// What the choosers need to know about the current device: of the skinny products, and of these.
cudaError_t lora_device_traits(DeviceTraits* traits);
cudaError_t lora_product_device_traits(DeviceTraits* traits);
cudaError_t lora_decode_device_traits(DeviceTraits* traits);

}  // namespace fusedcuda
