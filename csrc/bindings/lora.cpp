// The lora family for torch: checks, empty case, allocation, launch. Schemas and references are in
// fusedcuda/ops/lora.py, where the layers are put together of these and of linear_act's products.
#include "../kernels/lora.h"

#include <optional>
#include <string>
#include <vector>

#include "../kernels/lora_config.h"
#include "lora_call.h"
#include "lora_decode.h"
#include "lora_pass.h"
#include "lora_product.h"

namespace fusedcuda {

inline std::string json_members(const LoraConfig& config) {
  return concat("\"path\": \"", config.is_empty() ? "empty" : "tensor_cores",
                "\", \"vec\": ", config.aligned_x ? 8 : 1,
                ", \"factor_aligned\": ", config.aligned_factor ? "true" : "false",
                ", \"threads\": ", kLoraThreads, ", \"blocks\": ", config.blocks(),
                ", \"rows_of_stage\": ", config.rows_of_stage,
                ", \"columns_of_stage\": ", config.columns_of_stage,
                ", \"chunks\": ", config.chunks, ", \"splits\": ", config.splits,
                ", \"shared_bytes\": ", config.shared_bytes,
                ", \"workspace\": ", config.workspace_size);
}

namespace {

// --- t

class DownCall : public LoraCall {
 public:
  DownCall(const Tensor& x, const Tensor& factor, const OptionalTensor& seed, double scale,
           double dropout_p)
      : LoraCall("lora_down", x, seed, dropout_p) {
    check_half();
    View view(factor);
    check_device("factor", view);
    const DType dtype = dtype_of(view).value_or(DType::kFloat64);
    if (dtype != rows.dtype() && dtype != DType::kFloat32)
      fail(op, ": factor must have the dtype of x, or float32");
    if (view.dim != 2 || view.sizes[1] != rows.columns())
      fail(op, ": factor must have shape (r, ", rows.columns(), "); got ", shape_of(view));
    check_rank(view.sizes[0]);
    // Of one rank, or of one column, the stride says nothing.
    auto has_neighbours = [&](int d) { return view.sizes[d] <= 1 || view.strides[d] == 1; };
    if (!has_neighbours(0) && !has_neighbours(1))
      view = View(factor_copy_.emplace(torch::stable::contiguous(factor)));
    params = parameters<LoraDownParams>(scale);
    params.factor_dtype = dtype;
    params.rank = static_cast<int>(view.sizes[0]);
    params.factor = view.data;
    params.rank_is_inner = !has_neighbours(1);
    params.factor_stride = stride_of(view, params.rank_is_inner ? 1 : 0);
  }

  Tensor allocate_t() {
    Tensor t = allocate(params.rows, lora_pitch(params.rank), params.dtype);
    params.t = View(t).data;
    return t;
  }

  LoraDownParams params;

 private:
  // Of one row the stride would only look unaligned.
  static int64_t stride_of(const View& view, int d) {
    return view.sizes[d] > 1 ? view.strides[d] : 0;
  }

