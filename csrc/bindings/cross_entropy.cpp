// The cross-entropy family for torch: checks, allocation, launch. Schemas and references are in
// fusedcuda/ops/cross_entropy.py.
#include "../kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "../kernels/cross_entropy_config.h"
#include "row_call.h"

namespace fusedcuda {

inline std::string json_members(const CrossEntropyConfig& config) {
  return concat(json_members(config.row), ", \"totals_cluster\": ", config.totals_cluster,
                ", \"totals_first\": ", config.totals_first ? "true" : "false",
                ", \"workspace\": ", config.workspace_size);
}

inline std::string json_members(const CrossEntropyBwdConfig& config) {
  return concat(json_members(config.row), ", \"tiles\": ", config.tiles,
                ", \"workspace\": ", config.workspace_size);
}

namespace {

using OptionalTensor = std::optional<Tensor>;

struct Options {
  const OptionalTensor& weight;
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
  double softcap;
  int64_t reduction;

  bool is_reduced() const { return reduction != static_cast<int64_t>(Reduction::kNone); }
  int64_t normalizer_size() const { return is_reduced() ? 2 : 0; }
};

Tensor as_contiguous(const Tensor& tensor) {
  return View(tensor).is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// The shape of the statistics: two values a row.
std::vector<int64_t> statistics_sizes(const View& logits) {
  std::vector<int64_t> sizes(logits.sizes, logits.sizes + logits.dim);
  sizes.back() = 2;
  return sizes;
}

Tensor allocate_statistics(const View& logits, DType dtype) {
  return empty_contiguous(statistics_sizes(logits).data(), logits.dim, torch_dtype(dtype),
                          logits.device_type, logits.device_index);
}

// Fails unless `view` is on the device of the logits and has this shape.
void check_place(const char* op, const char* name, const View& view, const View& logits,
                 const int64_t* sizes, int64_t dim) {
  if (view.device_type != logits.device_type || view.device_index != logits.device_index)
    fail(op, ": ", name, " is on another device than logits");
  if (view.dim != dim || !std::equal(sizes, sizes + dim, view.sizes)) {
    fail(op, ": ", name, " must have shape ", shape_string(sizes, dim), "; got ",
         shape_string(view.sizes, view.dim));
  }
}

// What decides how forward and backward are launched, without the gradient.
template <typename Params>
Params layout_parameters(RowCall& call, const Options& options) {
  auto params = call.parameters<Params>();
  params.logits = call.first();
  if (options.weight) params.weight = call.computed_vector("weight", *options.weight);
  params.label_smoothing = options.label_smoothing;
  params.z_loss = options.z_loss;
  params.softcap = options.softcap;
  params.reduction = static_cast<Reduction>(options.reduction);
  return params;
}

// What forward and backward have in common. `target` is contiguous.
template <typename Params>
Params parameters(const char* op, RowCall& call, const Tensor& logits, const Tensor& target,
                  const Options& options) {
  if (call.columns() == 0) fail(op, ": logits must have at least one class in the last dimension");
  if (options.reduction < 0 || options.reduction > static_cast<int64_t>(Reduction::kSum))
    fail(op, ": reduction must be 0, 1 or 2; got ", options.reduction);
  // Written so that NaN fails.
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1))
    fail(op, ": label_smoothing must be in [0, 1]");
  if (!(options.z_loss >= 0 && std::isfinite(options.z_loss)))
    fail(op, ": z_loss must be finite and not negative");
  if (!(options.softcap >= 0 && std::isfinite(options.softcap)))
    fail(op, ": softcap must be finite and positive, or 0 for none");
  const View rows(logits), classes(target);
  check_place(op, "target", classes, rows, rows.sizes, rows.dim - 1);
  const bool is_int32 = classes.dtype == aoti_torch_dtype_int32();
  if (!is_int32 && classes.dtype != aoti_torch_dtype_int64())
    fail(op, ": target must be an int32 or int64 tensor of classes");

