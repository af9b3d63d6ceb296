// Whether a linear layer is a product of few rows (linear_few.cuh). Pure host functions without
// CUDA calls.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "common/few_rows_config.h"
#include "linear_act.h"

namespace fusedcuda {

inline FewRowsProblem linear_few_problem(const LinearActParams& p) {
  return few_rows::linear_problem(p.m, p.n, p.k);
}

inline FewRowsConfig choose_linear_few_config(const LinearActParams& p,
                                              const DeviceTraits& device) {
  return few_rows::choose(linear_few_problem(p), device);
}

// Whether rows of the operands, and of others that lie like them, can be read in whole pieces.
inline bool linear_few_can_read(const LinearActParams& p,
                                std::initializer_list<GemmFactor> others = {}) {
  auto fits = [&](const GemmFactor& f) {
    return f.k_is_inner && gemm::can_be_boxed(f.data, f.stride, p.dtype);
  };
  return fits(p.a) && fits(p.b) && std::all_of(others.begin(), others.end(), fits);
}

inline bool linear_few_can_run(const LinearActParams& p, const DeviceTraits& device) {
  return p.saves == SavedForBackward::kNone && p.extra_k == 0 && linear_few_can_read(p) &&
         few_rows::can_run(linear_few_problem(p), p.dtype, device);
}

}  // namespace fusedcuda
