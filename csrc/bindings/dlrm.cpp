// The dlrm family for torch: checks, empty case, allocation, launch. Schemas and references are in
// fusedcuda/ops/dlrm.py.
#include "../kernels/dlrm.h"

#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "../kernels/dlrm_config.h"
#include "row_call.h"

namespace fusedcuda {

inline std::string json_members(const BceConfig& config) {
  return concat("\"path\": \"", config.aligned ? "vector" : "scalar", "\", \"vec\": ", config.vec,
                ", \"threads\": ", config.threads_x * config.threads_y,
                ", \"blocks\": ", config.blocks, ", \"column_tiles\": ", config.column_tiles,
                ", \"workspace\": ", config.workspace_size);
}

namespace {

using OptionalTensor = std::optional<Tensor>;

std::string shape_of(const View& view) { return shape_string(view.sizes, view.dim); }

// --- Interaction

const char* name_of(DotPath path) {
  switch (path) {
    case DotPath::kEmpty:
      return "empty";
    case DotPath::kTensorCores:
      return "tensor_cores";
    default:
      return "threads";
  }
}

// Checks of the operands, and the parameters that a launch takes.
class DotCall {
 public:
  DotCall(const char* op, const Tensor& dense, const Tensor& embeddings, bool upper)
      : op_(op), dense_(dense) {
    const View vectors(embeddings);
    if (!dtype_of(dense_))
      fail(op, ": dense must be a float64, float32, float16 or bfloat16 tensor");
    if (vectors.dtype != dense_.dtype) fail(op, ": embeddings must have dense's dtype");
    check_device("embeddings", vectors);
    if (dense_.dim != 2) fail(op, ": dense must have shape (B, E); got ", shape_of(dense_));
    const int64_t batch = dense_.sizes[0], columns = dense_.sizes[1];
    if (vectors.dim != 3 || vectors.sizes[0] != batch || vectors.sizes[2] != columns) {
      fail(op, ": embeddings must have shape (", batch, ", F - 1, ", columns, "); got ",
           shape_of(vectors));
    }
    if (columns < 1 || columns > kMaxDotColumns)
      fail(op, ": vectors must have 1 to ", kMaxDotColumns, " elements; got ", columns);
    if (vectors.sizes[1] >= kMaxDotVectors) {
      fail(op, ": there may be ", kMaxDotVectors, " vectors, dense included; got ",
           vectors.sizes[1] + 1);
    }
    params_.dtype = *dtype_of(dense_);
    params_.batch = batch;
    params_.vectors = static_cast<int>(vectors.sizes[1]) + 1;
    params_.columns = static_cast<int>(columns);
    params_.upper = upper;
    const View read_dense = with_neighbours("dense", dense);
    params_.dense = read_dense.data;
    params_.dense_stride = stride_of(read_dense, 0);
    const View read_vectors = with_neighbours("embeddings", embeddings);
    params_.embeddings = read_vectors.data;
    params_.sample_stride = stride_of(read_vectors, 0);
    params_.vector_stride = stride_of(read_vectors, 1);
  }

  void set_width(const char* name, int64_t width) {
    const int64_t least = params_.columns + params_.vectors * (params_.vectors - 1) / 2;
    if (width < least || width >= least + kMaxDotPadding) {
      fail(op_, ": ", name, " must be ", least, " to ", least + kMaxDotPadding - 1, ": ",
           params_.columns, " elements, the products of ", params_.vectors,
           " vectors, and padding; got ", width);
    }
    params_.width = static_cast<int>(width);
  }

  // The incoming gradient, whose rows are as wide as those of the output.
  void set_grad(const Tensor& grad, DotBwdParams* params) {
    const View view(grad);
    if (view.dtype != dense_.dtype) fail(op_, ": grad must have dense's dtype");
    check_device("grad", view);
    if (view.dim != 2 || view.sizes[0] != params_.batch)
      fail(op_, ": grad must have shape (", params_.batch, ", width); got ", shape_of(view));
    set_width("the width of grad", view.sizes[1]);
    params->width = params_.width;
    const View read = with_neighbours("grad", grad);
    params->grad = read.data;
    params->grad_stride = stride_of(read, 0);
  }

  template <typename Params>
  Params parameters() const {
    Params params;
    static_cast<DotVectors&>(params) = params_;
    return params;
  }

  Tensor allocate_output() const { return allocate({params_.batch, params_.width}); }
  // Of dense, and of embeddings.
  std::vector<Tensor> allocate_gradients() const {
    return {allocate({params_.batch, params_.columns}),
            allocate({params_.batch, params_.vectors - 1, params_.columns})};
  }

  int32_t device_index() const { return dense_.device_index; }

  std::string describe(const DotConfig& config) const {
    auto quoted = [&](int64_t i) { return concat("\"", copies_[i].name, "\""); };
    const int vec = config.aligned ? kVectorBytes / size_of(params_.dtype) : 1;
    return concat("{\"op\": \"", op_, "\", \"path\": \"", name_of(config.path),
                  "\", \"vec\": ", vec,
                  ", \"row_vec\": ", config.aligned_row ? kVectorBytes / size_of(params_.dtype) : 1,
                  ", \"tiles\": ", config.tiles, ", \"stages\": ", config.stages,
                  ", \"threads\": ", config.threads, ", \"blocks\": ", config.blocks,
                  ", \"shared_bytes\": ", config.shared_bytes, ", \"vectors\": ", params_.vectors,
                  ", \"columns\": ", params_.columns, ", \"width\": ", params_.width,
                  ", \"copies\": [", join(copies_.size(), quoted), "]}");
  }

