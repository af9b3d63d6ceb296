// A warp of gated_mlp_decode.cuh that multiplies weights in shared memory.
//
// mma.sync with weights as its 16 rows and x, or h, as its columns, which stay in the warp's
// registers for as many weights as there are: 128 of each thread. 8 rows of x are two instructions
// for a kilobyte of weights. For a stage of the ring a warp waits and loads, and has two chains of
// two of them, 33 clocks each: 200 clocks, where the memory needs 900.
//
// The order of the columns in a sum is free, as long as both factors have the same: a lane loads
// eight neighbours of a row, 16 bytes, where the tensor cores would want four times two. The first
// four are its part of one product, the others of the next one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/grid_counter.cuh"
#include "common/mma.cuh"
#include "gated_mlp_decode_parts.cuh"

namespace fusedcuda {
namespace decode {

template <typename T, int kColumnTiles, int kSteps>
class Consumer {
 public:
  // `m`: rows of x.
  __device__ __forceinline__ Consumer(int m, int warp, const GatedMlpDecodeConfig& c,
                                      const BlockMemory<kSteps>& shared)
      : m_(m), warp_(warp), shared_(shared), stages_(c.stages) {}

  // These columns of x, or of h. Beyond its rows, and beyond the columns, there are zeros.
  __device__ __forceinline__ void load(const GemmMatrix& matrix, Columns part) {
    const int own_columns = part.count - first_column();
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const int row = tile * kDecodeColumns + lane_ / 4;
      const int count = row < m_ ? own_columns : 0;
      const T* from =
          static_cast<const T*>(matrix.data) + row * matrix.stride + part.first + first_column();
      keep_in_registers(&from);
#pragma unroll
      for (int stage = 0; stage < kMostStages; ++stage) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const int offset = offset_of(stage, step);
          uint4& columns = columns_[stage][step][tile];
          columns = {};
          if (offset < count)
            columns = load_of_others(reinterpret_cast<const uint4*>(from + offset));
        }
      }
    }
  }

  // The sums of the next tile of weights, which has `count` columns, for the finisher.
  __device__ __forceinline__ void multiply_tile(int count) {
    float sums[kChains][kColumnTiles][4] = {};
    const int own_columns = count - first_column();
#pragma unroll
    for (int stage = 0; stage < kMostStages; ++stage) {
      if (stage * kStageColumns >= count) break;
      Handover* const handover = shared_.stage_handover(stages_.place());
      const char* const row =
          shared_.stage(stages_.place()) + lane_ / 4 * kPitch + first_column() * sizeof(T);
      stages_.wait_until_filled(handover);
      unsigned read = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint4 upper = {}, lower = {};                // rows l / 4 and l / 4 + 8
        if (offset_of(stage, step) < own_columns) {  // what is behind may be NaN
          const char* const at = row + offset_of(0, step) * sizeof(T);
          upper = *reinterpret_cast<const uint4*>(at);
          lower = *reinterpret_cast<const uint4*>(at + kDecodePairs * kPitch);
        }
        read |= upper.x | lower.x;
#pragma unroll
        for (int tile = 0; tile < kColumnTiles; ++tile) {
          const uint4& x = columns_[stage][step][tile];
          multiply_tiles<T>(sums[0][tile], {upper.x, lower.x, upper.y, lower.y}, {x.x, x.y});
          multiply_tiles<T>(sums[kChains - 1][tile], {upper.z, lower.z, upper.w, lower.w},
                            {x.z, x.w});
        }
      }
      __syncwarp();
      if (lane_ == 0) arrive_behind(read, &handover->emptied);
      stages_.next();
    }
    Handover* const handover = shared_.sums_handover(buffers_.place());
    buffers_.wait_until_emptied(handover);
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      float* const s = sums[0][tile];
#pragma unroll
      for (int i = 0; kChains > 1 && i < 4; ++i) s[i] += sums[kChains - 1][tile][i];
      shared_.sums(buffers_.place(), warp_, tile)[lane_] = make_float4(s[0], s[1], s[2], s[3]);
    }
    handover->filled.arrive();
    buffers_.next();
  }

 private:
  static constexpr int kStageColumns = BlockMemory<kSteps>::kStageColumns;
  static constexpr int kPitch = BlockMemory<kSteps>::kPitch;
  static constexpr int kMostStages = kDecodeFragments / kColumnTiles / kSteps;  // of a tile
  // Products that wait for each other's sums. Two chains, where there are few columns to turn to.
  static constexpr int kChains = 2;

  // The columns that a lane has in a step begin at those of its first one and so many more.
  static __device__ __forceinline__ constexpr int offset_of(int stage, int step) {
    return stage * kStageColumns + step * kDecodeStepK;
  }
  // Or the compiler fetches and adds up the address for each load, one after the other.
  static __device__ __forceinline__ void keep_in_registers(const T** address) {
#ifndef FUSEDCUDA_EMULATION
    asm volatile("" : "+l"(*address));
#endif
  }
  __device__ __forceinline__ int first_column() const {
    return warp_ * kSteps * kDecodeStepK + lane_ % 4 * 8;
  }

  const int m_, warp_, lane_ = static_cast<int>(threadIdx.x) % kWarpSize;
  const BlockMemory<kSteps>& shared_;
  Turn stages_, buffers_{kSumBuffers};
  uint4 columns_[kMostStages][kSteps][kColumnTiles];  // of lane l, those of row l / 4 of eight
};

}  // namespace decode
}  // namespace fusedcuda
