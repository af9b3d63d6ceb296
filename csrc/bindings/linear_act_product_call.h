// A product into memory that is given (linear_act_product.h), for torch: checks and steps.
#pragma once

#include <optional>
#include <string>

#include "linear_act_product.h"
#include "linear_act_target.h"

namespace fusedcuda {

struct ProductArguments {
  const Tensor& output;  // (M, N), rows
  const Tensor& a;       // (M, K), stored by rows or by columns, as b is
  const Tensor& b;       // (N, K)
  const std::optional<Tensor>& bias;
  bool adds;
};

class Product {
 public:
  explicit Product(const ProductArguments& arguments)
      : call_(kOp, "a", arguments.a, "b", arguments.b, copies_), target_(call_.x_view()) {
    LinearForward& f = product_.linear;
    f.layer = target_.settle(call_.layer(), /*low_precision=*/false);
    if (call_.x_view().dim != 2 || call_.batched()) fail(kOp, ": a and b must be matrices");
    set_output(View(arguments.output));
    f.x = call_.x();
    f.weight = call_.weight();
    if (arguments.adds) f.residual = f.output;
    if (arguments.bias) set_bias(*arguments.bias, arguments.adds);
  }

  void run() const {
    target_.run(kOp, product_.linear.layer, copies_,
                [&](const PlanSource& source) { return plan_product(product_, source); });
  }

  std::string plan() const {
    return Target::report(kOp, product_.linear.layer, copies_,
                          plan_product(product_, target_.source()));
  }

 private:
  static constexpr const char* kOp = "linear_act_product_";

  void set_output(const View& view) {
    LinearForward& f = product_.linear;
    const LinearLayer& layer = f.layer;
    const View& a = call_.x_view();
    if (view.device_type != a.device_type || view.device_index != a.device_index)
      fail(kOp, ": output is on another device than a");
    product_.in_float32 = size_of(layer.dtype) == 2 && dtype_of(view) == DType::kFloat32;
    if (view.dtype != a.dtype && !product_.in_float32)
      fail(kOp, ": output must have the dtype of a, or float32 where that has 16 bits");
    if (view.dim != 2 || view.sizes[0] != layer.m || view.sizes[1] != layer.n) {
      fail(kOp, ": output must have shape (", layer.m, ", ", layer.n, "); got ",
           shape_string(view.sizes, view.dim));
    }
    const bool are_rows = (layer.n <= 1 || view.strides[1] == 1) &&
                          (layer.m <= 1 || view.strides[0] >= std::max<int64_t>(layer.n, 1));
    if (!are_rows) fail(kOp, ": output must be rows that do not share memory");
    f.output = {view.data, view.strides[0], 0};
  }

  void set_bias(const Tensor& bias, bool adds) {
    LinearForward& f = product_.linear;
    if (adds || product_.in_float32)
      fail(kOp, ": bias goes with an output of the dtype of a that is not added to");
    f.bias = call_.bias(bias, &f.bias_batch);
    if (alignment_of(f.bias) >= 16) return;
    aligned_bias_ = call_.allocate_elements(f.layer.n, View(bias).dtype);
    f.aligned_bias = View(*aligned_bias_).data;
  }

  Copies copies_;
  LinearCall call_;
  Target target_;
  LinearProduct product_;
  std::optional<Tensor> aligned_bias_;
};

// output = a @ b.T + bias, or with `adds` that plus what the output holds.
inline void linear_act_product_(Tensor output, const Tensor& a, const Tensor& b,
                                std::optional<Tensor> bias, bool adds) {
  Product({output, a, b, bias, adds}).run();
}

inline std::string linear_act_product_plan(const Tensor& output, const Tensor& a, const Tensor& b,
                                           std::optional<Tensor> bias, bool adds) {
  return Product({output, a, b, bias, adds}).plan();
}

}  // namespace fusedcuda
