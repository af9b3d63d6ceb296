// The linear layers for torch: checks, allocation, steps. What the steps are is decided in
// linear_act_plan.h; schemas and references are in fusedcuda/ops/linear_act.py.
#include "../kernels/linear_act.h"

#include <optional>
#include <string>
#include <vector>

#include "linear_act_extended.h"
#include "linear_act_fp8_call.h"
#include "linear_act_product_call.h"
#include "linear_act_target.h"
#include "linear_act_tuning.h"

namespace fusedcuda {
namespace {

// Memory for copies with padded rows, where our own products are taken and read or write them.
class Padding {
 public:
  void prepare(const LinearCall& call, const PlanSource& source, LinearForward* f) {
    const LinearLayer& layer = f->layer;
    f->padded_x = f->padded_weight = kSomewhere;
    LinearActParams params;
    if (takes_hopper(*f, source)) params = hopper_params(*f);
    f->padded_x = room(call, layer, params.a.data == kSomewhere, layer.m);
    f->padded_weight = room(call, layer, params.b.data == kSomewhere, layer.n);
  }

  void prepare(const LinearCall& call, const PlanSource& source, LinearBackward* b) {
    const LinearLayer& layer = b->layer;
    b->padded_x = b->padded_weight = b->padded_dx = kSomewhere;
    LinearActBwdParams params;
    if (takes_hopper(*b, source)) params = hopper_params(*b);
    b->padded_x = room(call, layer, params.x.data == kSomewhere, layer.m);
    b->padded_weight = room(call, layer, params.weight.data == kSomewhere, layer.n);
    b->padded_dx = room(call, layer, params.dx.data == kSomewhere, layer.m);
  }

 private:
  void* room(const LinearCall& call, const LinearLayer& layer, bool is_needed, int64_t rows) {
    if (!is_needed) return nullptr;
    const int64_t count = rows * padded_columns(layer.k);
    copies_.push_back(call.allocate_elements(count, call.x_view().dtype));
    return View(copies_.back()).data;
  }

  std::vector<Tensor> copies_;
};

// --- Forward

struct ForwardArguments {
  const Tensor& x;
  const Tensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& residual;
  int64_t activation;
  bool low_precision;
  bool saves;
};

// A forward on its way: what is handed to the steps, and what keeps that alive.
class Forward {
 public:
  Forward(const char* op, const ForwardArguments& arguments)
      : op_(op),
        call_(op, "x", arguments.x, "weight", arguments.weight, copies_),
        target_(call_.x_view()) {
    f_.layer = target_.settle(call_.layer(), arguments.low_precision);
    f_.activation = activation_of(op, arguments.activation);
    f_.x = call_.x();
    f_.weight = call_.weight();
    read_bias(call_, arguments.bias, &f_, &aligned_bias_);
    if (arguments.residual) f_.residual = call_.like_output("residual", *arguments.residual);
    f_.output = call_.written(outputs_.emplace_back(call_.allocate_output()));
    if (arguments.saves) f_.saves = saved_for_backward(f_.activation, f_.layer.dtype);
    if (f_.saves != SavedForBackward::kNone)
      f_.saved = View(outputs_.emplace_back(call_.allocate_saved(f_.saves))).data;
    padding_.prepare(call_, target_.source(), &f_);
  }

  // [y, what is saved]
  std::vector<Tensor> run() const {
    target_.run(op_, f_.layer, copies_,
                [&](const PlanSource& source) { return plan_forward(f_, source); });
    return outputs_;
  }

  std::string plan() const {
    return Target::report(op_, f_.layer, copies_, plan_forward(f_, target_.source()));
  }

