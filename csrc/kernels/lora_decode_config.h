// Whether a linear layer of few rows and its adapter are one launch (lora_decode.cuh), and how its
// blocks divide the weight. Pure host functions without CUDA calls.
#pragma once

#include <cstdint>

#include "common/few_rows_config.h"
#include "lora.h"

namespace fusedcuda {

constexpr int kLoraDecodeMostRank = 64;

namespace lora_decode_detail {

constexpr int rank_tiles(int rank) { return (rank + 15) / 16; }
// Elements between rows of all ranks in shared memory: an odd number of 16-byte pieces, so that the
// same piece of eight rows lies in all banks.
constexpr int rank_pitch(int rank) { return 16 * rank_tiles(rank) + 8; }

// A row of a tile needs its bias, and its row of `up`.
inline FewRowsProblem problem_of(const LoraProductParams& p) {
  FewRowsProblem problem;
  problem.rows = p.linear.m;
  problem.tiles = ceil_div(p.linear.n, kFewRowsTile);
  problem.k = p.linear.k;
  problem.common_tiles = rank_tiles(p.rank);
  problem.bytes_of_own_tile =
      kFewRowsTile * (static_cast<int>(sizeof(float)) + rank_pitch(p.rank) * 2);
  return problem;
}

}  // namespace lora_decode_detail

inline FewRowsConfig choose_lora_decode_config(const LoraProductParams& p,
                                               const DeviceTraits& device) {
  return few_rows::choose(lora_decode_detail::problem_of(p), device);
}

inline bool lora_decode_can_run(const LoraProductParams& p, const DeviceTraits& device) {
  const LinearActParams& l = p.linear;
  auto fits = [&](const GemmFactor& f) {
    return f.k_is_inner && gemm::can_be_boxed(f.data, f.stride, l.dtype);
  };
  return p.rank >= 1 && p.rank <= kLoraDecodeMostRank && l.saves == SavedForBackward::kNone &&
         fits(l.a) && fits(l.b) && fits(p.down) && fits(l.extra_b) &&
         few_rows::can_run(lora_decode_detail::problem_of(p), l.dtype, device);
}

}  // namespace fusedcuda
