// A linear layer of 8-bit factors (linear_act_fp8_plan.h), for torch: checks and steps.
#pragma once

#include <optional>
#include <string>

#include "linear_act_fp8_plan.h"
#include "linear_act_target.h"

namespace fusedcuda {

struct Fp8Arguments {
  const Tensor& x;
  const Tensor& weight;
  const OptionalTensor& bias;
  const Tensor& x_scale;
  const Tensor& weight_scale;
  const OptionalTensor& out_scale;
  int64_t activation;
  std::optional<torch::headeronly::ScalarType> out_dtype;
};

class Fp8 {
 public:
  explicit Fp8(const Fp8Arguments& arguments)
      : call_(kOp, "x", arguments.x, "weight", arguments.weight, copies_, /*eight_bits=*/true),
        target_(call_.x_view()),
        out_scale_(arguments.out_scale) {
    const torch::headeronly::ScalarType out_dtype =
        arguments.out_dtype.value_or(torch::headeronly::ScalarType::BFloat16);
    const bool eight_bits = out_dtype == torch::headeronly::ScalarType::Float8_e4m3fn;
    if (!eight_bits && out_dtype != torch::headeronly::ScalarType::BFloat16)
      fail(kOp, ": out_dtype must be bfloat16 or float8_e4m3fn");
    if (out_scale_.has_value() != eight_bits)
      fail(kOp, ": out_scale goes with out_dtype=float8_e4m3fn, which needs one");
    if (call_.batched()) fail(kOp, ": weight must have two dimensions");
    LinearForward& linear = f_.linear;
    linear.layer = target_.settle(call_.layer(), /*low_precision=*/false);
    linear.layer.dtype = DType::kBFloat16;
    linear.activation = activation_of(kOp, arguments.activation);
    linear.x = call_.x();
    linear.weight = call_.weight();
    read_bias(call_, arguments.bias, &linear, &aligned_bias_);
    f_.x_scale = scale("x_scale", arguments.x_scale);
    f_.weight_scale = scale("weight_scale", arguments.weight_scale);
    wide_ = call_.allocate_output(aoti_torch_dtype_bfloat16());
    linear.output = call_.written(*wide_);
    if (eight_bits) {
      narrow_ = call_.allocate_output(aoti_torch_dtype_float8_e4m3fn());
      f_.eight_bits = View(*narrow_).data;
      f_.out_scale = f_.inverse_out_scale = scale("out_scale", *out_scale_);
    }
  }

  Tensor run() {
    OptionalTensor inverse;
    if (out_scale_) {
      // cuBLASLt multiplies by what it is given.
      inverse = call_torch("aten::reciprocal", "", *out_scale_);
      f_.inverse_out_scale = View(*inverse).data;
    }
    target_.run(kOp, f_.linear.layer, copies_,
                [&](const PlanSource& source) { return plan_fp8_forward(f_, source); });
    return narrow_ ? *narrow_ : *wide_;
  }

  std::string plan() const {
    return Target::report(kOp, f_.linear.layer, copies_, plan_fp8_forward(f_, target_.source()));
  }

 private:
  static constexpr const char* kOp = "linear_act_fp8";

  const void* scale(const char* name, const Tensor& tensor) const {
    const View view(tensor), &x = call_.x_view();
    const bool one = view.dim == 0 || (view.dim == 1 && view.sizes[0] == 1);
    if (view.dtype != aoti_torch_dtype_float32() || !one)
      fail(kOp, ": ", name, " must be a float32 tensor of one element");
    if (view.device_type != x.device_type || view.device_index != x.device_index)
      fail(kOp, ": ", name, " is on another device than x");
    return view.data;
  }

  Copies copies_;
  LinearCall call_;
  Target target_;
  Fp8Forward f_;
  const OptionalTensor& out_scale_;
  OptionalTensor aligned_bias_, wide_, narrow_;
};

inline Tensor linear_act_fp8(const Tensor& x, const Tensor& weight, OptionalTensor bias,
                             const Tensor& x_scale, const Tensor& weight_scale,
                             OptionalTensor out_scale, int64_t activation,
                             std::optional<torch::headeronly::ScalarType> out_dtype) {
  return Fp8({x, weight, bias, x_scale, weight_scale, out_scale, activation, out_dtype}).run();
}

inline std::string linear_act_fp8_plan(const Tensor& x, const Tensor& weight, OptionalTensor bias,
                                       const Tensor& x_scale, const Tensor& weight_scale,
                                       OptionalTensor out_scale, int64_t activation,
                                       std::optional<torch::headeronly::ScalarType> out_dtype) {
  return Fp8({x, weight, bias, x_scale, weight_scale, out_scale, activation, out_dtype}).plan();
}

}  // namespace fusedcuda