 private:
  const char* op_;
  Copies copies_;
  LinearCall call_;
  Target target_;
  LinearForward f_;
  OptionalTensor aligned_bias_;
  Padding padding_;
  std::vector<Tensor> outputs_;
};

Tensor linear_act_inference(const Tensor& x, const Tensor& weight, OptionalTensor bias,
                            OptionalTensor residual, int64_t activation, bool low_precision) {
  return Forward("linear_act", {x, weight, bias, residual, activation, low_precision, false})
      .run()[0];
}

std::vector<Tensor> linear_act_forward(const Tensor& x, const Tensor& weight, OptionalTensor bias,
                                       int64_t activation, bool low_precision) {
  return Forward("linear_act", {x, weight, bias, std::nullopt, activation, low_precision, true})
      .run();
}

std::string linear_act_plan(const Tensor& x, const Tensor& weight, OptionalTensor bias,
                            OptionalTensor residual, int64_t activation, bool low_precision,
                            bool saves) {
  return Forward("linear_act", {x, weight, bias, residual, activation, low_precision, saves})
      .plan();
}

// [y], or [] where our own kernel is not taken.
std::vector<Tensor> linear_act_extended(const Tensor& x, const Tensor& weight, OptionalTensor bias,
                                        const Tensor& t, const Tensor& up, int64_t activation) {
  const Activation act = activation_of("linear_act_extended", activation);
  Extended extended({x, weight, bias, t, up, act});
  if (!extended.fits()) return {};
  return {extended.run()};
}

// Its steps, or "".
std::string linear_act_extended_plan(const Tensor& x, const Tensor& weight, OptionalTensor bias,
                                     const Tensor& t, const Tensor& up, int64_t activation) {
  const Activation act = activation_of("linear_act_extended", activation);
  const Extended extended({x, weight, bias, t, up, act});
  return extended.fits() ? extended.plan() : "";
}

// --- Backward

// Gradients of x, weight and bias by the lowest bits of `mask`; what no wanted one needs is not
// read. Appends them to `gradients`.
void prepare_gradients(LinearCall& call, int64_t mask, LinearBackward* b,
                       std::vector<Tensor>* gradients) {
  if (mask & 1) {
    b->weight = call.weight();
    b->dx = View(gradients->emplace_back(call.allocate_dx())).data;
  }
  if (mask & 2) {
    b->x = call.x();
    b->dweight = View(gradients->emplace_back(call.allocate_dweight())).data;
  }
  if (mask & 4) b->dbias = View(gradients->emplace_back(call.allocate_dbias())).data;
}

struct BackwardArguments {
  const Tensor& dy;
  const Tensor& x;
  const Tensor& weight;
  const OptionalTensor& saved;
  int64_t activation;
  int64_t mask;
  bool low_precision;
};

class Backward {
 public:
  explicit Backward(const BackwardArguments& arguments)
      : call_(kOp, "x", arguments.x, "weight", arguments.weight, copies_), target_(call_.x_view()) {
    b_.layer = target_.settle(call_.layer(), arguments.low_precision);
    b_.activation = activation_of(kOp, arguments.activation);
    const bool has_activation = b_.activation != Activation::kNone;
    if (arguments.saved.has_value() != has_activation)
      fail(kOp, ": saved must be given with an activation, and only with one");
    b_.dy = call_.rows_like_output("dy", arguments.dy);
    if (has_activation) {
      b_.saves = saved_for_backward(b_.activation, b_.layer.dtype);
      b_.saved = call_.saved(*arguments.saved, b_.saves);
      if (arguments.mask & 3) b_.dz = call_.written(dz_.emplace(call_.allocate_output()));
    }
    prepare_gradients(call_, arguments.mask, &b_, &gradients_);
    padding_.prepare(call_, target_.source(), &b_);
  }

  std::vector<Tensor> run() const {
    if (!gradients_.empty())
      target_.run(kOp, b_.layer, copies_,
                  [&](const PlanSource& source) { return plan_backward(b_, source); });
    return gradients_;
  }

  std::string plan() const {
    return Target::report(kOp, b_.layer, copies_, plan_backward(b_, target_.source()));
  }

 private:
  static constexpr const char* kOp = "linear_act_backward";

  Copies copies_;
  LinearCall call_;
  Target target_;
  LinearBackward b_;
  OptionalTensor dz_;
  Padding padding_;
  std::vector<Tensor> gradients_;
};

std::vector<Tensor> linear_act_backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                        OptionalTensor saved, int64_t activation, int64_t mask,
                                        bool low_precision) {
  return Backward({dy, x, weight, saved, activation, mask, low_precision}).run();
}

std::string linear_act_backward_plan(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                     OptionalTensor saved, int64_t activation, int64_t mask,
                                     bool low_precision) {
  return Backward({dy, x, weight, saved, activation, mask, low_precision}).plan();
}

// --- Backend

// Chooses whose products are taken: "measured" (what is faster), "hopper" (our own of tiles, where
// they can be), or "cublaslt". Returns what was chosen before.
std::string linear_act_use(std::string backend) {
  constexpr const char* kNames[] = {"measured", "hopper", "cublaslt"};
  for (int i = 0; i < 3; ++i) {
    if (backend != kNames[i]) continue;
    return kNames[static_cast<int>(linear_backend().exchange(static_cast<LinearBackend>(i)))];
  }
  fail("linear_act_use: backend must be measured, hopper or cublaslt; got ", backend);
}

// --- Backward of two layers

struct TwoLayerArguments {
  const Tensor& dy;
  const Tensor& x;
  const Tensor& w1;
  const Tensor& saved;
  const Tensor& h;
  const Tensor& w2;
  int64_t activation;
  int64_t mask;  // 1 dx, 2 dw1, 4 db1, 8 dw2, 16 db2
  bool low_precision;
};

class TwoLayerBackward {
 public:
  explicit TwoLayerBackward(const TwoLayerArguments& arguments)
      : first_(kOp, "x", arguments.x, "w1", arguments.w1, copies_),
        second_(kOp, "h", arguments.h, "w2", arguments.w2, copies_),
        target_(first_.x_view()) {
    if (first_.batched() || second_.batched()) fail(kOp, ": w1 and w2 must have two dimensions");
    first_.like_output("h", arguments.h);
    LinearBackward& first = mlp_.first;
    first.layer = target_.settle(first_.layer(), arguments.low_precision);
    first.activation = activation_of(kOp, arguments.activation);
    if (first.activation == Activation::kNone)
      fail(kOp, ": saved belongs to an activation, and there is none");
    first.saves = saved_for_backward(first.activation, first.layer.dtype);
    first.saved = first_.saved(arguments.saved, first.saves);
    const bool wants_first = arguments.mask & 7;
    if (wants_first) first.dy = first.dz = first_.written(dz_.emplace(first_.allocate_output()));
    prepare_gradients(first_, arguments.mask & 7, &first, &gradients_);
    padding_.prepare(first_, target_.source(), &first);

    mlp_.dy = second_.rows_like_output("dy", arguments.dy);
    mlp_.out_features = second_.layer().n;
    LinearBackward second;
    prepare_gradients(second_, arguments.mask >> 2 & 6, &second, &gradients_);
    mlp_.h = second.x;
    mlp_.dw2 = second.dweight;
    mlp_.db2 = second.dbias;
    if (wants_first) mlp_.w2 = second_.weight();
  }

