// A linear layer with the products of a second, narrow pair of factors in it, for the lora family:
// act(x @ weight.T + t @ up.T + bias), by our own kernel or not at all.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "linear_act_plan.h"
#include "linear_act_target.h"

namespace fusedcuda {

struct ExtendedArguments {
  const Tensor& x;
  const Tensor& weight;  // (N, K), stored by rows or by columns
  const std::optional<Tensor>& bias;
  const Tensor& t;   // (M, R): a row for each of x
  const Tensor& up;  // (N, R), stored as the weight
  Activation activation;
};

class Extended {
 public:
  explicit Extended(const ExtendedArguments& arguments)
      : call_(kOp, "x", arguments.x, "weight", arguments.weight, copies_),
        branch_(kOp, "t", arguments.t, "up", arguments.up, copies_),
        target_(call_.x_view()) {
    if (call_.batched() || branch_.batched()) fail(kOp, ": weight and up must have two dimensions");
    const LinearLayer &layer = call_.layer(), &narrow = branch_.layer();
    if (narrow.m != layer.m || narrow.n != layer.n || narrow.dtype != layer.dtype)
      fail(kOp, ": t and up must be (", layer.m, ", R) and (", layer.n, ", R) of the dtype of x");
    f_.layer = target_.settle(layer, /*low_precision=*/false);
    f_.activation = arguments.activation;
    f_.x = call_.x();
    f_.weight = call_.weight();
    if (arguments.bias) f_.bias = call_.bias(*arguments.bias, &f_.bias_batch);
    f_.output = contiguous_matrix(kSomewhere, layer.m, layer.n);
    extra_t_ = branch_.x();
    extra_up_ = branch_.weight();
  }

  // Whether our own kernel is taken.
  bool fits() const { return takes_hopper(params(), target_.source()); }

  Tensor run() {
    const Tensor output = call_.allocate_output();
    f_.output = call_.written(output);
    target_.run(kOp, f_.layer, copies_, [&](const PlanSource& source) { return steps(source); });
    return output;
  }

  std::string plan() const {
    return Target::report(kOp, f_.layer, copies_, steps(target_.source()));
  }

 private:
  static constexpr const char* kOp = "linear_act_extended";

  LinearActParams params() const {
    const LinearLayer &layer = f_.layer, &narrow = branch_.layer();
    LinearActParams params = hopper_params(f_);
    params.extra_k = narrow.k;
    params.extra_a = readable(extra_t_.matrix, layer.m, narrow.k, layer.dtype, nullptr);
    params.extra_b = readable(extra_up_.matrix, layer.n, narrow.k, layer.dtype, nullptr);
    return params;
  }

  Steps steps(const PlanSource& source) const {
    StepPlanner planner(source);
    planner.hopper("y", params());
    return planner.take();
  }

  Copies copies_;
  LinearCall call_, branch_;
  Target target_;
  LinearForward f_;
  LinearFactor extra_t_, extra_up_;
};

}  // namespace fusedcuda
