// Rotary position embedding of queries and keys: parameters, configuration, launcher. Kernel:
// rope.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/iteration.h"
#include "common/launch.h"

namespace fusedcuda {

constexpr int kRopeThreads = 256;  // the most in a block
// Blocks that share an SM: what 80 registers a thread leave room for.
constexpr int kRopeResidentBlocks = 3;

// Heads whose loads a thread has in flight. Two are 64 bytes a thread, 48 KB an SM. Single elements
// are 2 to 8 bytes and need company.
template <int kVec>
constexpr int kRopeDepth = kVec > 1 ? 2 : 8;

// Strides are those of batch, head, position and element of the head.
struct RopeLayout {
  void* data = nullptr;
  int64_t strides[4] = {};  // in elements
};

struct RopeTensor {
  int heads = 0;
  RopeLayout input;
  RopeLayout output;  // may be the input itself
};

struct RopeTable {
  const void* data = nullptr;
  int64_t strides[3] = {};  // batch (0: one table for all), position, element
};

struct RopeParams {
  DType dtype = DType::kFloat32;        // of q and k
  DType table_dtype = DType::kFloat32;  // of cos and sin: that of q, or float32 beside 16 bits
  int64_t batch = 0;
  int64_t length = 0;        // positions of a sequence
  int64_t head_dim = 0;      // even
  bool half_tables = false;  // one value for each pair instead of one for each element
  bool interleaved = false;  // pairs (2i, 2i + 1) instead of (i, i + head_dim / 2)
  bool transposed = false;   // the backward: turns back
  RopeTensor q, k;
  RopeTable cos, sin;

  int num_heads() const { return q.heads + k.heads; }
  bool is_empty() const { return batch * length * num_heads() * head_dim == 0; }
};

// One launch, as rope_config.h chooses it and rope_plan prints it. A block is threads_x threads
// along a row by threads_y by threads_z rows; of these two, the one whose rows are closer in memory
// is y: heads if heads_inside, else positions.
struct RopePlan {
  int vec = 1;          // elements a thread takes from each half of a row
  int64_t columns = 0;  // such shares of a row
  bool heads_inside = false;
  int threads_x = 0;
  int threads_y = 0;
  int threads_z = 0;
  int heads_per_block = 0;   // every thread takes every tile_heads()-th of them
  int head_groups = 0;       // blocks that share their positions
  int64_t blocks = 0;        // of all positions and heads; 0: nothing to do
  int64_t column_tiles = 0;  // times these along a row
  bool dependent_launch = false;

  int tile_heads() const { return heads_inside ? threads_y : threads_z; }
  int tile_positions() const { return heads_inside ? threads_z : threads_y; }
};

// What the choosers need to know about the current device.
cudaError_t rope_device_traits(DeviceTraits* traits);

// Enqueues on `stream`.
cudaError_t launch_rope(const RopeParams& params, const RopePlan& plan, cudaStream_t stream);

}  // namespace fusedcuda
