// The dlrm family for torch: checks, empty case, allocation, launch. Schemas and references are in
// fusedcuda/ops/dlrm.py.
#include "../kernels/dlrm.h"

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "../kernels/dlrm_config.h"
#include "dlrm_gradient.h"
#include "dlrm_interaction.h"
#include "row_call.h"

namespace fusedcuda {

template <typename Config>
std::string members_of_head(const Config& config, int64_t column_tiles) {
  return concat("\"path\": \"", config.aligned ? "vector" : "scalar", "\", \"vec\": ", config.vec,
                ", \"threads\": ", config.threads_x * config.threads_y,
                ", \"blocks\": ", config.blocks, ", \"column_tiles\": ", column_tiles,
                ", \"workspace\": ", config.workspace_size);
}

inline std::string json_members(const BceConfig& config) { return members_of_head(config, 1); }
inline std::string json_members(const OneOutputConfig& config) {
  return members_of_head(config, config.column_tiles);
}

namespace {

using OptionalTensor = std::optional<Tensor>;

// --- Interaction

Tensor interact(DotCall* call, int64_t width) {
  call->set_width("width", width);
  Tensor output = call->allocate_output();
  const DotParams params = call->forward_params(output);
  if (params.batch == 0) return output;
  const int32_t device = call->device_index();
  DeviceScope scope(device);
  const DotConfig config =
      choose_dot_interaction_config(params, device_traits<dlrm_device_traits>(device));
  call->print(config);
  throw_on_error(launch_dot_interaction(params, config, current_stream(device)), call->op());
  return output;
}

// The gradients in the mask.
std::vector<Tensor> interact_backward(DotCall* call, const Tensor& grad, int64_t mask) {
  std::vector<Tensor> gradients;
  const DotBwdParams params = call->backward_params(grad, mask, &gradients);
  if (params.batch == 0 || mask == 0) return gradients;
  const int32_t device = call->device_index();
  DeviceScope scope(device);
  const DotConfig config =
      choose_dot_interaction_bwd_config(params, device_traits<dlrm_device_traits>(device));
  call->print(config);
  throw_on_error(launch_dot_interaction_bwd(params, config, current_stream(device)), call->op());
  return gradients;
}

// What either of them would launch, as JSON. The operands may be CPU tensors, which stand for CUDA
// tensors of that layout; of what is allocated here only the layout matters. Backward: with a
// gradient laid out like the output.
std::string interaction_plan(DotCall* call, int64_t width, bool is_backward, int64_t num_sms) {
  const DeviceTraits device = planned_device<dlrm_device_traits>(num_sms);
  call->set_width("width", width);
  const Tensor output = call->allocate_output();
  if (!is_backward)
    return call->describe(choose_dot_interaction_config(call->forward_params(output), device));
  std::vector<Tensor> gradients;
  const DotBwdParams params = call->backward_params(output, kAllDotGradients, &gradients);
  return call->describe(choose_dot_interaction_bwd_config(params, device));
}

const char* interaction_name(bool is_backward) {
  return is_backward ? "dot_interaction_backward" : "dot_interaction";
}
const char* lookup_name(bool is_backward) {
  return is_backward ? "embedding_interaction_backward" : "embedding_interaction";
}

Tensor dot_interaction(const Tensor& dense, const Tensor& embeddings, bool upper, int64_t width) {
  DotCall call(interaction_name(false), dense, embeddings, upper);
  return interact(&call, width);
}

std::vector<Tensor> dot_interaction_backward(const Tensor& grad, const Tensor& dense,
                                             const Tensor& embeddings, bool upper) {
  DotCall call(interaction_name(true), dense, embeddings, upper);
  return interact_backward(&call, grad, kAllDotGradients);
}

std::string dot_interaction_plan(const Tensor& dense, const Tensor& embeddings, bool upper,
                                 int64_t width, bool is_backward, int64_t num_sms) {
  DotCall call(interaction_name(is_backward), dense, embeddings, upper);
  return interaction_plan(&call, width, is_backward, num_sms);
}

Tensor embedding_interaction(const Tensor& dense, const Tensor& weight, const Tensor& indices,
                             bool upper, int64_t width) {
  DotCall call(lookup_name(false), dense, weight, indices, upper);
  return interact(&call, width);
}

std::vector<Tensor> embedding_interaction_backward(const Tensor& grad, const Tensor& dense,
                                                   const Tensor& weight, const Tensor& indices,
                                                   bool upper, int64_t mask) {
  DotCall call(lookup_name(true), dense, weight, indices, upper);
  return interact_backward(&call, grad, mask);
}

std::string embedding_interaction_plan(const Tensor& dense, const Tensor& weight,
                                       const Tensor& indices, bool upper, int64_t width,
                                       bool is_backward, int64_t num_sms) {
  DotCall call(lookup_name(is_backward), dense, weight, indices, upper);
  return interaction_plan(&call, width, is_backward, num_sms);
}

// --- Gradient of a table

Tensor embedding_dense_backward(const Tensor& grad, const Tensor& indices, int64_t rows) {
  TableGradientCall call(grad, indices, rows);
  const int32_t device = call.device_index();
  DeviceScope scope(device);
  const TableGradientConfig config = call.choose(device_traits<dlrm_device_traits>(device));
  call.print(config);
  return call.run(config, current_stream(device));
}

std::string embedding_dense_backward_plan(const Tensor& grad, const Tensor& indices, int64_t rows,
                                          int64_t num_sms) {
  TableGradientCall call(grad, indices, rows);
  const TableGradientConfig config = call.choose(planned_device<dlrm_device_traits>(num_sms));
  return call.describe(config);
}

// --- Head

constexpr int64_t kReduceNone = 0, kReduceMean = 1, kReduceSum = 2;

// What forward and backward have in common.
template <typename Params>
class HeadCall {
 public:
  HeadCall(const char* op, const Tensor& x, const Tensor& weight, int64_t reduction)
      : op(op), rows(op, "x", x), x_(x), weight_(weight) {
    if (rows.columns() == 0) fail(op, ": x must have at least one element in its last dimension");
    if (reduction < kReduceNone || reduction > kReduceSum)
      fail(op, ": reduction must be 0, 1 or 2; got ", reduction);
    params = rows.parameters<Params>();
    params.x = rows.first();
    params.reduced = reduction != kReduceNone;
    // Of no rows the mean is infinity times 0, NaN as torch's.
    if (reduction == kReduceMean) params.scale = 1.0 / static_cast<double>(rows.rows());

    check_parameter("weight", weight_);
    const int64_t dim = weight_.dim;
    if (dim < 1 || dim > 2 || weight_.sizes[dim - 1] != rows.columns() ||
        (dim == 2 && weight_.sizes[0] != 1)) {
      fail(op, ": weight must have shape (", rows.columns(), ",) or (1, ", rows.columns(),
           "); got ", shape_of(weight_));
    }
    if (rows.columns() > 1 && weight_.strides[dim - 1] != 1) {
      own_weight_ = torch::stable::contiguous(weight);
      params.weight = View(*own_weight_).data;
    } else {
      params.weight = weight_.data;
    }
  }