  auto params = layout_parameters<Params>(call, options);
  params.target = classes.data;
  params.target_is_int32 = is_int32;
  params.ignore_index = options.ignore_index;
  return params;
}

// The statistics and the normalizer of a forward, which lie in memory as it makes them.
void set_sums(const char* op, const RowCall& call, const View& logits, const View& statistics,
              const View& normalizer, const Options& options, CrossEntropyParams* params) {
  check_place(op, "statistics", statistics, logits, statistics_sizes(logits).data(), logits.dim);
  const int64_t normalizer_size = options.normalizer_size();
  check_place(op, "normalizer", normalizer, logits, &normalizer_size, 1);
  const int32_t dtype = torch_dtype(call.compute_dtype());
  if (statistics.dtype != dtype || normalizer.dtype != dtype) {
    fail(op, ": statistics and normalizer must have dtype ",
         call.compute_dtype() == DType::kFloat64 ? "float64" : "float32");
  }
  const bool are_pairs_aligned =
      reinterpret_cast<uintptr_t>(statistics.data) % (2 * size_of(call.compute_dtype())) == 0;
  if (!are_pairs_aligned || !statistics.is_contiguous() || !normalizer.is_contiguous())
    fail(op, ": statistics and normalizer must lie in memory as the forward made them");
  params->statistics = statistics.data;
  params->normalizer = normalizer.data;
}

// --- Forward

// [loss, statistics, normalizer, gradient if it is wanted]
std::vector<Tensor> cross_entropy_forward(const Tensor& logits, const Tensor& target,
                                          OptionalTensor weight, int64_t ignore_index,
                                          double label_smoothing, double z_loss, double softcap,
                                          int64_t reduction, bool with_gradient) {
  const char* op = "cross_entropy";
  const Options options{weight, ignore_index, label_smoothing, z_loss, softcap, reduction};
  RowCall call(op, "logits", logits);
  const Tensor classes = as_contiguous(target);
  auto params = parameters<CrossEntropyParams>(op, call, logits, classes, options);

  std::vector<Tensor> outputs;
  outputs.reserve(4);
  const bool is_reduced = options.is_reduced();
  outputs.push_back(is_reduced ? call.allocate_scalar() : call.allocate_values());
  params.loss = View(outputs.back()).data;
  const Tensor statistics = allocate_statistics(View(logits), call.compute_dtype());
  params.statistics = View(outputs.emplace_back(statistics)).data;
  params.normalizer =
      View(outputs.emplace_back(call.allocate_workspace(options.normalizer_size()))).data;
  if (with_gradient) params.gradient = call.written(outputs.emplace_back(call.allocate_rows()));

  // No empty case: the mean and the sum over no row are written by a kernel, too.
  DeviceScope scope(call.device_index());
  const CrossEntropyConfig config = choose_cross_entropy_config(
      params, device_traits<cross_entropy_device_traits>(call.device_index()));
  call.print(config);
  const Tensor workspace = call.allocate_workspace(config.workspace_size);
  throw_on_error(launch_cross_entropy(params, config, View(workspace).data,
                                      current_stream(call.device_index())),
                 op);
  return outputs;
}

// Of rows that are written to, none may lie on top of another.
void check_rows_apart(const char* op, const char* name, const Tensor& tensor, int64_t stride) {
  const RowCall call(op, name, tensor);
  if (call.rows() > 1 && stride < call.columns())
    fail(op, ": rows of ", name, " must not share memory; got a row stride of ", stride);
}

// Some of the rows of a loss; with_gradient, theirs is written over the logits.
void cross_entropy_rows_(Tensor logits, Tensor losses, Tensor statistics, const Tensor& target,
                         const Tensor& normalizer, int64_t ignore_index, double label_smoothing,
                         double z_loss, double softcap, int64_t reduction, bool with_gradient) {
  const char* op = "cross_entropy_rows_";
  const Options options{std::nullopt, ignore_index, label_smoothing, z_loss, softcap, reduction};
  const View view(logits);
  int64_t stride;
  if (view.dim == 0 || !has_one_row_stride(view, &stride))
    fail(op, ": logits must be rows that lie one stride apart");
  check_rows_apart(op, "logits", logits, stride);
  RowCall call(op, "logits", logits);
  const Tensor classes = as_contiguous(target);
  auto params = parameters<CrossEntropyParams>(op, call, logits, classes, options);
  set_sums(op, call, view, View(statistics), View(normalizer), options, &params);
  const View values = call.check_values("losses", losses);
  if (!values.is_contiguous()) fail(op, ": losses must be contiguous");
  params.loss = values.data;
  params.is_part = true;
  if (with_gradient) params.gradient = params.logits;
  if (call.is_empty()) return;

  DeviceScope scope(call.device_index());
  const CrossEntropyConfig config = choose_cross_entropy_config(
      params, device_traits<cross_entropy_device_traits>(call.device_index()));
  call.print(config);
  throw_on_error(launch_cross_entropy(params, config, nullptr, current_stream(call.device_index())),
                 op);
}

// --- Backward

struct BackwardArguments {
  const Tensor& grad_loss;
  const Tensor& logits;
  const Tensor& target;
  const Tensor& statistics;
  const Tensor& normalizer;
  Options options;
  bool unless_one;
};

// Whether all elements of a tensor lie in one place, as those of an expanded number do.
bool is_one_value(const View& view) {
  for (int64_t d = 0; d < view.dim; ++d) {
    if (view.sizes[d] > 1 && view.strides[d] != 0) return false;
  }
  return true;
}

// `gradient`: rows with one stride; may be the logits.
void backward(const char* op, const BackwardArguments& arguments, const Tensor& gradient) {
  const Options& options = arguments.options;
  if (arguments.unless_one && !options.is_reduced())
    fail(op, ": unless_one is for a mean or a sum, where one gradient comes in");
  RowCall call(op, "logits", arguments.logits);
  const Tensor classes = as_contiguous(arguments.target);
  auto params = parameters<CrossEntropyBwdParams>(op, call, arguments.logits, classes, options);
  params.gradient = call.like_first("gradient", gradient);

  const View logits(arguments.logits);
  const Tensor statistics = as_contiguous(arguments.statistics);
  set_sums(op, call, logits, View(statistics), View(arguments.normalizer), options, &params);
  const Tensor grad_loss = is_one_value(View(arguments.grad_loss))
                               ? arguments.grad_loss
                               : as_contiguous(arguments.grad_loss);
  const View incoming(grad_loss);
  check_place(op, "grad_loss", incoming, logits, logits.sizes,
              options.is_reduced() ? 0 : logits.dim - 1);
  if (incoming.dtype != torch_dtype(call.compute_dtype())) {
    fail(op, ": grad_loss must have dtype ",
         call.compute_dtype() == DType::kFloat64 ? "float64" : "float32");
  }
  params.grad_loss = incoming.data;
  params.grad_stride = is_one_value(incoming) ? 0 : 1;
  params.unless_one = arguments.unless_one;
  if (call.is_empty()) return;

  DeviceScope scope(call.device_index());
  const CrossEntropyBwdConfig config = choose_cross_entropy_bwd_config(
      params, device_traits<cross_entropy_device_traits>(call.device_index()));
  call.print(config);
  const Tensor workspace = call.allocate_workspace(config.workspace_size);
  throw_on_error(launch_cross_entropy_bwd(params, config, View(workspace).data,
                                          current_stream(call.device_index())),
                 op);
}

Tensor cross_entropy_backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                              const Tensor& statistics, const Tensor& normalizer,
                              OptionalTensor weight, int64_t ignore_index, double label_smoothing,
                              double z_loss, double softcap, int64_t reduction) {
  const char* op = "cross_entropy_backward";
  Tensor gradient = RowCall(op, "logits", logits).allocate_rows();
  const Options options{weight, ignore_index, label_smoothing, z_loss, softcap, reduction};
  backward(op, {grad_loss, logits, target, statistics, normalizer, options, false}, gradient);
  return gradient;
}

