// What the warps of a Hopper product share: the factors in memory, the ring of stages that they
// come through, and the rest of the shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hopper_gemm.h"
#include "shared.cuh"
#include "tensor_map.h"
#include "wgmma.cuh"

namespace fusedcuda {

constexpr int kGemmThreads = 3 * kWarpgroup;
constexpr int kOnesColumns = 8;

struct GemmFactors {
  TensorMap a, b;
  TensorMap scale;             // what a is multiplied by
  TensorMap extra_a, extra_b;  // the second pair
};

// b is two matrices of the same shape.
struct PairedGemmFactors : GemmFactors {
  TensorMap second_b;
};

// Dynamic shared memory of a kernel. Each computing warpgroup has buffers for what it stores and
// room for the bias of a tile (no product with a scaled factor has one).
template <typename Gemm>
class GemmShared {
 public:
  static constexpr int kOnesBytes = Gemm::kIsScaled ? kOnesColumns * kSwizzleBytes : 0;
  static constexpr int kAStages = Gemm::kNumStages * Gemm::kStageBytes;
  static constexpr int kBuffers = kAStages + Gemm::kNumAStages * Gemm::kAStageBytes;
  static constexpr int kOnes = kBuffers + 2 * Gemm::kBuffersBytes;
  static constexpr int kBias = kOnes + kOnesBytes;
  static constexpr int kBiasBytes =
      Gemm::kIsScaled ? 0 : 2 * Gemm::kTileColumns * static_cast<int>(sizeof(float));
  static constexpr int kStages = kBias + kBiasBytes;
  static constexpr int kBytes = kStages + static_cast<int>(sizeof(typename Gemm::Stages));
  static_assert(kBytes <= kGemmSharedBytes);

  __device__ __forceinline__ unsigned char* stage(int stage) const {
    return base_ + stage * Gemm::kStageBytes;
  }
  __device__ __forceinline__ unsigned char* a_stage(int stage) const {
    return base_ + kAStages + stage * Gemm::kAStageBytes;
  }
  __device__ __forceinline__ unsigned char* buffers(int warpgroup) const {
    return base_ + kBuffers + warpgroup * Gemm::kBuffersBytes;
  }
  // A factor of eight rows whose elements are all 1.
  __device__ __forceinline__ unsigned char* ones() const { return base_ + kOnes; }
  __device__ __forceinline__ float* bias(int warpgroup) const {
    return reinterpret_cast<float*>(base_ + kBias) + warpgroup * Gemm::kTileColumns;
  }
  __device__ __forceinline__ typename Gemm::Stages* stages() const {
    return reinterpret_cast<typename Gemm::Stages*>(base_ + kStages);
  }

 private:
  unsigned char* base_ = static_cast<unsigned char*>(dynamic_shared());
};

// What the three idle warps of the producer's warpgroup do beside a product: nothing. Others have
// rows of extra_a to make, which the producer waits for (lora_product.cuh).
struct NoGemmSide {
  struct Params {};
  static constexpr bool kRuns = false;
  // Of a thread of the producer's warpgroup and of the others: 504 for three threads.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  __device__ __forceinline__ explicit NoGemmSide(const Params& /*params*/) {}
  __device__ __forceinline__ void run(int /*warp*/, int /*warps*/) const {}
  __device__ __forceinline__ void wait_for_rows(int /*first*/) const {}
};

// A place in a ring of stages, and how often it has been around.
template <int kStages>
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int stages) {
    const int to = stage + stages;
    parity ^= static_cast<unsigned>(to / kStages) & 1;
    stage = to % kStages;
  }
};

}  // namespace fusedcuda