  OptionalTensor factor_copy_;
};

Tensor lora_down(const Tensor& x, const Tensor& factor, OptionalTensor seed, double scale,
                 double dropout_p) {
  DownCall call(x, factor, seed, scale, dropout_p);
  Tensor t = call.allocate_t();
  if (call.params.rows == 0) return t;
  const int32_t device = call.rows.device_index();
  DeviceScope scope(device);
  const LoraConfig config =
      choose_lora_down_config(call.params, device_traits<lora_device_traits>(device));
  call.rows.print(config);
  const Tensor workspace = call.rows.allocate_workspace(config.workspace_size);
  throw_on_error(
      launch_lora_down(call.params, config, View(workspace).data, current_stream(device)), call.op);
  return t;
}

// What lora_down would launch, as JSON. The operands may be CPU tensors, which stand for CUDA
// tensors of that layout.
std::string lora_down_plan(const Tensor& x, const Tensor& factor, OptionalTensor seed, double scale,
                           double dropout_p, int64_t num_sms) {
  const DeviceTraits device = planned_device<lora_device_traits>(num_sms);
  DownCall call(x, factor, seed, scale, dropout_p);
  return call.rows.describe(choose_lora_down_config(call.params, device));
}

// --- Gradients of the factors

class UpCall : public LoraCall {
 public:
  UpCall(const Tensor& t, const Tensor& x, const OptionalTensor& seed, int64_t rank,
         double dropout_p, bool transposed, bool in_float32)
      : LoraCall("lora_up", x, seed, dropout_p) {
    check_half();
    check_rank(rank);
    const View view(t);
    check_device("t", view);
    params = parameters<LoraUpParams>(1);
    params.rank = static_cast<int>(rank);
    const int64_t pitch = lora_pitch(params.rank);
    if (dtype_of(view) != params.dtype) fail(op, ": t must have the dtype of x");
    if (view.dim != 2 || view.sizes[0] != params.rows || view.sizes[1] != pitch)
      fail(op, ": t must have shape (", params.rows, ", ", pitch, "); got ", shape_of(view));
    params.t = view.data;
    if (!view.is_contiguous() || !is_aligned(view.data)) {
      t_copy_ = allocate(params.rows, pitch, params.dtype);
      torch::stable::copy_(*t_copy_, t);
      params.t = View(*t_copy_).data;
    }
    params.transposed = transposed;
    params.output_dtype = in_float32 ? DType::kFloat32 : params.dtype;
  }

  Tensor allocate_output() {
    Tensor output = params.transposed ? allocate(params.columns, params.rank, params.output_dtype)
                                      : allocate(params.rank, params.columns, params.output_dtype);
    params.output = View(output).data;
    return output;
  }

  LoraUpParams params;

 private:
  OptionalTensor t_copy_;
};

Tensor lora_up(const Tensor& t, const Tensor& x, OptionalTensor seed, int64_t rank,
               double dropout_p, bool transposed, bool in_float32) {
  UpCall call(t, x, seed, rank, dropout_p, transposed, in_float32);
  Tensor output = call.allocate_output();
  // No rows are no empty case: the sums over them are written, too.
  if (call.params.columns == 0) return output;
  const int32_t device = call.rows.device_index();
  DeviceScope scope(device);
  const LoraConfig config =
      choose_lora_up_config(call.params, device_traits<lora_device_traits>(device));
  call.rows.print(config);
  const Tensor workspace = call.rows.allocate_workspace(config.workspace_size);
  throw_on_error(launch_lora_up(call.params, config, View(workspace).data, current_stream(device)),
                 call.op);
  return output;
}

// See lora_down_plan.
std::string lora_up_plan(const Tensor& t, const Tensor& x, OptionalTensor seed, int64_t rank,
                         double dropout_p, bool transposed, bool in_float32, int64_t num_sms) {
  const DeviceTraits device = planned_device<lora_device_traits>(num_sms);
  UpCall call(t, x, seed, rank, dropout_p, transposed, in_float32);
  return call.rows.describe(choose_lora_up_config(call.params, device));
}

// --- Dropout

Tensor lora_dropout(const Tensor& x, const Tensor& seed, double dropout_p) {
  LoraCall call("lora_dropout", x, seed, dropout_p);
  auto params = call.parameters<LoraDropoutParams>(1);
  Tensor output = call.allocate(params.rows, params.columns, params.dtype);
  params.output = View(output).data;
  const int32_t device = call.rows.device_index();
  DeviceScope scope(device);
  throw_on_error(launch_lora_dropout(params, device_traits<lora_device_traits>(device),
                                     current_stream(device)),
                 call.op);
  return output;
}

// --- The branch's part of a gradient, with dropout

class BranchCall : public LoraCall {
 public:
  BranchCall(const Tensor& t, const Tensor& factor, const Tensor& seed, double dropout_p)
      : LoraCall("lora_branch", t, seed, dropout_p) {
    check_half();
    const View view(factor);
    check_device("factor", view);
    if (dtype_of(view) != rows.dtype()) fail(op, ": factor must have the dtype of t");
    if (view.dim != 2 || view.sizes[0] != rows.columns())
      fail(op, ": factor must have shape (", rows.columns(), ", K); got ", shape_of(view));
    const auto given = parameters<LoraDropoutParams>(1);
    params.dtype = given.dtype;
    params.scale = static_cast<float>(given.scale);
    params.dropout = given.dropout;
    params.rows.m = given.rows;
    params.rows.n = view.sizes[1];
    params.rows.k = given.columns;
    params.rows.a = given.x.data;
    params.rows.b = {view.data, view.sizes[0] > 1 ? view.strides[0] : view.sizes[1], false};
    params.rows.output = {nullptr, params.rows.n};
    reads_arrays_ = (view.sizes[1] <= 1 || view.strides[1] == 1) &&
                    (given.rows <= 1 || given.x.stride == given.columns);
  }