void cross_entropy_backward_(Tensor gradient, const Tensor& grad_loss, const Tensor& logits,
                             const Tensor& target, const Tensor& statistics,
                             const Tensor& normalizer, OptionalTensor weight, int64_t ignore_index,
                             double label_smoothing, double z_loss, double softcap,
                             int64_t reduction, bool unless_one) {
  const char* op = "cross_entropy_backward_";
  const Options options{weight, ignore_index, label_smoothing, z_loss, softcap, reduction};
  const BackwardArguments arguments{grad_loss,  logits,  target,    statistics,
                                    normalizer, options, unless_one};
  const View view(gradient);
  int64_t stride;
  if (view.dim == 0 || has_one_row_stride(view, &stride)) {
    check_rows_apart(op, "gradient", gradient, stride);
    backward(op, arguments, gradient);
  } else {
    // A copy with its values, which unless_one may keep.
    const Tensor rows = torch::stable::contiguous(gradient);
    backward(op, arguments, rows);
    torch::stable::copy_(gradient, rows);
  }
}

// What the forward, or a backward, would launch, as JSON. With in_place the gradient overwrites the
// logits: in the backward, or in a forward of some of the rows. These may be a CPU tensor, which
// stands for a CUDA tensor of that layout; of what is allocated here only the layout matters.
std::string cross_entropy_plan(const Tensor& logits, OptionalTensor weight, double label_smoothing,
                               double softcap, int64_t reduction, bool with_gradient,
                               bool is_backward, bool in_place, bool unless_one, int64_t num_sms) {
  const DeviceTraits device = planned_device<cross_entropy_device_traits>(num_sms);
  const Options options{weight, 0, label_smoothing, 0, softcap, reduction};
  RowCall call(is_backward ? "cross_entropy_backward" : "cross_entropy", "logits", logits);
  auto params = layout_parameters<CrossEntropyBwdParams>(call, options);
  const Tensor gradient = call.allocate_rows();
  if (!is_backward) {
    params.is_part = in_place;
    if (with_gradient) params.gradient = in_place ? params.logits : call.written(gradient);
    return call.describe(choose_cross_entropy_config(params, device));
  }
  params.gradient = in_place ? params.logits : call.written(gradient);
  params.unless_one = unless_one;
  return call.describe(choose_cross_entropy_bwd_config(params, device));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));
  m.impl("cross_entropy_rows_", TORCH_BOX(&cross_entropy_rows_));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  m.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("cross_entropy_plan", TORCH_BOX(&cross_entropy_plan));
}

}  // namespace fusedcuda
