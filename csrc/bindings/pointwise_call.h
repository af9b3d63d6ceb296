// One call of a pointwise operator: checks of its operands, the iteration space they span, planning
// and launching.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "../kernels/pointwise.h"
#include "../kernels/pointwise_config.h"
#include "shim.h"

namespace fusedcuda {

// A tensor argument, or one that only lends its shape.
struct Operand {
  const char* name;
  const Tensor* tensor;
  View view;

  Operand(const char* name_, const Tensor& tensor_)
      : name(name_), tensor(&tensor_), view(tensor_) {}
};

inline Activation activation_of(const char* op, int64_t code) {
  if (code < 0 || code >= kNumActivations)
    fail(op, ": activation code must be in [0, 8), got ", code);
  return static_cast<Activation>(code);
}

// The plan as JSON, for explain() and FUSEDCUDA_PRINT_CONFIG.
inline std::string describe(const char* name, const PointwiseParams& params,
                            const PointwisePlan& plan, bool is_backward) {
  auto quoted = [](const char* name) { return concat("\"", name, "\""); };
  std::string result = concat(
      "{\"op\": ", quoted(name), ", \"path\": ", quoted(name_of(plan.path)),
      ", \"vec\": ", plan.vec, ", \"threads\": ", plan.threads, ", \"blocks\": [", plan.blocks_x,
      ", ", plan.blocks_y * plan.blocks_z, "], \"rows\": ", plan.rows,
      ", \"columns\": ", plan.columns + plan.rest, ", \"rest\": ", plan.rest, ", \"sizes\": [",
      join(plan.space.num_dims, [&](int64_t d) { return plan.space.sizes[d]; }), "], \"access\": [",
      join(plan.space.num_tensors, [&](int64_t t) { return quoted(name_of(plan.access[t])); }),
      "]");
  if (is_backward) {
    result += concat(", \"gradients\": [",
                     join(num_operands(params.op),
                          [&](int64_t k) { return quoted(name_of(plan.gradients[k])); }),
                     "], \"workspace\": ", plan.workspace_size);
  }
  return result + "}";
}

// One call: what its operands have in common, and the parameters that the launch takes. Tensors are
// added in the order of PointwiseParams: operands, then the output or the incoming gradient and the
// gradients.
class PointwiseCall {
 public:
  PointwiseCall(const char* name, PointwiseOp op, int64_t activation) : name_(name) {
    params_.op = op;
    params_.activation = activation_of(name, activation);
    params_.space.num_tensors = 0;
  }

  // Checks dtypes and devices of `operands`, and makes the shape they broadcast to the space of the
  // call.
  void broadcast(const Operand* operands, int count) {
    const Operand* placed = &operands[0];
    for (int k = 1; k < count; ++k) {
      if (placed->view.is_number()) placed = &operands[k];
    }
    place(*placed);
    RawIteration& space = params_.space;
    space.num_dims = 0;
    for (int k = 0; k < count; ++k)
      space.num_dims = std::max<int>(space.num_dims, operands[k].view.dim);
    check_rank(space.num_dims);
    for (int d = 0; d < space.num_dims; ++d) space.sizes[d] = 1;
    for (int k = 0; k < count; ++k) {
      const View& view = operands[k].view;
      if (!view.is_number()) check_place(operands[k]);
      const int offset = space.num_dims - static_cast<int>(view.dim);
      for (int d = 0; d < view.dim; ++d) {
        int64_t& size = space.sizes[d + offset];
        if (view.sizes[d] == size || view.sizes[d] == 1) continue;
        if (size != 1) {
          fail(name_, ": ", operands[k].name, " of shape ", shape_string(view.sizes, view.dim),
               " does not broadcast with the operands before it");
        }
        size = view.sizes[d];
      }
    }
  }

  // The space of gate_up[..., :d]; returns d.
  int64_t split(const Operand& gate_up) {
    const View& view = gate_up.view;
    if (view.dim == 0 || view.sizes[view.dim - 1] % 2 != 0) {
      fail(name_,
           ": the last dimension of gate_up must be even, gate and up side by side; got shape ",
           shape_string(view.sizes, view.dim));
    }
    place(gate_up);
    check_rank(view.dim);
    RawIteration& space = params_.space;
    space.num_dims = static_cast<int>(view.dim);
    for (int d = 0; d < space.num_dims; ++d) space.sizes[d] = view.sizes[d];
    return space.sizes[space.num_dims - 1] /= 2;
  }

  // Refuses a tensor that is not laid over the whole space on the call's device in its dtype.
  void check_like(const Operand& operand) const {
    check_place(operand);
    if (!has_shape(operand.view)) {
      fail(name_, ": ", operand.name, " must have shape ",
           shape_string(params_.space.sizes, params_.space.num_dims), "; got ",
           shape_string(operand.view.sizes, operand.view.dim));
    }
  }

  // A tensor that is read; its strides are 0 in the dimensions over which it is broadcast.
  void add(const View& view) {
    if (view.is_number()) {
      add_number(number_of(view));
    } else {
      add_output(view);
    }
  }

  void add_output(const View& view) {
    const int t = begin_tensor();
    params_.tensors[t].data = view.data;
    const RawIteration& space = params_.space;
    const int offset = space.num_dims - static_cast<int>(view.dim);
    for (int d = 0; d < view.dim; ++d) {
      const bool broadcast = view.sizes[d] == 1 && space.sizes[d + offset] != 1;
      params_.space.strides[t][d + offset] = broadcast ? 0 : view.strides[d];
    }
  }

