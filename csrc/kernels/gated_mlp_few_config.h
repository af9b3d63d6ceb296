// Whether a gated MLP of few rows is two launches of products of few rows (gated_mlp_few.cuh). Pure
// host functions without CUDA calls.
#pragma once

#include "common/few_rows_config.h"
#include "gated_mlp_decode.h"

namespace fusedcuda {

struct GatedMlpFewConfig {
  FewRowsConfig hidden, output;
};

namespace gated_mlp_few_detail {

constexpr int kPairs = kFewRowsTile / 2;  // a tile: rows of w_gate, and the same of w_up

inline FewRowsProblem hidden_problem(const GatedMlpDecodeParams& p) {
  return {p.m, ceil_div(p.f, kPairs), p.k, 0, 0};
}
inline FewRowsProblem output_problem(const GatedMlpDecodeParams& p) {
  return few_rows::linear_problem(p.m, p.n, p.f);
}

}  // namespace gated_mlp_few_detail

inline GatedMlpFewConfig choose_gated_mlp_few_config(const GatedMlpDecodeParams& p,
                                                     const DeviceTraits& device) {
  return {few_rows::choose(gated_mlp_few_detail::hidden_problem(p), device),
          few_rows::choose(gated_mlp_few_detail::output_problem(p), device)};
}

inline bool gated_mlp_few_can_run(const GatedMlpDecodeParams& p, const DeviceTraits& device) {
  for (const GemmMatrix& matrix : {p.x, p.w_gate, p.w_up, p.w_down}) {
    if (!gemm::can_be_boxed(matrix.data, matrix.stride, p.dtype)) return false;
  }
  return few_rows::can_run(gated_mlp_few_detail::hidden_problem(p), p.dtype, device) &&
         few_rows::can_run(gated_mlp_few_detail::output_problem(p), p.dtype, device);
}

}  // namespace fusedcuda