  // A tensor of x's dtype and device.
  void check_parameter(const char* name, const View& view) const {
    if (view.dtype != x_.dtype) fail(op, ": ", name, " must have x's dtype");
    if (view.device_type != x_.device_type || view.device_index != x_.device_index)
      fail(op, ": ", name, " is on another device than x");
  }

  Tensor allocate_like_weight() const {
    return empty_contiguous(weight_.sizes, weight_.dim, x_.dtype, x_.device_type, x_.device_index);
  }
  Tensor allocate_like_bias() const {
    const int64_t one = 1;
    return empty_contiguous(&one, 1, x_.dtype, x_.device_type, x_.device_index);
  }

  const char* op;
  RowCall rows;
  Params params;

 private:
  View x_, weight_;
  std::optional<Tensor> own_weight_;
};

// [loss, logits, gradients of the logits]
std::vector<Tensor> linear_sigmoid_bce_forward(const Tensor& x, const Tensor& weight,
                                               OptionalTensor bias, const Tensor& target,
                                               double pos_weight, int64_t reduction) {
  HeadCall<BceParams> call("linear_sigmoid_bce", x, weight, reduction);
  RowCall& rows = call.rows;
  BceParams& params = call.params;
  if (!std::isfinite(pos_weight) || pos_weight < 0)
    fail(call.op, ": pos_weight must be finite and not negative");
  params.pos_weight = pos_weight;
  if (bias) {
    const View view(*bias);
    call.check_parameter("bias", view);
    if (view.dim != 1 || view.sizes[0] != 1)
      fail(call.op, ": bias must have shape (1,); got ", shape_of(view));
    params.bias = view.data;
  }
  params.target = rows.values("target", target);
  std::vector<Tensor> outputs;
  outputs.reserve(3);
  outputs.push_back(params.reduced ? rows.allocate_scalar() : rows.allocate_values());
  params.loss = View(outputs.back()).data;
  params.logits = View(outputs.emplace_back(rows.allocate_values())).data;
  params.dlogits = View(outputs.emplace_back(rows.allocate_values())).data;
  if (rows.rows() == 0 && !params.reduced) return outputs;

  const int32_t device = rows.device_index();
  DeviceScope scope(device);
  const BceConfig config =
      choose_linear_sigmoid_bce_config(params, device_traits<dlrm_device_traits>(device));
  rows.print(config);
  const Tensor workspace = rows.allocate_workspace(config.workspace_size);
  throw_on_error(
      launch_linear_sigmoid_bce(params, config, View(workspace).data, current_stream(device)),
      call.op);
  return outputs;
}

// The gradients whose bit is set in the mask: 0 of x, 1 of the weight, 2 of the bias.
std::vector<Tensor> allocate_gradients(HeadCall<BceBwdParams>* call, int64_t mask) {
  BceBwdParams& params = call->params;
  std::vector<Tensor> gradients;
  gradients.reserve(3);
  if (mask & 1) params.dx = call->rows.written(gradients.emplace_back(call->rows.allocate_rows()));
  if (mask & 2) params.dweight = View(gradients.emplace_back(call->allocate_like_weight())).data;
  if (mask & 4) params.dbias = View(gradients.emplace_back(call->allocate_like_bias())).data;
  return gradients;
}

std::vector<Tensor> linear_sigmoid_bce_backward(const Tensor& grad_loss, const Tensor& x,
                                                const Tensor& weight, const Tensor& dlogits,
                                                int64_t mask, int64_t reduction) {
  HeadCall<BceBwdParams> call("linear_sigmoid_bce_backward", x, weight, reduction);
  RowCall& rows = call.rows;
  BceBwdParams& params = call.params;
  params.dlogits = rows.values("dlogits", dlogits);
  if (params.reduced) {
    const View incoming(grad_loss);
    const int32_t dtype = torch_dtype(rows.compute_dtype());
    if (incoming.dim != 0 || incoming.dtype != dtype || View(x).device_type != incoming.device_type)
      fail(call.op, ": grad_loss must be a 0-d tensor of the dtype and on the device of the loss");
    params.grad_loss = incoming.data;
  } else {
    params.grad_loss = rows.values("grad_loss", grad_loss);
  }
  std::vector<Tensor> gradients = allocate_gradients(&call, mask);
  if (gradients.empty()) return gradients;

  // No empty case: the sums over no rows are written, too.
  const int32_t device = rows.device_index();
  DeviceScope scope(device);
  const OneOutputConfig config =
      choose_linear_sigmoid_bce_bwd_config(params, device_traits<dlrm_device_traits>(device));
  rows.print(config);
  const Tensor workspace = rows.allocate_workspace(config.workspace_size);
  throw_on_error(
      launch_linear_sigmoid_bce_bwd(params, config, View(workspace).data, current_stream(device)),
      call.op);
  return gradients;
}

// What the forward would launch, or with a mask of gradients the backward, as JSON; see
// interaction_plan.
std::string linear_sigmoid_bce_plan(const Tensor& x, const Tensor& weight, int64_t reduction,
                                    int64_t mask, int64_t num_sms) {
  const DeviceTraits device = planned_device<dlrm_device_traits>(num_sms);
  if (mask == 0) {
    HeadCall<BceParams> call("linear_sigmoid_bce", x, weight, reduction);
    return call.rows.describe(choose_linear_sigmoid_bce_config(call.params, device));
  }
  HeadCall<BceBwdParams> call("linear_sigmoid_bce_backward", x, weight, reduction);
  const std::vector<Tensor> gradients = allocate_gradients(&call, mask);
  return call.rows.describe(choose_linear_sigmoid_bce_bwd_config(call.params, device));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("dot_interaction", TORCH_BOX(&dot_interaction));
  m.impl("dot_interaction_backward", TORCH_BOX(&dot_interaction_backward));
  m.impl("embedding_interaction", TORCH_BOX(&embedding_interaction));
  m.impl("embedding_interaction_backward", TORCH_BOX(&embedding_interaction_backward));
  m.impl("embedding_dense_backward", TORCH_BOX(&embedding_dense_backward));
  m.impl("linear_sigmoid_bce_forward", TORCH_BOX(&linear_sigmoid_bce_forward));
  m.impl("linear_sigmoid_bce_backward", TORCH_BOX(&linear_sigmoid_bce_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("dot_interaction_plan", TORCH_BOX(&dot_interaction_plan));
  m.impl("embedding_interaction_plan", TORCH_BOX(&embedding_interaction_plan));
  m.impl("embedding_dense_backward_plan", TORCH_BOX(&embedding_dense_backward_plan));
  m.impl("linear_sigmoid_bce_plan", TORCH_BOX(&linear_sigmoid_bce_plan));
}

}  // namespace fusedcuda
