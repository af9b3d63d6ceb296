// The pointwise family for torch: checks, empty case, allocation, launch. Schemas and references
// are in fusedcuda/ops/pointwise.py.
#include <algorithm>
#include <vector>

#include "pointwise_call.h"

namespace fusedcuda {
namespace {

// --- Forward

Tensor forward(const char* name, PointwiseOp op, int64_t activation, const Operand* operands,
               int count) {
  PointwiseCall call(name, op, activation);
  call.broadcast(operands, count);
  Tensor output = call.allocate_output(operands, count);
  if (call.is_empty()) return output;
  for (int k = 0; k < count; ++k) call.add(operands[k].view);
  call.add_output(View(output));
  call.forward();
  return output;
}

Tensor add_relu(const Tensor& a, const Tensor& b) {
  const Operand operands[] = {{"a", a}, {"b", b}};
  return forward("add_relu", PointwiseOp::kAddAct, static_cast<int64_t>(Activation::kRelu),
                 operands, 2);
}

Tensor add_mul_act(const Tensor& a, const Tensor& b, const Tensor& c, int64_t activation) {
  const Operand operands[] = {{"a", a}, {"b", b}, {"c", c}};
  return forward("add_mul_act", PointwiseOp::kAddMulAct, activation, operands, 3);
}

Tensor act_scale_bias(const Tensor& x, const Tensor& scale, const Tensor& bias,
                      int64_t activation) {
  const Operand operands[] = {{"x", x}, {"scale", scale}, {"bias", bias}};
  return forward("act_scale_bias", PointwiseOp::kActScaleBias, activation, operands, 3);
}

Tensor bias_act(const Tensor& x, const Tensor& bias, int64_t activation) {
  const Operand operands[] = {{"x", x}, {"bias", bias}};
  return forward("bias_act", PointwiseOp::kAddAct, activation, operands, 2);
}

Tensor act_mul(const Tensor& gate, const Tensor& up, int64_t activation) {
  const Operand operands[] = {{"gate", gate}, {"up", up}};
  return forward("act_mul", PointwiseOp::kActMul, activation, operands, 2);
}

// --- Backward

// What a backward reads and writes. `values` are what the formula reads (a missing one is 0);
// `shapes` are the operands, those in `mask` get a gradient.
struct BackwardOperands {
  const Operand* values;
  int num_values;
  const Operand* shapes;
  int64_t mask;
};

// Adds every tensor of a backward to `call`, whose space is set, and returns the gradients.
std::vector<Tensor> add_backward(PointwiseCall& call, PointwiseOp op, const View& grad,
                                 const BackwardOperands& operands) {
  const int n = num_operands(op);
  for (int k = 0; k < n; ++k) {
    if (k < operands.num_values) {
      call.add(operands.values[k].view);
    } else {
      call.add_number(0);
    }
  }
  call.add(grad);
  std::vector<Tensor> gradients;
  for (int k = 0; k < n; ++k) {
    if (!(operands.mask >> k & 1)) {
      call.add_number(0);
      continue;
    }
    gradients.push_back(call.allocate_gradient(operands.shapes[k]));
    call.add_output(View(gradients.back()));
  }
  return gradients;
}

std::vector<Tensor> backward(const char* name, PointwiseOp op, int64_t activation,
                             const Tensor& grad, const BackwardOperands& operands) {
  PointwiseCall call(name, op, activation);
  call.broadcast(operands.shapes, num_operands(op));
  const Operand incoming("grad", grad);
  call.check_like(incoming);
  std::vector<Tensor> gradients = add_backward(call, op, incoming.view, operands);
  if (call.is_empty()) {
    // Gradients of broadcast operands are sums of nothing.
    for (Tensor& gradient : gradients) check_shim(aoti_torch_zero_(gradient.get()), "zero_");
  } else {
    call.backward(static_cast<unsigned>(operands.mask));
  }
  return gradients;
}

// y, the output, stands for a + b: it is positive exactly where the sum, rounded, is.
std::vector<Tensor> add_relu_backward(const Tensor& grad, const Tensor& y, const Tensor& a,
                                      const Tensor& b, int64_t mask) {
  const Operand output("y", y), incoming("grad", grad);
  if (output.view.dim != incoming.view.dim || output.view.dtype != incoming.view.dtype ||
      output.view.device_type != incoming.view.device_type ||
      output.view.device_index != incoming.view.device_index ||
      !std::equal(output.view.sizes, output.view.sizes + output.view.dim, incoming.view.sizes)) {
    fail("add_relu_backward: y and grad must agree in shape, dtype and device");
  }
  const Operand shapes[] = {{"a", a}, {"b", b}};
  return backward("add_relu_backward", PointwiseOp::kAddAct,
                  static_cast<int64_t>(Activation::kRelu), grad, {&output, 1, shapes, mask});
}

std::vector<Tensor> add_mul_act_backward(const Tensor& grad, const Tensor& a, const Tensor& b,
                                         const Tensor& c, int64_t activation, int64_t mask) {
  const Operand operands[] = {{"a", a}, {"b", b}, {"c", c}};
  return backward("add_mul_act_backward", PointwiseOp::kAddMulAct, activation, grad,
                  {operands, 3, operands, mask});
}

// The gradients do not depend on the value of the bias.
std::vector<Tensor> act_scale_bias_backward(const Tensor& grad, const Tensor& x,
                                            const Tensor& scale, const Tensor& bias,
                                            int64_t activation, int64_t mask) {
  const Operand operands[] = {{"x", x}, {"scale", scale}, {"bias", bias}};
  return backward("act_scale_bias_backward", PointwiseOp::kActScaleBias, activation, grad,
                  {operands, 2, operands, mask});
}

std::vector<Tensor> bias_act_backward(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                      int64_t activation, int64_t mask) {
  const Operand operands[] = {{"x", x}, {"bias", bias}};
  return backward("bias_act_backward", PointwiseOp::kAddAct, activation, grad,
                  {operands, 2, operands, mask});
}

std::vector<Tensor> act_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                     int64_t activation, int64_t mask) {
  const Operand operands[] = {{"gate", gate}, {"up", up}};
  return backward("act_mul_backward", PointwiseOp::kActMul, activation, grad,
                  {operands, 2, operands, mask});
}

// --- Packed gate and up

Tensor act_mul_packed(const Tensor& gate_up, int64_t activation) {
  const Operand operand("gate_up", gate_up);
  PointwiseCall call("act_mul_packed", PointwiseOp::kActMul, activation);
  const int64_t d = call.split(operand);
  Tensor output = call.allocate_space();
  if (call.is_empty()) return output;
  call.add_halves(operand.view, d);
  call.add_output(View(output));
  call.forward();
  return output;
}

Tensor act_mul_packed_backward(const Tensor& grad, const Tensor& gate_up, int64_t activation) {
  const Operand operand("gate_up", gate_up), incoming("grad", grad);
  PointwiseCall call("act_mul_packed_backward", PointwiseOp::kActMul, activation);
  const int64_t d = call.split(operand);
  call.check_like(incoming);
  Tensor gradient = call.allocate(operand.view.sizes, operand.view.dim);
  if (call.is_empty()) return gradient;
  call.add_halves(operand.view, d);
  call.add(incoming.view);
  call.add_halves(View(gradient), d);
  call.backward(0b11);
  return gradient;
}

std::vector<Tensor> act_mul_packed_recompute(const Tensor& grad, const Tensor& gate_up,
                                             int64_t activation) {
  const Operand operand("gate_up", gate_up), incoming("grad", grad);
  PointwiseCall call("act_mul_packed_recompute", PointwiseOp::kActMulRecompute, activation);
  const int64_t d = call.split(operand);
  call.check_like(incoming);
  Tensor gradient = call.allocate(operand.view.sizes, operand.view.dim);
  Tensor output = call.allocate_space();
  if (!call.is_empty()) {
    call.add_halves(operand.view, d);
    call.add_number(0);
    call.add(incoming.view);
    call.add_halves(View(gradient), d);
    call.add_output(View(output));
    call.backward(0b111);
  }
  return {gradient, output};
}

// --- Plans, without a device

// What a call on such operands would launch, as a JSON list. Operands may be CPU tensors, which
// stand for CUDA tensors of that layout; 0-d ones stand for numbers. mask: operands whose gradients
// are planned, 0 for the forward.
std::string pointwise_plan(std::string op, std::vector<Tensor> operands, int64_t num_sms,
                           int64_t mask) {
  struct Known {
    const char* name;
    PointwiseOp op;
    int num_operands;
    int num_values;  // that the backward reads; 0: the output in place of the operands
  };
  static constexpr Known kKnown[] = {
      {"add_relu", PointwiseOp::kAddAct, 2, 0},
      {"bias_act", PointwiseOp::kAddAct, 2, 2},
      {"add_mul_act", PointwiseOp::kAddMulAct, 3, 3},
      {"act_scale_bias", PointwiseOp::kActScaleBias, 3, 2},
      {"act_mul", PointwiseOp::kActMul, 2, 2},
      {"act_mul_packed", PointwiseOp::kActMul, 1, 1},
      {"act_mul_packed_recompute", PointwiseOp::kActMulRecompute, 1, 1}};
  const Known* known = std::find_if(std::begin(kKnown), std::end(kKnown),
                                    [&](const Known& k) { return op == k.name; });
  if (known == std::end(kKnown)) fail("pointwise_plan: unknown operator ", op);
  if (operands.size() != static_cast<size_t>(known->num_operands)) {
    fail(op, ": expected ", known->num_operands, " operands, got ", operands.size());
  }
  std::vector<Operand> given;
  for (const Tensor& tensor : operands) given.emplace_back("operand", tensor);

  // Only the layout and the alignment of what is allocated here matter; nothing is written.
  PointwiseCall call(known->name, known->op, static_cast<int64_t>(Activation::kNone));
  std::vector<Tensor> made;
  if (known->num_operands == 1) {
    const int64_t d = call.split(given[0]);
    const bool makes_output = known->op == PointwiseOp::kActMulRecompute;
    made.push_back(call.allocate_space());
    call.add_halves(given[0].view, d);
    if (makes_output) call.add_number(0);
    call.add_output(View(made[0]));
    if (mask != 0) {
      made.push_back(call.allocate(given[0].view.sizes, given[0].view.dim));
      call.add_halves(View(made[1]), d);
    }
    if (makes_output) call.add_output(View(made.emplace_back(call.allocate_space())));
  } else {
    call.broadcast(given.data(), known->num_operands);
    const Tensor output = call.allocate_output(given.data(), known->num_operands);
    const Operand full("output", output);
    if (mask == 0) {
      for (const Operand& operand : given) call.add(operand.view);
      call.add_output(full.view);
    } else {
      const bool reads_output = known->num_values == 0;
      made = add_backward(call, known->op, full.view,
                          {reads_output ? &full : given.data(),
                           reads_output ? 1 : known->num_values, given.data(), mask});
    }
    made.push_back(output);
  }

  const DeviceTraits device = planned_device<pointwise_device_traits>(num_sms);
  std::string result;
  unsigned wanted = static_cast<unsigned>(mask);
  do {
    PointwisePlan plan;
    unsigned remaining = 0;
    if (mask == 0) {
      call.plan_forward(device, &plan);
    } else {
      call.plan_backward(wanted, device, &plan, &remaining);
    }
    result += concat(result.empty() ? "" : ", ", call.describe_plan(plan, mask != 0));
    wanted = remaining;
  } while (wanted != 0);
  return concat("[", result, "]");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("add_relu", TORCH_BOX(&add_relu));
  m.impl("add_relu_backward", TORCH_BOX(&add_relu_backward));
  m.impl("add_mul_act", TORCH_BOX(&add_mul_act));
  m.impl("add_mul_act_backward", TORCH_BOX(&add_mul_act_backward));
  m.impl("act_scale_bias", TORCH_BOX(&act_scale_bias));
  m.impl("act_scale_bias_backward", TORCH_BOX(&act_scale_bias_backward));
  m.impl("bias_act", TORCH_BOX(&bias_act));
  m.impl("bias_act_backward", TORCH_BOX(&bias_act_backward));
  m.impl("act_mul", TORCH_BOX(&act_mul));
  m.impl("act_mul_backward", TORCH_BOX(&act_mul_backward));
  m.impl("act_mul_packed", TORCH_BOX(&act_mul_packed));
  m.impl("act_mul_packed_backward", TORCH_BOX(&act_mul_packed_backward));
  m.impl("act_mul_packed_recompute", TORCH_BOX(&act_mul_packed_recompute));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("pointwise_plan", TORCH_BOX(&pointwise_plan));
}

}  // namespace fusedcuda
