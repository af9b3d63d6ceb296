// The steps of a product that goes to memory that is there already, or is added to what that holds
// (see linear_act_steps.h): a linear layer without activation, for the linear_cross_entropy family.
#pragma once

#include "linear_act_plan.h"

namespace fusedcuda {

struct LinearProduct {
  LinearForward linear;     // without activation; its residual is the output where that is added to
  bool in_float32 = false;  // the output, of factors of 16 bits
};

inline Steps plan_product(const LinearProduct& p, const PlanSource& source) {
  StepPlanner planner(source);
  const LinearForward& f = p.linear;
  if (!p.in_float32 && (try_narrow(f, planner) || try_hopper(f, planner))) return planner.take();

  const LinearLayer& layer = f.layer;
  void* const bias = planner.aligned_bias(f);
  Matmul matmul = product(layer, layer.m, layer.n, layer.k, f.x, f.weight, f.output);
  if (p.in_float32) matmul.problem.output_type = CUDA_R_32F;
  matmul.problem.epilogue = *forward_epilogue(Activation::kNone, bias != nullptr, false);
  add_c(matmul, f.residual);
  add_bias(matmul, bias, 0);
  planner.matmul("output", matmul);
  return planner.take();
}

}  // namespace fusedcuda
