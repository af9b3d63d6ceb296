// Whether a linear layer of few rows and its adapter are one launch (lora_decode.cuh), and how its
// blocks divide the weight. Pure host functions without CUDA calls.
#pragma once

#include <cstdint>

#include "linear_few_config.h"
#include "lora.h"

namespace fusedcuda {

constexpr int kLoraDecodeMostRank = 64;

namespace lora_decode_detail {

constexpr int rank_tiles(int rank) { return (rank + 15) / 16; }
// Elements between rows of all ranks in shared memory: an odd number of 16-byte pieces, so that the
// same piece of eight rows lies in all banks.
constexpr int rank_pitch(int rank) { return 16 * rank_tiles(rank) + 8; }

// A linear layer whose tiles need their rows of `up` as well.
inline FewRowsProblem problem_of(const LoraProductParams& p) {
  FewRowsProblem problem = linear_few_problem(p.linear);
  problem.common_tiles = rank_tiles(p.rank);
  problem.bytes_of_own_tile += kFewRowsTile * rank_pitch(p.rank) * 2;
  return problem;
}

}  // namespace lora_decode_detail

inline FewRowsConfig choose_lora_decode_config(const LoraProductParams& p,
                                               const DeviceTraits& device) {
  return few_rows::choose(lora_decode_detail::problem_of(p), device);
}

inline bool lora_decode_can_run(const LoraProductParams& p, const DeviceTraits& device) {
  LinearActParams linear = p.linear;
  linear.extra_k = 0;  // the rank, which is another thing here
  auto fits = [&](const GemmFactor& f) {
    return f.k_is_inner && gemm::can_be_boxed(f.data, f.stride, linear.dtype);
  };
  return p.rank >= 1 && p.rank <= kLoraDecodeMostRank && fits(p.down) && fits(linear.extra_b) &&
         linear_few_can_run(linear, device) &&
         few_rows::can_run(lora_decode_detail::problem_of(p), linear.dtype, device);
}

}  // namespace fusedcuda
