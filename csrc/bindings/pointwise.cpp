// The pointwise family for torch: checks, empty case, allocation, launch. Schemas and references
// are in fusedcuda/ops/pointwise.py.
#include <vector>

#include "pointwise_call.h"

namespace fusedcuda {
namespace {

// --- Forward
// ---------------------------------------------------------------------------------------------------------

Tensor forward(const char* name, PointwiseOp op, int64_t activation, const Operand* operands,
               int count) {
  PointwiseCall call(name, op, activation);
  call.broadcast(operands, count);
  Tensor output = call.allocate_output(operands, count);
  if (call.is_empty()) return output;
  for (int k = 0; k < count; ++k) call.add(operands[k].view, false);
  call.add(View(output), true);
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
// --------------------------------------------------------------------------------------------------------

// `values` are what the formula reads (a missing one is 0), `shapes` whose gradients are made.
std::vector<Tensor> backward(const char* name, PointwiseOp op, int64_t activation,
                             const Tensor& grad, const Operand* values, int num_values,
                             const Operand* shapes, int64_t mask) {
  const int n = num_operands(op);
  PointwiseCall call(name, op, activation);
  call.broadcast(shapes, n);
  const Operand incoming("grad", grad);
  if (!call.has_shape(incoming.view)) {
    fail(name, ": grad has shape ", shape_string(incoming.view.sizes, incoming.view.dim),
         ", which is not the shape the operands broadcast to");
  }
  if (dtype_of(incoming.view) != call.params().dtype ||
      incoming.view.device_type != call.device_type()) {
    fail(name, ": grad differs from the operands in dtype or device");
  }
  for (int k = 0; k < n; ++k) {
    if (k < num_values) {
      call.add(values[k].view, false);
    } else {
      call.add_number(0);
    }
  }
  call.add(incoming.view, false);

  std::vector<Tensor> gradients;
  for (int k = 0; k < n; ++k) {
    if (!(mask >> k & 1)) {
      call.add_number(0);
      continue;
    }
    gradients.push_back(call.allocate_gradient(shapes[k]));
    call.add(View(gradients.back()), true);
  }
  if (call.is_empty()) {
    // Gradients of broadcast operands are sums of nothing.
    for (Tensor& gradient : gradients) check_shim(aoti_torch_zero_(gradient.get()), "zero_");
    return gradients;
  }
  call.backward(static_cast<unsigned>(mask));
  return gradients;
}

std::vector<Tensor> add_relu_backward(const Tensor& grad, const Tensor& y, const Tensor& a,
                                      const Tensor& b, int64_t mask) {
  const Operand values[] = {{"y", y}};
  const Operand shapes[] = {{"a", a}, {"b", b}};
  return backward("add_relu_backward", PointwiseOp::kAddAct,
                  static_cast<int64_t>(Activation::kRelu), grad, values, 1, shapes, mask);
}

std::vector<Tensor> add_mul_act_backward(const Tensor& grad, const Tensor& a, const Tensor& b,
                                         const Tensor& c, int64_t activation, int64_t mask) {
  const Operand operands[] = {{"a", a}, {"b", b}, {"c", c}};
  return backward("add_mul_act_backward", PointwiseOp::kAddMulAct, activation, grad, operands, 3,
                  operands, mask);
}

std::vector<Tensor> act_scale_bias_backward(const Tensor& grad, const Tensor& x,
                                            const Tensor& scale, const Tensor& bias,
                                            int64_t activation, int64_t mask) {
  // The gradients do not depend on the value of the bias.
  const Operand operands[] = {{"x", x}, {"scale", scale}, {"bias", bias}};
  return backward("act_scale_bias_backward", PointwiseOp::kActScaleBias, activation, grad, operands,
                  2, operands, mask);
}

std::vector<Tensor> bias_act_backward(const Tensor& grad, const Tensor& x, const Tensor& bias,
                                      int64_t activation, int64_t mask) {
  const Operand operands[] = {{"x", x}, {"bias", bias}};
  return backward("bias_act_backward", PointwiseOp::kAddAct, activation, grad, operands, 2,
                  operands, mask);
}

std::vector<Tensor> act_mul_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                     int64_t activation, int64_t mask) {
  const Operand operands[] = {{"gate", gate}, {"up", up}};
  return backward("act_mul_backward", PointwiseOp::kActMul, activation, grad, operands, 2, operands,
                  mask);
}

// --- Packed gate and up
// ----------------------------------------------------------------------------------------------

// Sets up the space of shape gate_up[..., :d] and its two halves as tensors 0 and 1.
int64_t add_packed(PointwiseCall& call, const char* name, const View& gate_up) {
  if (gate_up.dim == 0 || gate_up.sizes[gate_up.dim - 1] % 2 != 0) {
    fail(name, ": the last dimension of gate_up must be even, gate and up side by side; got shape ",
         shape_string(gate_up.sizes, gate_up.dim));
  }
  if (gate_up.dim > kMaxRank) fail(name, ": at most ", kMaxRank, " dimensions, got ", gate_up.dim);
  call.place(gate_up);
  RawIteration& space = call.space();
  space.num_dims = static_cast<int>(gate_up.dim);
  for (int d = 0; d < space.num_dims; ++d) space.sizes[d] = gate_up.sizes[d];
  return space.sizes[space.num_dims - 1] /= 2;
}

// The halves of a tensor of shape [..., 2d] as two tensors of the space.
void add_halves(PointwiseCall& call, const View& packed, int64_t d) {
  RawIteration& space = call.space();
  const int64_t half_bytes = d * packed.strides[packed.dim - 1] * size_of(call.params().dtype);
  for (int half = 0; half < 2; ++half) {
    const int t = space.num_tensors++;
    call.tensor(t) = PointwiseTensor();
    call.tensor(t).data = static_cast<char*>(packed.data) + half * half_bytes;
    for (int i = 0; i < space.num_dims; ++i) space.strides[t][i] = packed.strides[i];
  }
}

Tensor act_mul_packed(const Tensor& gate_up, int64_t activation) {
  const View view(gate_up);
  PointwiseCall call("act_mul_packed", PointwiseOp::kActMul, activation);
  const int64_t d = add_packed(call, "act_mul_packed", view);
  Tensor output = empty_contiguous(call.space().sizes, call.space().num_dims, view.dtype,
                                   view.device_type, view.device_index);
  if (call.is_empty()) return output;
  add_halves(call, view, d);
  call.add(View(output), true);
  call.forward();
  return output;
}

Tensor act_mul_packed_backward(const Tensor& grad, const Tensor& gate_up, int64_t activation) {
  const View view(gate_up), incoming(grad);
  PointwiseCall call("act_mul_packed_backward", PointwiseOp::kActMul, activation);
  const int64_t d = add_packed(call, "act_mul_packed_backward", view);
  if (!call.has_shape(incoming) || incoming.dtype != view.dtype ||
      incoming.device_type != view.device_type) {
    fail(
        "act_mul_packed_backward: grad must match half of gate_up in shape, dtype and device; got "
        "shape ",
        shape_string(incoming.sizes, incoming.dim));
  }
  Tensor gradient =
      empty_contiguous(view.sizes, view.dim, view.dtype, view.device_type, view.device_index);
  if (call.is_empty()) return gradient;
  add_halves(call, view, d);
  call.add(incoming, false);
  add_halves(call, View(gradient), d);
  call.backward(0b11);
  return gradient;
}

// --- Plans, without a device
// -----------------------------------------------------------------------------------------

// What a call on such operands would launch, as a JSON list. Operands may be CPU or meta tensors,
// which stand for CUDA tensors of that layout; 0-d CPU tensors stand for numbers. mask: operands
// whose gradients are planned, 0 for forward.
std::string pointwise_plan(std::string op, std::vector<Tensor> operands, int64_t sms,
                           int64_t mask) {
  struct Known {
    const char* name;
    PointwiseOp op;
  };
  static constexpr Known kKnown[] = {{"add_relu", PointwiseOp::kAddAct},
                                     {"bias_act", PointwiseOp::kAddAct},
                                     {"add_mul_act", PointwiseOp::kAddMulAct},
                                     {"act_scale_bias", PointwiseOp::kActScaleBias},
                                     {"act_mul", PointwiseOp::kActMul}};
  const bool packed = op == "act_mul_packed";
  const Known* known = packed ? &kKnown[4] : nullptr;
  for (const Known& candidate : kKnown) {
    if (op == candidate.name) known = &candidate;
  }
  if (known == nullptr) fail("pointwise_plan: unknown operator ", op);
  const char* name = packed ? "act_mul_packed" : known->name;
  const int n = num_operands(known->op);
  const size_t expected = packed ? 1 : n;
  if (operands.size() != expected)
    fail(name, ": expected ", expected, " operands, got ", operands.size());

  PointwiseCall call(name, known->op, static_cast<int64_t>(Activation::kNone));
  std::vector<Operand> values;
  for (const Tensor& tensor : operands) values.emplace_back("operand", tensor);
  // Only the layout and the alignment of these are looked at; nothing is written through them.
  std::vector<Tensor> made;
  if (packed) {
    const View& view = values[0].view;
    const int64_t d = add_packed(call, name, view);
    made.push_back(empty_contiguous(call.space().sizes, call.space().num_dims, view.dtype,
                                    view.device_type, view.device_index));
    add_halves(call, view, d);
    call.add(View(made[0]), mask == 0);
    if (mask != 0) {
      made.push_back(
          empty_contiguous(view.sizes, view.dim, view.dtype, view.device_type, view.device_index));
      add_halves(call, View(made[1]), d);
    }
  } else {
    call.broadcast(values.data(), n);
    for (const Operand& operand : values) call.add(operand.view, false);
    made.push_back(call.allocate_output(values.data(), n));
    call.add(View(made[0]), true);
    for (int k = 0; mask != 0 && k < n; ++k) {
      made.push_back(call.allocate_gradient(values[k]));
      call.add(View(made.back()), true);
    }
  }

  DeviceTraits device;
  device.num_sms = static_cast<int>(sms);
  std::string result = "[";
  unsigned wanted = static_cast<unsigned>(mask);
  do {
    PointwisePlan plan;
    unsigned remaining = 0;
    if (mask == 0) {
      call.plan_forward(device, &plan);
    } else {
      call.plan_backward(wanted, device, &plan, &remaining);
    }
    if (result.size() > 1) result += ", ";
    result += describe(name, call.params(), plan, mask != 0);
    wanted = remaining;
  } while (wanted != 0);
  return result + "]";
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
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("pointwise_plan", TORCH_BOX(&pointwise_plan));
}

}  // namespace fusedcuda
