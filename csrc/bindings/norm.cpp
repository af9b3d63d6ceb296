// The norm family for torch: checks, empty case, allocation, launch. Schemas and references are in
// fusedcuda/ops/norm.py.
#include "../kernels/norm.h"

#include <optional>
#include <string>
#include <vector>

#include "../kernels/norm_config.h"
#include "row_call.h"

namespace fusedcuda {

inline std::string json_members(const NormConfig& config) {
  return concat(json_members(config.row), ", \"stages\": ", config.stages,
                ", \"shared_bytes\": ", config.shared_bytes, ", \"partials\": ", config.partials,
                ", \"workspace\": ", config.workspace_size);
}

namespace {

using OptionalTensor = std::optional<Tensor>;

NormParameter parameter(RowCall& call, const char* name, const OptionalTensor& tensor) {
  if (!tensor) return {};
  const RowVector vector = call.vector(name, *tensor);
  return {vector.data, vector.is_float32};
}

// --- Forward

// What both norms are given, and what of the statistics is wanted.
struct ForwardArguments {
  const Tensor& x;
  const OptionalTensor& residual;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double eps;
  double weight_offset;
  bool with_statistics;
};

// Checks the arguments, allocates the results and fills `params`. The results: [y, sum if there is
// a residual, mean of LayerNorm, rstd].
std::vector<Tensor> prepare_forward(const char* op, NormKind kind,
                                    const ForwardArguments& arguments, RowCall& call,
                                    NormParams* result) {
  auto params = call.parameters<NormParams>();
  params.kind = kind;
  params.eps = arguments.eps;
  params.weight_offset = arguments.weight_offset;
  params.x = call.first();
  if (arguments.residual) params.residual = call.like_first("residual", *arguments.residual);
  params.weight = parameter(call, "weight", arguments.weight);
  params.bias = parameter(call, "bias", arguments.bias);
  if (!arguments.weight && arguments.weight_offset != 0)
    fail(op, ": weight_offset is added to the weight, so it must be 0 without a weight");

  std::vector<Tensor> outputs;
  outputs.reserve(4);
  params.y = call.written(outputs.emplace_back(call.allocate_rows()));
  if (arguments.residual) params.sum = call.written(outputs.emplace_back(call.allocate_rows()));
  if (arguments.with_statistics) {
    if (kind == NormKind::kLayer)
      params.mean = View(outputs.emplace_back(call.allocate_values())).data;
    params.rstd = View(outputs.emplace_back(call.allocate_values())).data;
  }
  *result = params;
  return outputs;
}

std::vector<Tensor> forward(const char* op, NormKind kind, const ForwardArguments& arguments) {
  RowCall call(op, "x", arguments.x);
  NormParams params;
  std::vector<Tensor> outputs = prepare_forward(op, kind, arguments, call, &params);
  if (call.is_empty()) {
    // Rows without elements have statistics all the same; nobody reads them.
    for (Tensor& output : outputs) check_shim(aoti_torch_zero_(output.get()), "zero_");
    return outputs;
  }

  DeviceScope scope(call.device_index());
  const NormConfig config =
      choose_norm_config(params, device_traits<norm_device_traits>(call.device_index()));
  call.print(config);
  throw_on_error(launch_norm(params, config, current_stream(call.device_index())), op);
  return outputs;
}

Tensor rms_norm(const Tensor& x, OptionalTensor weight, double eps, double weight_offset) {
  return forward("rms_norm", NormKind::kRms,
                 {x, std::nullopt, weight, std::nullopt, eps, weight_offset, false})[0];
}

std::vector<Tensor> rms_norm_forward(const Tensor& x, OptionalTensor residual,
                                     OptionalTensor weight, double eps, double weight_offset) {
  return forward("rms_norm", NormKind::kRms,
                 {x, residual, weight, std::nullopt, eps, weight_offset, true});
}

Tensor layer_norm(const Tensor& x, OptionalTensor weight, OptionalTensor bias, double eps) {
  return forward("layer_norm", NormKind::kLayer, {x, std::nullopt, weight, bias, eps, 0, false})[0];
}

std::vector<Tensor> layer_norm_forward(const Tensor& x, OptionalTensor residual,
                                       OptionalTensor weight, OptionalTensor bias, double eps) {
  return forward("layer_norm", NormKind::kLayer, {x, residual, weight, bias, eps, 0, true});
}

// --- Backward

struct BackwardArguments {
  const Tensor& dy;
  const Tensor& h;
  const Tensor* mean;
  const Tensor& rstd;
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& dh;
  double weight_offset;
  int64_t mask;  // of the gradients that are wanted: 1 of h, 2 of the weight, 4 of the bias
};

// The gradient of a vector whose bit is set in the mask, as the kernels write it.
OptionalTensor vector_gradient(const RowCall& call, const char* op, const char* name,
                               const OptionalTensor& vector, bool wanted, NormParameter* written) {
  if (!wanted) return std::nullopt;
  if (!vector) fail(op, ": mask asks for the gradient of ", name, ", which is absent");
  Tensor gradient = call.allocate_vector(*vector);
  const View view(gradient);
  *written = {view.data, view.dtype == aoti_torch_dtype_float32()};
  return gradient;
}

std::vector<Tensor> backward(const char* op, NormKind kind, const BackwardArguments& arguments) {
  RowCall call(op, "h", arguments.h);
  auto params = call.parameters<NormBwdParams>();
  params.kind = kind;
  params.weight_offset = arguments.weight_offset;
  params.h = call.first();
  params.dy = call.like_first("dy", arguments.dy);
  if (arguments.dh) params.dh = call.like_first("dh", *arguments.dh);
  if (arguments.mean != nullptr) params.mean = call.values("mean", *arguments.mean);
  params.rstd = call.values("rstd", arguments.rstd);
  params.weight = parameter(call, "weight", arguments.weight);
  if (arguments.bias) call.check_vector("bias", *arguments.bias);

  OptionalTensor dx;
  if (arguments.mask & 1) params.dx = call.written(dx.emplace(call.allocate_rows()));
  OptionalTensor dweight =
      vector_gradient(call, op, "weight", arguments.weight, arguments.mask & 2, &params.dweight);
  OptionalTensor dbias =
      vector_gradient(call, op, "bias", arguments.bias, arguments.mask & 4, &params.dbias);

  if (call.is_empty()) {
    // Sums over no rows.
    for (OptionalTensor* sum : {&dweight, &dbias}) {
      if (*sum) check_shim(aoti_torch_zero_((*sum)->get()), "zero_");
    }
  } else if (dx || dweight || dbias) {
    DeviceScope scope(call.device_index());
    const NormConfig config =
        choose_norm_bwd_config(params, device_traits<norm_device_traits>(call.device_index()));
    call.print(config);
    OptionalTensor workspace;
    void* workspace_data = nullptr;
    if (config.workspace_size > 0) {
      workspace = call.allocate_workspace(config.workspace_size);
      workspace_data = View(*workspace).data;
    }
    throw_on_error(
        launch_norm_bwd(params, config, workspace_data, current_stream(call.device_index())), op);
  }

  std::vector<Tensor> gradients;
  if (dx) gradients.push_back(*dx);
  if (dweight) gradients.push_back(RowCall::in_dtype_of(*arguments.weight, *dweight));
  if (dbias) gradients.push_back(RowCall::in_dtype_of(*arguments.bias, *dbias));
  return gradients;
}

std::vector<Tensor> rms_norm_backward(const Tensor& dy, const Tensor& h, const Tensor& rstd,
                                      OptionalTensor weight, OptionalTensor dh,
                                      double weight_offset, int64_t mask) {
  return backward("rms_norm_backward", NormKind::kRms,
                  {dy, h, nullptr, rstd, weight, std::nullopt, dh, weight_offset, mask});
}

std::vector<Tensor> layer_norm_backward(const Tensor& dy, const Tensor& h, const Tensor& mean,
                                        const Tensor& rstd, OptionalTensor weight,
                                        OptionalTensor bias, OptionalTensor dh, int64_t mask) {
  return backward("layer_norm_backward", NormKind::kLayer,
                  {dy, h, &mean, rstd, weight, bias, dh, 0, mask});
}

// --- Plans, without a device

// What `op`, rms_norm or layer_norm, would launch, as JSON; for its backward with the gradients of
// all tensors that are there, and incoming ones laid out like the outputs. The tensors may be on
// the CPU, where they stand for CUDA tensors of their layout; of what is allocated here only the
// layout matters.
std::string norm_plan(std::string op, const Tensor& x, OptionalTensor residual,
                      OptionalTensor weight, OptionalTensor bias, bool is_backward,
                      int64_t num_sms) {
  const NormKind kind = op == "layer_norm" ? NormKind::kLayer : NormKind::kRms;
  const DeviceTraits device = planned_device<norm_device_traits>(num_sms);
  if (!is_backward) {
    RowCall call(op.c_str(), "x", x);
    NormParams params;
    const std::vector<Tensor> outputs =
        prepare_forward(op.c_str(), kind, {x, residual, weight, bias, 0, 0, false}, call, &params);
    return call.describe(choose_norm_config(params, device));
  }
  op += "_backward";
  // With a residual the saved tensor is its sum with x, an output of the forward.
  const Tensor output = RowCall(op.c_str(), "x", x).allocate_rows();
  const Tensor& h = residual ? output : x;
  RowCall call(op.c_str(), residual ? "h" : "x", h);
  auto params = call.parameters<NormBwdParams>();
  params.kind = kind;
  params.h = call.first();
  params.dy = params.dx = call.written(output);
  if (residual) params.dh = params.dy;
  params.weight = parameter(call, "weight", weight);
  const OptionalTensor dweight =
      vector_gradient(call, op.c_str(), "weight", weight, weight.has_value(), &params.dweight);
  const OptionalTensor dbias =
      vector_gradient(call, op.c_str(), "bias", bias, bias.has_value(), &params.dbias);
  return call.describe(choose_norm_bwd_config(params, device));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_forward", TORCH_BOX(&rms_norm_forward));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("layer_norm_forward", TORCH_BOX(&layer_norm_forward));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("norm_plan", TORCH_BOX(&norm_plan));
}

}  // namespace fusedcuda
