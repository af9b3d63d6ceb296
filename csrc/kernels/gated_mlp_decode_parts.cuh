// What a block of gated_mlp_decode.cuh has: its part of the weights, and its shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/mbarrier.cuh"
#include "common/shared.cuh"
#include "gated_mlp_decode.h"
#include "gated_mlp_decode_config.h"

namespace fusedcuda {
namespace decode {

// ------------------------------------------------------------------------------------------------
// Weights
// ------------------------------------------------------------------------------------------------

struct Rows {
  int first, count;
};

// What a block has of the weights.
class Share {
 public:
  __device__ __forceinline__ explicit Share(const GatedMlpDecodeParams& p) : p_(p) {}

  // Of w_gate and of w_up in a round: 8 rows; of the last round, which is none for all blocks, an
  // equal part, maybe none.
  __device__ __forceinline__ Rows pairs(int round) const {
    const int of_round = kDecodePairs * static_cast<int>(gridDim.x), first = round * of_round;
    if (of_round <= p_.f - first)  // no division, then
      return {first + kDecodePairs * static_cast<int>(blockIdx.x), kDecodePairs};
    const Rows part = part_of(p_.f - first);
    return {first + part.first, part.count};
  }

  __device__ __forceinline__ Rows down() const { return part_of(p_.n); }

  __device__ __forceinline__ int down_tiles() const {
    return (down().count + kDecodeTileRows - 1) / kDecodeTileRows;
  }

  __device__ __forceinline__ Rows down_tile(int tile) const {
    const Rows all = down();
    const int before = tile * kDecodeTileRows;
    return {all.first + before, min(kDecodeTileRows, all.count - before)};
  }

 private:
  static __device__ __forceinline__ Rows part_of(int rows) {
    const int first = static_cast<int>(int64_t{rows} * blockIdx.x / gridDim.x);
    const int next = static_cast<int>(int64_t{rows} * (blockIdx.x + 1) / gridDim.x);
    return {first, next - first};
  }

  const GatedMlpDecodeParams& p_;
};

struct Columns {
  int first, count;
};

// The columns of w_down, and of h, in a pass.
__device__ __forceinline__ Columns columns_of(int pass, const GatedMlpDecodeParams& p,
                                              const GatedMlpDecodeConfig& c) {
  const int first = pass * c.pass_columns;
  return {first, min(c.pass_columns, p.f - first)};
}

// ------------------------------------------------------------------------------------------------
// Shared memory
// ------------------------------------------------------------------------------------------------

// A place in shared memory that is filled and emptied again and again.
struct Handover {
  Mbarrier filled, emptied;
};

// By a warp that has read from shared memory what is emptied; `read`: a word with something of each
// of its loads. An arrival does not wait for loads that are under way, and the copy engine may be
// faster than a load behind many others. So the arrival is made to need what they bring:
// blockIdx.y is 0, but the compiler does not know.
__device__ __forceinline__ void arrive_behind(unsigned read, Mbarrier* barrier) {
  (barrier + (read & blockIdx.y))->arrive();
}

template <int kSteps>
class BlockMemory {
 public:
  static constexpr int kStageColumns = stage_columns(kSteps);
  static constexpr int kPitch = row_pitch(kStageColumns);  // bytes between rows of a stage

  __device__ __forceinline__ explicit BlockMemory(const GatedMlpDecodeConfig& c)
      : data_(static_cast<char*>(dynamic_shared())), c_(c) {}

  __device__ __forceinline__ char* stage(int i) const {
    return data_ + i * (kDecodeTileRows * kPitch);
  }
  // Of a warp and 8 rows of x; a value a lane.
  __device__ __forceinline__ float4* sums(int buffer, int warp, int column_tile) const {
    const int all = (buffer * kDecodeConsumers + warp) * c_.column_tiles + column_tile;
    return reinterpret_cast<float4*>(data_ + c_.sums_offset + all * kSumBytes);
  }
  // Of the passes so far over a tile of w_down.
  __device__ __forceinline__ float4* totals(int tile, int column_tile) const {
    const int all = tile * c_.column_tiles + column_tile;
    return reinterpret_cast<float4*>(data_ + c_.totals_offset + all * kSumBytes);
  }

  __device__ __forceinline__ Handover* stage_handover(int i) const { return handovers() + i; }
  __device__ __forceinline__ Handover* sums_handover(int buffer) const {
    return handovers() + c_.stages + buffer;
  }
  // Of the part of h that a pass needs.
  __device__ __forceinline__ Mbarrier* hidden_is_there(int pass) const {
    return &handovers()[c_.stages + kSumBuffers].filled + pass;
  }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < c_.stages; ++i) {
      stage_handover(i)->filled.init(kDecodeProducers);
      stage_handover(i)->emptied.init(kDecodeConsumers);
    }
    // (All lanes arrive: racecheck does not see that one does it for its warp.)
    for (int i = 0; i < kSumBuffers; ++i) {
      sums_handover(i)->filled.init(kDecodeConsumers * kWarpSize);
      sums_handover(i)->emptied.init(kWarpSize);
    }
    for (int i = 0; i < c_.passes; ++i) hidden_is_there(i)->init(1);
    Mbarrier::fence_init();
  }

 private:
  __device__ __forceinline__ Handover* handovers() const {
    return reinterpret_cast<Handover*>(data_ + c_.barriers_offset);
  }

  char* const data_;
  const GatedMlpDecodeConfig& c_;
};

// Where somebody is who goes round and round through places, filling them or emptying them.
class Turn {
 public:
  __device__ __forceinline__ explicit Turn(int places) : places_(places) {}

  __device__ __forceinline__ int place() const { return place_; }
  __device__ __forceinline__ void wait_until_filled(Handover* of_place) const {
    of_place->filled.wait(round_);
  }
  __device__ __forceinline__ void wait_until_emptied(Handover* of_place) const {
    of_place->emptied.wait(round_ ^ 1);
  }
  __device__ __forceinline__ void next() {
    if (++place_ < places_) return;
    place_ = 0;
    round_ ^= 1;
  }

 private:
  int places_, place_ = 0;
  unsigned round_ = 0;  // even or odd
};

}  // namespace decode
}  // namespace fusedcuda
