// One pass over x for torch, of what has a kernel for that. Schema and reference are in
// fusedcuda/ops/lora.py.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../kernels/lora_pass_config.h"
#include "lora_call.h"

namespace fusedcuda {

struct LoraPassArguments {
  const Tensor& x;               // (M, K)
  const OptionalTensor& factor;  // (r, K), or with t (r rounded up to 8, K) by columns
  const OptionalTensor& t;       // (M, r rounded up to 8)
  const OptionalTensor& seed;
  int64_t rank;
  double scale, dropout_p;
  bool transposed, in_float32;
};

class LoraPass : LoraCall {
 public:
  explicit LoraPass(const LoraPassArguments& a) : LoraCall("lora_pass", a.x, a.seed, a.dropout_p) {
    check_half();
    check_rank(a.rank);
    if (!a.factor && !a.t) fail(op, ": factor or t must be given");
    const auto given = parameters<LoraDropoutParams>(1);
    params_.dtype = given.dtype;
    params_.rows = given.rows;
    params_.columns = given.columns;
    params_.x = given.x;
    params_.dropout = given.dropout;
    params_.rank = static_cast<int>(a.rank);
    params_.down_scale = static_cast<float>(a.scale * given.scale);
    params_.up_scale = static_cast<float>(given.scale);
    params_.up_dtype = a.in_float32 ? DType::kFloat32 : params_.dtype;
    params_.transposed = a.transposed;
    params_.x.stride = stride_of(given.rows, given.x.stride, given.columns);
    can_read_ = !(a.factor && a.t && a.seed) && params_.x.stride >= given.columns;
    const int pitch = lora_pitch(params_.rank);
    if (a.factor) {
      const View view(*a.factor);
      check("factor", view, a.t ? pitch : a.rank, params_.columns);
      const int outer = a.t ? 1 : 0, inner = 1 - outer;
      params_.factor = view.data;
      params_.factor_stride = stride_of(view.sizes[outer], view.strides[outer], view.sizes[inner]);
      params_.down = kSomewhere;
      can_read_ &= (view.sizes[inner] <= 1 || view.strides[inner] == 1) &&
                   params_.factor_stride >= view.sizes[inner];
    }
    if (a.t) {
      const View view(*a.t);
      check("t", view, params_.rows, pitch);
      params_.t = view.data;
      params_.up = kSomewhere;
      can_read_ &= view.is_contiguous();
    }
  }

  bool has_kernel(const DeviceTraits& device) const {
    return can_read_ && lora_pass_can_run(params_, device);
  }

  // Those of [down, up] that are asked for, or nothing where there is no kernel.
  std::vector<Tensor> run() {
    const int32_t index = rows.device_index();
    const DeviceScope scope(index);
    const DeviceTraits& device = device_traits<lora_product_device_traits>(index);
    if (!has_kernel(device)) return {};
    std::vector<Tensor> outputs;
    auto add = [&](int64_t rows, int64_t columns, DType dtype) {
      return View(outputs.emplace_back(allocate(rows, columns, dtype))).data;
    };
    if (params_.down != nullptr)
      params_.down = add(params_.rows, lora_pitch(params_.rank), params_.dtype);
    if (params_.up != nullptr)
      params_.up = params_.transposed ? add(params_.columns, params_.rank, params_.up_dtype)
                                      : add(params_.rank, params_.columns, params_.up_dtype);
    const LoraPassConfig config = choose_lora_pass_config(params_, device);
    print_config([&] { return plan(device); });
    const Tensor workspace = rows.allocate_workspace(config.workspace_size());
    throw_on_error(launch_lora_pass(params_, config, View(workspace).data, current_stream(index)),
                   op);
    return outputs;
  }

  // What run() launches, as JSON.
  std::string plan(const DeviceTraits& device) const {
    const LoraPassConfig config = choose_lora_pass_config(params_, device);
    return concat(
        "{\"path\": \"lora_pass_kernel_sm90\", \"vec\": 8, \"blocks\": ", config.lines.blocks,
        ", \"tile_rows\": ", kLoraPassRows, ", \"tile_columns\": ", kLoraPassColumns,
        ", \"line_width\": ", config.width, ", \"lines\": ", config.lines.count,
        ", \"workspace\": ", config.workspace_size(), "}");
  }

 private:
  // The next line of a single one is nobody's: it may be anywhere.
  static int64_t stride_of(int64_t lines, int64_t stride, int64_t length) {
    return lines > 1 ? stride : ceil_div(length, 8) * 8;
  }

  void check(const char* name, const View& view, int64_t rows, int64_t columns) const {
    check_device(name, view);
    if (dtype_of(view) != params_.dtype) fail(op, ": ", name, " must have the dtype of x");
    if (view.dim != 2 || view.sizes[0] != rows || view.sizes[1] != columns)
      fail(op, ": ", name, " must have shape (", rows, ", ", columns, "); got ", shape_of(view));
  }

  // Not read or written: says only that there is something.
  inline static void* const kSomewhere = reinterpret_cast<void*>(uintptr_t{1} << 12);

  LoraPassParams params_;
  bool can_read_ = false;
};

inline std::vector<Tensor> lora_pass(const Tensor& x, OptionalTensor factor, OptionalTensor t,
                                     OptionalTensor seed, int64_t rank, double scale,
                                     double dropout_p, bool transposed, bool in_float32) {
  return LoraPass({x, factor, t, seed, rank, scale, dropout_p, transposed, in_float32}).run();
}

// What lora_pass would launch, or "" where there is no kernel. The operands may be CPU tensors,
// which stand for CUDA tensors of that layout.
inline std::string lora_pass_plan(const Tensor& x, OptionalTensor factor, OptionalTensor t,
                                  OptionalTensor seed, int64_t rank, double scale, double dropout_p,
                                  bool transposed, bool in_float32, int64_t num_sms) {
  const LoraPass pass({x, factor, t, seed, rank, scale, dropout_p, transposed, in_float32});
  const DeviceTraits device = planned_device<lora_product_device_traits>(num_sms);
  return pass.has_kernel(device) ? pass.plan(device) : "";
}

}  // namespace fusedcuda