  std::vector<Tensor> run() const {
    target_.run(kOp, mlp_.first.layer, copies_,
                [&](const PlanSource& source) { return plan_mlp_backward(mlp_, source); });
    return gradients_;
  }

  std::string plan() const {
    return Target::report(kOp, mlp_.first.layer, copies_,
                          plan_mlp_backward(mlp_, target_.source()));
  }

 private:
  static constexpr const char* kOp = "mlp_backward";

  Copies copies_;
  LinearCall first_, second_;
  Target target_;
  MlpBackward mlp_;
  OptionalTensor dz_;
  Padding padding_;
  std::vector<Tensor> gradients_;
};

std::vector<Tensor> mlp_backward(const Tensor& dy, const Tensor& x, const Tensor& w1,
                                 const Tensor& saved, const Tensor& h, const Tensor& w2,
                                 int64_t activation, int64_t mask, bool low_precision) {
  return TwoLayerBackward({dy, x, w1, saved, h, w2, activation, mask, low_precision}).run();
}

std::string mlp_backward_plan(const Tensor& dy, const Tensor& x, const Tensor& w1,
                              const Tensor& saved, const Tensor& h, const Tensor& w2,
                              int64_t activation, int64_t mask, bool low_precision) {
  return TwoLayerBackward({dy, x, w1, saved, h, w2, activation, mask, low_precision}).plan();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("linear_act", TORCH_BOX(&linear_act_inference));
  m.impl("linear_act_forward", TORCH_BOX(&linear_act_forward));
  m.impl("linear_act_backward", TORCH_BOX(&linear_act_backward));
  m.impl("linear_act_extended", TORCH_BOX(&linear_act_extended));
  m.impl("linear_act_product_", TORCH_BOX(&linear_act_product_));
  m.impl("mlp_backward", TORCH_BOX(&mlp_backward));
  m.impl("linear_act_fp8", TORCH_BOX(&linear_act_fp8));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("linear_act_use", TORCH_BOX(&linear_act_use));
  m.impl("linear_act_plan", TORCH_BOX(&linear_act_plan));
  m.impl("linear_act_backward_plan", TORCH_BOX(&linear_act_backward_plan));
  m.impl("linear_act_extended_plan", TORCH_BOX(&linear_act_extended_plan));
  m.impl("linear_act_product_plan", TORCH_BOX(&linear_act_product_plan));
  m.impl("mlp_backward_plan", TORCH_BOX(&mlp_backward_plan));
  m.impl("linear_act_fp8_plan", TORCH_BOX(&linear_act_fp8_plan));
  m.impl("cublaslt_version", TORCH_BOX(&cublaslt_version));
  m.impl("cublaslt_fuses", TORCH_BOX(&cublaslt_fuses));
  m.impl("cublaslt_problems", TORCH_BOX(&cublaslt_problems));
  m.impl("cublaslt_candidates", TORCH_BOX(&cublaslt_candidates));
  m.impl("cublaslt_run", TORCH_BOX(&cublaslt_run));
  m.impl("cublaslt_choose", TORCH_BOX(&cublaslt_choose));
}

}  // namespace fusedcuda
