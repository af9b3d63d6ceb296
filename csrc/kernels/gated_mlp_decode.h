// A gated MLP of few rows in one launch: parameters, configuration, launcher. Kernel:
// gated_mlp_decode.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/gemm_config.h"
#include "common/launch.h"

namespace fusedcuda {

// y = (act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T, the product in the middle rounded once.
struct GatedMlpDecodeParams {
  DType dtype = DType::kBFloat16;  // of everything
  Activation activation = Activation::kSilu;
  int m = 0, k = 0, f = 0, n = 0;
  GemmMatrix x;             // m x k
  GemmMatrix w_gate, w_up;  // f x k; may be halves of one matrix
  GemmMatrix w_down;        // n x f
  void* h = nullptr;        // m x f, contiguous: what the blocks tell each other
  void* y = nullptr;        // m x n, contiguous
};

// Where the blocks count how far they are: all zeros before the launch, and again behind it. Two
// launches that may run at the same time need counters of their own. They are those of a slot,
// which the library has, or in memory that the caller has.
constexpr int kDecodeCounters = 16;  // of a launch
constexpr int kDecodeSlots = 1024;   // 64 KB
struct DecodeCounters {
  int slot = 0;
  unsigned* memory = nullptr;  // of kDecodeCounters; null: the slot's
};

// As gated_mlp_decode_config.h chooses it and the plan prints it. A tile has 16 rows of weights: 8
// of w_gate and the same 8 of w_up, or 16 of w_down.
struct GatedMlpDecodeConfig {
  int column_tiles = 0;    // of 8 rows of x, which are columns to the tensor cores
  int blocks = 0;          // one an SM
  int rounds = 0;          // tiles of w_gate and w_up that a block takes
  int rounds_counted = 0;  // together, by one counter
  int passes = 0;          // over the block's rows of w_down, each of a part of their columns
  int pass_columns = 0;
  int down_tiles = 0;  // of w_down, the most of a block
  int stages = 0;      // of the ring through which the weights go
  int under_way = 0;   // of those, the most whose copies are started and not there yet
  int sums_offset = 0, totals_offset = 0, barriers_offset = 0;  // in shared memory, behind the ring
  size_t shared_bytes = 0;
};

// Enqueues on `stream` what gated_mlp_decode_can_run() accepts (gated_mlp_decode_config.h).
cudaError_t launch_gated_mlp_decode(const GatedMlpDecodeParams& params,
                                    const GatedMlpDecodeConfig& config,
                                    const DecodeCounters& counters, cudaStream_t stream);

}  // namespace fusedcuda
