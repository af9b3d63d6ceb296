// The steps of a linear layer of 8-bit factors (see linear_act_steps.h).
#pragma once

#include "linear_act_plan.h"

namespace fusedcuda {

// y = act((x x_scale) (weight weight_scale).T + bias), or that divided by out_scale in 8 bits.
struct Fp8Forward {
  LinearForward linear;  // in bfloat16 but for x and weight; its output is y, or as much memory
  const void* x_scale = nullptr;
  const void* weight_scale = nullptr;
  void* eight_bits = nullptr;  // y, or null if y has 16
  const void* out_scale = nullptr;
  const void* inverse_out_scale = nullptr;
};

inline Steps plan_fp8_forward(const Fp8Forward& f, const PlanSource& source) {
  StepPlanner planner(source);
  const LinearForward& linear = f.linear;
  const LinearLayer& layer = linear.layer;
  void* const bias = planner.aligned_bias(linear);
  const bool has_bias = bias != nullptr;
  Matmul matmul = product(layer, layer.m, layer.n, layer.k, linear.x, linear.weight, linear.output);
  matmul.problem.type = CUDA_R_8F_E4M3;
  matmul.problem.epilogue = *forward_epilogue(Activation::kNone, has_bias, false);
  matmul.problem.scaled_factors = 1;
  matmul.operands.a_scale = f.x_scale;
  matmul.operands.b_scale = f.weight_scale;
  add_bias(matmul, bias, 0);

  const char* why = "cuBLASLt has no epilogue for this activation";
  if (const auto epilogue = forward_epilogue(linear.activation, has_bias, false)) {
    Matmul fused = matmul;
    fused.problem.epilogue = *epilogue;
    if (f.eight_bits != nullptr) {
      fused.problem.output_type = CUDA_R_8F_E4M3;
      fused.problem.scaled_output = 1;
      fused.problem.output_alignment = alignment_of(f.eight_bits);
      fused.operands.output = f.eight_bits;
      fused.operands.output_scale = f.inverse_out_scale;
    }
    if (planner.try_matmul("y", fused, &why) != nullptr) return planner.take();
  }

  planner.matmul("z", matmul, why);
  if (linear.activation != Activation::kNone)
    planner.act_rows("y", act_of_z(linear, linear.output), why);
  const int64_t count = layer.m * layer.n;
  if (f.eight_bits != nullptr && count > 0)
    planner.quantize("y", {linear.output.data, f.eight_bits, f.out_scale, count}, why);
  return planner.take();
}

}  // namespace fusedcuda