  // A value, or in the place of an output one that nobody wants.
  void add_number(double value) { params_.tensors[begin_tensor()].number = value; }

  // The halves of a tensor of shape [..., 2d] as two tensors of the space.
  void add_halves(const View& packed, int64_t d) {
    const int64_t half_bytes = d * packed.strides[packed.dim - 1] * size_of(params_.dtype);
    for (int half = 0; half < 2; ++half) {
      const int t = begin_tensor();
      params_.tensors[t].data = static_cast<char*>(packed.data) + half * half_bytes;
      for (int i = 0; i < packed.dim; ++i) params_.space.strides[t][i] = packed.strides[i];
    }
  }

  // The layout rule of _operands.empty_output.
  Tensor allocate_output(const Operand* operands, int count) const {
    for (int k = 0; k < count; ++k) {
      const View& view = operands[k].view;
      if (has_shape(view) && view.device_type == device_type_)
        return empty_like(*operands[k].tensor, view);
    }
    return allocate(params_.space.sizes, params_.space.num_dims);
  }

  Tensor allocate_gradient(const Operand& operand) const {
    if (operand.view.device_type == device_type_) return empty_like(*operand.tensor, operand.view);
    return allocate(nullptr, 0);
  }

  // Contiguous, on the call's device and of its dtype.
  Tensor allocate(const int64_t* sizes, int64_t dim) const {
    return empty_contiguous(sizes, dim, dtype_code_, device_type_, device_index_);
  }
  Tensor allocate_space() const { return allocate(params_.space.sizes, params_.space.num_dims); }

  void plan_forward(const DeviceTraits& device, PointwisePlan* plan) const {
    if (!choose_pointwise_config(params_, device, plan)) too_many_dims();
    print(*plan, false);
  }

  void plan_backward(unsigned wanted, const DeviceTraits& device, PointwisePlan* plan,
                     unsigned* remaining) const {
    if (!choose_pointwise_bwd_config(params_, wanted, device, plan, remaining)) too_many_dims();
    print(*plan, true);
  }

  void forward() const {
    DeviceScope scope(device_index_);
    PointwisePlan plan;
    plan_forward(device_traits<pointwise_device_traits>(device_index_), &plan);
    throw_on_error(launch_pointwise(params_, plan, current_stream(device_index_)), name_);
  }

  void backward(unsigned wanted) const {
    DeviceScope scope(device_index_);
    const DeviceTraits& device = device_traits<pointwise_device_traits>(device_index_);
    const cudaStream_t stream = current_stream(device_index_);
    while (wanted != 0) {
      PointwisePlan plan;
      unsigned remaining;
      plan_backward(wanted, device, &plan, &remaining);
      std::optional<Tensor> workspace;
      void* workspace_data = nullptr;
      if (plan.workspace_size > 0) {
        const DType dtype = params_.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
        workspace = empty_contiguous(&plan.workspace_size, 1, torch_dtype(dtype), device_type_,
                                     device_index_);
        workspace_data = workspace->data_ptr();
      }
      throw_on_error(launch_pointwise_bwd(params_, plan, workspace_data, stream), name_);
      wanted = remaining;
    }
  }

  bool is_empty() const {
    for (int d = 0; d < params_.space.num_dims; ++d) {
      if (params_.space.sizes[d] == 0) return true;
    }
    return false;
  }

  std::string describe_plan(const PointwisePlan& plan, bool is_backward) const {
    return describe(name_, params_, plan, is_backward);
  }

 private:
  // Takes dtype and device from `operand`.
  void place(const Operand& operand) {
    const std::optional<DType> dtype = dtype_of(operand.view);
    if (!dtype)
      fail(name_, ": ", operand.name, " must be a float64, float32, float16 or bfloat16 tensor");
    params_.dtype = *dtype;
    dtype_code_ = operand.view.dtype;
    device_type_ = operand.view.device_type;
    device_index_ = operand.view.device_index;
  }

  void check_place(const Operand& operand) const {
    const View& view = operand.view;
    if (view.dtype != dtype_code_)
      fail(name_, ": ", operand.name, " differs from the other tensors in dtype");
    if (view.device_type != device_type_ || view.device_index != device_index_) {
      fail(name_, ": ", operand.name, " is on another device than the other tensors");
    }
  }

  void check_rank(int64_t rank) const {
    if (rank > kMaxInputDims) fail(name_, ": at most ", kMaxInputDims, " dimensions, got ", rank);
  }

  bool has_shape(const View& view) const {
    const RawIteration& space = params_.space;
    if (view.dim != space.num_dims) return false;
    for (int d = 0; d < view.dim; ++d) {
      if (view.sizes[d] != space.sizes[d]) return false;
    }
    return true;
  }

  int begin_tensor() {
    const int t = params_.space.num_tensors++;
    params_.tensors[t] = PointwiseTensor();
    for (int d = 0; d < params_.space.num_dims; ++d) params_.space.strides[t][d] = 0;
    return t;
  }

  [[noreturn]] void too_many_dims() const {
    fail(name_, ": more than ", kMaxDims,
         " dimensions are left after merging those that lie alike in memory; ",
         "make the operands contiguous");
  }

  void print(const PointwisePlan& plan, bool is_backward) const {
    print_config([&] { return describe_plan(plan, is_backward); });
  }

  const char* name_;
  PointwiseParams params_;
  int32_t device_type_ = 0;
  int32_t device_index_ = 0;
  int32_t dtype_code_ = 0;
};

}  // namespace fusedcuda
