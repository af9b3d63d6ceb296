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
  const LinearActParams& linear = p.linear;
  return p.rank >= 1 && p.rank <= kLoraDecodeMostRank && linear.saves == SavedForBackward::kNone &&
         linear_few_can_read(linear, {p.down, linear.extra_b}) &&
         few_rows::can_run(lora_decode_detail::problem_of(p), linear.dtype, device);
}

}  // namespace fusedcuda
