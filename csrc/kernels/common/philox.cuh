// Random numbers that are a function of a key and a counter, so that nobody has to keep them:
// Philox4x32 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011) with 7 rounds, the
// fewest that pass all of TestU01's BigCrush. And dropout by them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fusedcuda {

constexpr int kPhiloxRounds = 7;

__device__ __forceinline__ uint4 philox(uint4 counter, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t first = uint64_t{counter.x} * 0xD2511F53u;
    const uint64_t second = uint64_t{counter.z} * 0xCD9E8D57u;
    counter = {static_cast<uint32_t>(second >> 32) ^ counter.y ^ key0,
               static_cast<uint32_t>(second), static_cast<uint32_t>(first >> 32) ^ counter.w ^ key1,
               static_cast<uint32_t>(first)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Which elements of a matrix are kept. Eight neighbours share a call of the generator, whose
// counter is (column / 8, row); each has 16 bits of what it gives. It is the mask of keep_mask() in
// fusedcuda/ops/_lora_dropout.py.
class DropoutMask {
 public:
  // seed: null where everything is kept. An element is dropped if its bits are below `threshold`.
  __device__ DropoutMask(const int64_t* seed, uint32_t threshold)
      : threshold_(threshold), drops_(seed != nullptr) {
    if (!drops_) return;
    const uint64_t bits = static_cast<uint64_t>(*seed);
    key0_ = static_cast<uint32_t>(bits);
    key1_ = static_cast<uint32_t>(bits >> 32);
  }

  __device__ bool drops() const { return drops_; }

  // Of the elements from `column` on, a multiple of 8: ones where an element of 16 bits is kept.
  __device__ __forceinline__ uint4 of_eight(int64_t row, int column) const {
    const uint4 random = bits_of_eight(row, column);
    return {of_pair(random.x), of_pair(random.y), of_pair(random.z), of_pair(random.w)};
  }

  // Likewise, whether each of them is kept, in half as many instructions. Not all may be dropped:
  // a `threshold` below 2^16.
  __device__ __forceinline__ void keeps(int64_t row, int column, bool (&kept)[8]) const {
    const uint4 random = bits_of_eight(row, column);
    const uint32_t words[4] = {random.x, random.y, random.z, random.w};
    const uint32_t threshold = threshold_ << 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      kept[2 * i] = words[i] << 16 >= threshold;
      kept[2 * i + 1] = words[i] >= threshold;
    }
  }

 private:
  __device__ __forceinline__ uint4 bits_of_eight(int64_t row, int column) const {
    const uint64_t bits = static_cast<uint64_t>(row);
    return philox({static_cast<uint32_t>(column) / 8, static_cast<uint32_t>(bits),
                   static_cast<uint32_t>(bits >> 32), 0},
                  key0_, key1_);
  }

  __device__ __forceinline__ uint32_t of_pair(uint32_t random) const {
    // Negative where it is dropped; the sign fills both bytes. (Of comparisons and selections there
    // are seven instructions instead of five, which is 2 us of 8192 x 4096 elements on an H200.)
    const uint32_t first = (random & 0xffff) - threshold_;
    const uint32_t second = (random >> 1) - (threshold_ << 15);
#ifdef __CUDA_ARCH__
    uint32_t dropped;
    asm("prmt.b32 %0, %1, %2, 0xffbb;" : "=r"(dropped) : "r"(first), "r"(second));
    return ~dropped;
#else
    return (first >> 31 ? 0 : 0xffff) | (second >> 31 ? 0 : 0xffff0000u);
#endif
  }

  uint32_t key0_ = 0, key1_ = 0;
  uint32_t threshold_;
  bool drops_;
};

}  // namespace fusedcuda
