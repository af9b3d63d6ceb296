// One call of a pointwise operator: checks of its operands, the iteration space they span, planning
// and launching.
#pragma once

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>

#include "../kernels/pointwise.h"
#include "../kernels/pointwise_config.h"
#include "shim.h"

namespace fusedcuda {

constexpr int kMaxRank = kMaxInputDims;

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
      ", \"columns\": ", plan.columns, ", \"sizes\": [",
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

// One call: what its operands have in common, and the parameters that the launch takes.
class PointwiseCall {
 public:
  PointwiseCall(const char* name, PointwiseOp op, int64_t activation) : name_(name) {
    params_.op = op;
    params_.activation = activation_of(name, activation);
    params_.space.num_tensors = 0;
  }

  // Checks dtypes and devices, and finds the broadcast shape.
  void broadcast(const Operand* operands, int count) {
    const View* placed = &operands[0].view;
    for (int k = 0; k < count; ++k) {
      if (placed->is_number() && !operands[k].view.is_number()) placed = &operands[k].view;
    }
    const std::optional<DType> dtype = dtype_of(operands[0].view);
    if (!dtype)
      fail(name_, ": ", operands[0].name,
           " must be a float64, float32, float16 or bfloat16 tensor");
    params_.dtype = *dtype;
    device_type_ = placed->device_type;
    device_index_ = placed->device_index;
    dtype_code_ = operands[0].view.dtype;

    RawIteration& space = params_.space;
    space.num_dims = 0;
    for (int k = 0; k < count; ++k)
      space.num_dims = std::max<int>(space.num_dims, operands[k].view.dim);
    if (space.num_dims > kMaxRank)
      fail(name_, ": at most ", kMaxRank, " dimensions, got ", space.num_dims);
    for (int d = 0; d < space.num_dims; ++d) space.sizes[d] = 1;
    for (int k = 0; k < count; ++k) {
      const Operand& operand = operands[k];
      const View& view = operand.view;
      if (view.dtype != dtype_code_)
        fail(name_, ": ", operand.name, " and ", operands[0].name, " differ in dtype");
      if (!view.is_number() &&
          (view.device_type != device_type_ || view.device_index != device_index_)) {
        fail(name_, ": ", operand.name, " is on another device than the other tensors");
      }
      const int offset = space.num_dims - static_cast<int>(view.dim);
      for (int d = 0; d < view.dim; ++d) {
        int64_t& size = space.sizes[d + offset];
        if (view.sizes[d] == size || view.sizes[d] == 1) continue;
        if (size != 1) {
          fail(name_, ": ", operand.name, " of shape ", shape_string(view.sizes, view.dim),
               " does not broadcast with the operands before it");
        }
        size = view.sizes[d];
      }
    }
  }

  // Appends a tensor of the iteration; its strides are 0 in the dimensions over which it is
  // broadcast.
  void add(const View& view, bool is_output) {
    const int t = begin_tensor();
    params_.tensors[t] = PointwiseTensor();
    if (!is_output && view.is_number()) {
      params_.tensors[t].number = number_of(view, params_.dtype);
    } else {
      params_.tensors[t].data = view.data;
    }
    const RawIteration& space = params_.space;
    const int offset = space.num_dims - static_cast<int>(view.dim);
    for (int d = 0; d < view.dim; ++d) {
      const bool broadcast = view.sizes[d] == 1 && space.sizes[d + offset] != 1;
      params_.space.strides[t][d + offset] = broadcast ? 0 : view.strides[d];
    }
  }

  void add_number(double value) {
    const int t = begin_tensor();
    params_.tensors[t] = PointwiseTensor();
    params_.tensors[t].number = value;
  }

  bool has_shape(const View& view) const {
    const RawIteration& space = params_.space;
    if (view.dim != space.num_dims) return false;
    for (int d = 0; d < view.dim; ++d) {
      if (view.sizes[d] != space.sizes[d]) return false;
    }
    return true;
  }

  // The layout rule of _operands.empty_output.
  Tensor allocate_output(const Operand* operands, int count) const {
    for (int k = 0; k < count; ++k) {
      const View& view = operands[k].view;
      if (has_shape(view) && view.device_type == device_type_)
        return empty_like(*operands[k].tensor, view);
    }
    return empty_contiguous(params_.space.sizes, params_.space.num_dims, dtype_code_, device_type_,
                            device_index_);
  }

  Tensor allocate_gradient(const Operand& operand) const {
    if (operand.view.device_type == device_type_) return empty_like(*operand.tensor, operand.view);
    return empty_contiguous(nullptr, 0, dtype_code_, device_type_, device_index_);
  }

  void plan_forward(const DeviceTraits& device, PointwisePlan* plan) const {
    if (!choose_pointwise_config(params_, device, plan)) too_many_dims();
    print(*plan);
  }

  void plan_backward(unsigned wanted, const DeviceTraits& device, PointwisePlan* plan,
                     unsigned* remaining) const {
    if (!choose_pointwise_bwd_config(params_, wanted, device, plan, remaining)) too_many_dims();
    print(*plan);
  }

  void forward() const {
    DeviceScope scope(device_index_);
    PointwisePlan plan;
    plan_forward(device_traits(device_index_), &plan);
    throw_on_error(launch_pointwise(params_, plan, current_stream(device_index_)), name_);
  }

  void backward(unsigned wanted) const {
    DeviceScope scope(device_index_);
    const cudaStream_t stream = current_stream(device_index_);
    while (wanted != 0) {
      PointwisePlan plan;
      unsigned remaining;
      plan_backward(wanted, device_traits(device_index_), &plan, &remaining);
      std::optional<Tensor> workspace;
      void* workspace_data = nullptr;
      if (plan.workspace_size > 0) {
        const bool is_double = params_.dtype == DType::kFloat64;
        workspace = empty_contiguous(&plan.workspace_size, 1,
                                     torch_dtype(is_double ? DType::kFloat64 : DType::kFloat32),
                                     device_type_, device_index_);
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

  const PointwiseParams& params() const { return params_; }
  int32_t device_type() const { return device_type_; }

  // The raw iteration of the packed operator is set by hand.
  RawIteration& space() { return params_.space; }
  PointwiseTensor& tensor(int t) { return params_.tensors[t]; }
  void place(const View& view) {
    const std::optional<DType> dtype = dtype_of(view);
    if (!dtype) fail(name_, ": expected a float64, float32, float16 or bfloat16 tensor");
    params_.dtype = *dtype;
    dtype_code_ = view.dtype;
    device_type_ = view.device_type;
    device_index_ = view.device_index;
  }

 private:
  int begin_tensor() {
    const int t = params_.space.num_tensors++;
    for (int d = 0; d < params_.space.num_dims; ++d) params_.space.strides[t][d] = 0;
    return t;
  }

  [[noreturn]] void too_many_dims() const {
    fail(name_, ": more than ", kMaxDims,
         " dimensions are left after merging those that lie alike in memory; ",
         "make the operands contiguous");
  }

  void print(const PointwisePlan& plan) const {
    static const bool enabled = environment_flag("FUSEDCUDA_PRINT_CONFIG");
    if (!enabled) return;
    const bool is_backward = params_.space.num_tensors > num_operands(params_.op) + 1;
    std::fprintf(stderr, "fusedcuda: %s\n", describe(name_, params_, plan, is_backward).c_str());
  }

  const char* name_;
  PointwiseParams params_;
  int32_t device_type_ = 0;
  int32_t device_index_ = 0;
  int32_t dtype_code_ = 0;
};

}  // namespace fusedcuda
