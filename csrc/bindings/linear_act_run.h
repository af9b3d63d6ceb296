// Runs the steps of linear_act_steps.h, and describes them. What a step of each kind calls is the
// runner's business: torch and the launchers (linear_act.cpp), or loops on the CPU (the tests).
#pragma once

#include <string>

#include "cublaslt_tiles.h"
#include "linear_act_steps.h"

namespace fusedcuda {

// Null, or the step whose product cuBLASLt did not run although it had recommended an algorithm.
template <typename Runner>
const Step* run_steps(const Steps& steps, Runner& runner) {
  for (const Step& step : steps) {
    switch (step.kind) {
      case StepKind::kMatmul: {
        const cublasStatus_t status = runner.matmul(*step.plan, step.matmul.operands);
        if (means_unsupported(status)) return &step;
        check_cublaslt(status, "a matrix product");
        break;
      }
      case StepKind::kHopper:
        runner.hopper(step.hopper, step.config);
        break;
      case StepKind::kHopperBwd:
        runner.hopper_bwd(step.hopper_bwd, step.bwd_config);
        break;
      case StepKind::kNarrow:
        runner.narrow(step.hopper);
        break;
      case StepKind::kOneOutputBwd:
        runner.one_output_bwd(step.one_output, step.one_output_config);
        break;
      case StepKind::kProduct:
        runner.product(step.matmul);
        break;
      case StepKind::kDotRows:
        runner.dot_rows(step.matmul);
        break;
      case StepKind::kBiasRows:
        runner.bias_rows(step.bias_rows);
        break;
      case StepKind::kActRows:
        runner.act_rows(step.rows);
        break;
      case StepKind::kColumnSums:
        runner.column_sums(step.sums, step.sums_config);
        break;
      case StepKind::kQuantize:
        runner.quantize(step.quantize);
        break;
      case StepKind::kCopy:
        runner.copy(step.copy);
        break;
      case StepKind::kPadRows:
        runner.pad_rows(step.pad);
        break;
    }
  }
  return nullptr;
}

// Plans and runs, again without the product that was refused if one is: no step changes what an
// earlier one reads, so everything can be done twice. Returns the steps that were run.
template <typename Plan, typename Runner>
Steps run_planned(const Plan& plan, const PlanSource& source, Runner& runner) {
  for (;;) {
    Steps steps = plan(source);
    const Step* refused = run_steps(steps, runner);
    if (refused == nullptr) return steps;
    source.cache->refuse(refused->matmul.problem);
  }
}

// --- Text

inline const char* kernel_name(const ColumnSumsParams& params, const ColumnSumsConfig& config) {
  const bool is_dy = params.rows.saves == SavedForBackward::kNone;
  if (config.slices == 1) return is_dy ? "column_sums_kernel" : "act_rows_bwd_sum_kernel";
  return is_dy ? "column_sums_kernel, sum_partials_kernel"
               : "act_rows_bwd_sum_kernel, sum_partials_kernel";
}

// The name of what a step launches, as far as it is known.
inline const char* kernel_name(const Step& step) {
  switch (step.kind) {
    case StepKind::kMatmul:
      return "cublasLtMatmul";
    case StepKind::kHopper:
      return "linear_act_kernel_sm90";
    case StepKind::kHopperBwd:
      return "linear_act_dx_kernel_sm90, linear_act_dweight_kernel_sm90";
    case StepKind::kNarrow:
      return "linear_narrow_kernel";
    case StepKind::kOneOutputBwd:
      return step.one_output_config.workspace_size > 0
                 ? "one_output_bwd_kernel, sum_partials_kernel"
                 : "one_output_bwd_kernel";
    case StepKind::kProduct:
      return "torch.matmul";
    case StepKind::kDotRows:
      return "dot_rows_kernel";
    case StepKind::kBiasRows:
      return "torch.copy_";
    case StepKind::kActRows:
      return "act_rows_kernel";
    case StepKind::kColumnSums:
      return kernel_name(step.sums, step.sums_config);
    case StepKind::kQuantize:
      return "torch.div, clamp, to";
    case StepKind::kPadRows:
      return "pad_rows_kernel";
    default:
      return "cudaMemcpyAsync";
  }
}

inline std::string quoted(const std::string& text) { return "\"" + text + "\""; }

inline std::string tile_name(const GemmConfig& config) {
  return std::to_string(config.tile_rows) + "x" + std::to_string(config.tile_columns) +
         (config.cluster > 1 ? ", clusters of " + std::to_string(config.cluster) : "");
}

// As far as is known: the parts of a split product or sum are added up by a kernel of their own.
inline int num_kernels(const Step& step, int split_k) {
  if (step.kind == StepKind::kColumnSums) return step.sums_config.slices > 1 ? 2 : 1;
  if (step.kind == StepKind::kOneOutputBwd)
    return step.one_output_config.workspace_size > 0 ? 2 : 1;
  if (step.kind != StepKind::kHopperBwd) return split_k > 1 ? 2 : 1;
  return (step.hopper_bwd.dx.data != nullptr ? 1 : 0) + (step.hopper_bwd.dweight == nullptr ? 0
                                                         : split_k > 1                      ? 2
                                                                                            : 1);
}

// A step as a JSON object. What only a device knows is null, 0 or 1 where there is none.
inline std::string describe(const Step& step) {
  const bool is_matmul = step.kind == StepKind::kMatmul;
  const bool is_own = step.kind == StepKind::kHopper || step.kind == StepKind::kHopperBwd ||
                      step.kind == StepKind::kNarrow || step.kind == StepKind::kOneOutputBwd;
  const cublasLtEpilogue_t epilogue = step.matmul.problem.epilogue;
  const bool in_epilogue = is_matmul && epilogue != CUBLASLT_EPILOGUE_DEFAULT;
  // c is a residual, or the rows of the bias that the output holds before.
  const MatmulOperands& operands = step.matmul.operands;
  const bool adds_residual = is_matmul && operands.c != nullptr && operands.c != operands.output;
  std::string algorithm = "null", tile = "null";
  AlgorithmTraits traits;
  size_t workspace = 0;
  if (step.kind == StepKind::kHopper) tile = quoted(tile_name(step.config));
  if (step.kind == StepKind::kHopperBwd) {
    tile = quoted(tile_name(step.bwd_config.dx));
    traits.split_k = step.bwd_config.dweight.splits;
    workspace = step.bwd_config.workspace_bytes;
  }
  if (step.kind == StepKind::kColumnSums) workspace = step.sums_config.workspace_bytes;
  if (step.kind == StepKind::kOneOutputBwd)
    workspace = step.one_output_config.workspace_bytes(step.one_output.dtype);
  if (step.plan != nullptr) {
    traits = describe(step.plan->algorithm());
    algorithm = std::to_string(traits.id);
    tile = quoted(tile_name(traits.tile));
    workspace = step.plan->workspace_bytes();
  }
  auto member = [](const char* key, const std::string& value) {
    return ", " + quoted(key) + ": " + value;
  };
  auto boolean = [](bool value) { return value ? "true" : "false"; };
  return "{" + quoted("kernel") + ": " + quoted(kernel_name(step)) +
         member("what", quoted(step.what)) +
         member("epilogue", in_epilogue ? quoted(name_of(epilogue)) : "null") +
         member("adds_c", boolean(adds_residual)) + member("tile", tile) +
         member("split_k", std::to_string(traits.split_k)) +
         member("kernels", std::to_string(num_kernels(step, traits.split_k))) +
         member("workspace_bytes", std::to_string(workspace)) + member("algorithm", algorithm) +
         member("tuned", boolean(step.plan != nullptr && step.plan->tuned())) +
         member("fused", boolean(in_epilogue || is_own)) +
         member("why", step.why == nullptr ? "null" : quoted(step.why)) + "}";
}

inline std::string describe(const Steps& steps) {
  std::string json;
  for (const Step& step : steps) json += (json.empty() ? "" : ", ") + describe(step);
  return "[" + json + "]";
}

}  // namespace fusedcuda