  // (A generator that drops everything would need a bit more.)
  bool has_kernel() const {
    return reads_arrays_ && params.dropout.threshold < 1 << 16 &&
           narrow_can_run(params.rows, params.dtype);
  }

  void choose(const DeviceTraits& device) {
    params.rows.config =
        choose_narrow_config(params.rows.m, params.rows.n, device.num_sms, kLoraBranchBlocksOfSm);
  }

  std::string plan() const {
    return concat("{\"path\": \"lora_branch_kernel\", \"threads\": ", kNarrowThreads,
                  ", \"blocks\": ", params.rows.config.blocks(), "}");
  }

  LoraBranchParams params;

 private:
  bool reads_arrays_;
};

// [dropout(t @ factor)], or nothing where there is no kernel.
std::vector<Tensor> lora_branch(const Tensor& t, const Tensor& factor, const Tensor& seed,
                                double dropout_p) {
  BranchCall call(t, factor, seed, dropout_p);
  if (!call.has_kernel()) return {};
  Tensor output = call.allocate(call.params.rows.m, call.params.rows.n, call.params.dtype);
  call.params.rows.output.data = View(output).data;
  const int32_t device = call.rows.device_index();
  DeviceScope scope(device);
  const DeviceTraits& traits = device_traits<lora_device_traits>(device);
  call.choose(traits);
  print_config([&] { return call.plan(); });
  throw_on_error(launch_lora_branch(call.params, traits.dependent_launch, current_stream(device)),
                 call.op);
  return {output};
}

// What lora_branch would launch, or "" where there is no kernel; see lora_down_plan.
std::string lora_branch_plan(const Tensor& t, const Tensor& factor, const Tensor& seed,
                             double dropout_p, int64_t num_sms) {
  BranchCall call(t, factor, seed, dropout_p);
  if (!call.has_kernel()) return "";
  call.choose(planned_device<lora_device_traits>(num_sms));
  return call.plan();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("lora_down", TORCH_BOX(&lora_down));
  m.impl("lora_up", TORCH_BOX(&lora_up));
  m.impl("lora_dropout", TORCH_BOX(&lora_dropout));
  m.impl("lora_branch", TORCH_BOX(&lora_branch));
  m.impl("lora_pass", TORCH_BOX(&lora_pass));
  m.impl("lora_product", TORCH_BOX(&lora_product));
  m.impl("lora_decode", TORCH_BOX(&lora_decode));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("lora_down_plan", TORCH_BOX(&lora_down_plan));
  m.impl("lora_up_plan", TORCH_BOX(&lora_up_plan));
  m.impl("lora_branch_plan", TORCH_BOX(&lora_branch_plan));
  m.impl("lora_pass_plan", TORCH_BOX(&lora_pass_plan));
  m.impl("lora_product_plan", TORCH_BOX(&lora_product_plan));
  m.impl("lora_decode_plan", TORCH_BOX(&lora_decode_plan));
}

}  // namespace fusedcuda