  void print(const DotConfig& config) const {
    static const bool enabled = environment_flag("FUSEDCUDA_PRINT_CONFIG");
    if (enabled) std::fprintf(stderr, "fusedcuda: %s\n", describe(config).c_str());
  }

 private:
  struct Copy {
    const char* name;  // of the argument
    Tensor tensor;     // kept until the launch
  };

  Tensor allocate(std::initializer_list<int64_t> sizes) const {
    return empty_contiguous(sizes.begin(), static_cast<int64_t>(sizes.size()), dense_.dtype,
                            dense_.device_type, dense_.device_index);
  }

  void check_device(const char* name, const View& view) const {
    if (view.device_type != dense_.device_type || view.device_index != dense_.device_index)
      fail(op_, ": ", name, " is on another device than dense");
  }

  // Of one element the stride says nothing, and would only look unaligned.
  static int64_t stride_of(const View& view, int d) {
    return view.sizes[d] > 1 ? view.strides[d] : 0;
  }

  // The tensor, or a copy of it, whose last dimension has neighbours in memory.
  View with_neighbours(const char* name, const Tensor& tensor) {
    const View view(tensor);
    if (view.sizes[view.dim - 1] == 1 || view.strides[view.dim - 1] == 1) return view;
    return View(copies_.emplace_back(Copy{name, torch::stable::contiguous(tensor)}).tensor);
  }

  const char* op_;
  View dense_;
  DotVectors params_;
  std::vector<Copy> copies_;
};

DotParams forward_params(const DotCall& call, const Tensor& output) {
  auto params = call.parameters<DotParams>();
  params.output = View(output).data;
  return params;
}

DotBwdParams backward_params(DotCall* call, const Tensor& grad,
                             const std::vector<Tensor>& gradients) {
  auto params = call->parameters<DotBwdParams>();
  call->set_grad(grad, &params);
  params.dense_grad = View(gradients[0]).data;
  params.embeddings_grad = View(gradients[1]).data;
  return params;
}

Tensor dot_interaction(const Tensor& dense, const Tensor& embeddings, bool upper, int64_t width) {
  const char* op = "dot_interaction";
  DotCall call(op, dense, embeddings, upper);
  call.set_width("width", width);
  Tensor output = call.allocate_output();
  const DotParams params = forward_params(call, output);
  if (params.batch == 0) return output;
  const int32_t device = call.device_index();
  DeviceScope scope(device);
  const DotConfig config =
      choose_dot_interaction_config(params, device_traits<dlrm_device_traits>(device));
  call.print(config);
  throw_on_error(launch_dot_interaction(params, config, current_stream(device)), op);
  return output;
}

std::vector<Tensor> dot_interaction_backward(const Tensor& grad, const Tensor& dense,
                                             const Tensor& embeddings, bool upper) {
  const char* op = "dot_interaction_backward";
  DotCall call(op, dense, embeddings, upper);
  std::vector<Tensor> gradients = call.allocate_gradients();
  const DotBwdParams params = backward_params(&call, grad, gradients);
  if (params.batch == 0) return gradients;
  const int32_t device = call.device_index();
  DeviceScope scope(device);
  const DotConfig config =
      choose_dot_interaction_bwd_config(params, device_traits<dlrm_device_traits>(device));
  call.print(config);
  throw_on_error(launch_dot_interaction_bwd(params, config, current_stream(device)), op);
  return gradients;
}

// What dot_interaction, or its backward with a gradient laid out like the output, would launch, as
// JSON. The operands may be CPU tensors, which stand for CUDA tensors of that layout; of what is
// allocated here only the layout matters.
std::string dot_interaction_plan(const Tensor& dense, const Tensor& embeddings, bool upper,
                                 int64_t width, bool is_backward, int64_t num_sms) {
  const DeviceTraits device = planned_device<dlrm_device_traits>(num_sms);
  DotCall call(is_backward ? "dot_interaction_backward" : "dot_interaction", dense, embeddings,
               upper);
  call.set_width("width", width);
  const Tensor output = call.allocate_output();
  if (!is_backward)
    return call.describe(choose_dot_interaction_config(forward_params(call, output), device));
  const DotBwdParams params = backward_params(&call, output, call.allocate_gradients());
  return call.describe(choose_dot_interaction_bwd_config(params, device));
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
  const BceConfig config =
      choose_linear_sigmoid_bce_bwd_config(params, device_traits<dlrm_device_traits>(device));
  rows.print(config);
  const Tensor workspace = rows.allocate_workspace(config.workspace_size);
  throw_on_error(
      launch_linear_sigmoid_bce_bwd(params, config, View(workspace).data, current_stream(device)),
      call.op);
  return gradients;
}

// What the forward would launch, or with a mask of gradients the backward, as JSON; see
// dot_interaction_plan.
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
  m.impl("linear_sigmoid_bce_forward", TORCH_BOX(&linear_sigmoid_bce_forward));
  m.impl("linear_sigmoid_bce_backward", TORCH_BOX(&linear_sigmoid_bce_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("dot_interaction_plan", TORCH_BOX(&dot_interaction_plan));
  m.impl("linear_sigmoid_bce_plan", TORCH_BOX(&linear_sigmoid_bce_plan));
}

}  // namespace fusedcuda
