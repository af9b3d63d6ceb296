// The product of a gated MLP for torch: checks, allocation, launch. Schemas and references are in
// fusedcuda/ops/gated_mlp.py, where the layer is put together of this and of other products. The
// layer of few rows is in gated_mlp_decode.h.
#include "../kernels/gated_mlp.h"

#include <algorithm>
#include <string>
#include <vector>

#include "../kernels/gated_mlp_config.h"
#include "gated_mlp_decode.h"
#include "shim.h"

namespace fusedcuda {
namespace {

// x (M, K), w_gate and w_up (F, K). That the elements of a row lie side by side and rows start at
// multiples of 16 bytes is what the kernel wants; where they do not there is none.
class GatedProduct {
 public:
  GatedProduct(const Tensor& x, const Tensor& w_gate, const Tensor& w_up, int64_t activation)
      : x_(x) {
    if (x_.dim != 2) fail(kOp, ": x must be a matrix (M, K); got shape ", shape_of(x_));
    if (activation < 0 || activation >= kNumActivations)
      fail(kOp, ": activation must be a code from 0 to ", kNumActivations - 1, "; got ",
           activation);
    const std::optional<DType> dtype = dtype_of(x_);
    if (!dtype) fail(kOp, ": x must be a float64, float32, float16 or bfloat16 tensor");
    params_.dtype = *dtype;
    params_.activation = static_cast<Activation>(activation);
    params_.m = x_.sizes[0];
    params_.k = x_.sizes[1];
    const View gate(w_gate), up(w_up);
    params_.f = gate.dim == 2 ? gate.sizes[0] : 0;
    params_.h.stride = params_.f;
    params_.x = rows_of("x", x_, params_.m);
    params_.w_gate = rows_of("w_gate", gate, params_.f);
    params_.w_up = rows_of("w_up", up, params_.f);
  }

  bool has_kernel(const DeviceTraits& device) const {
    return rows_can_be_read_ && gated_product_can_run(params_, device);
  }

  // [h], or with `saves` [h, gate_up].
  std::vector<Tensor> run(bool saves) {
    const DeviceScope scope(x_.device_index);
    const DeviceTraits& device = device_traits<gated_mlp_device_traits>(x_.device_index);
    if (!has_kernel(device)) return {};
    std::vector<Tensor> outputs;
    params_.h.data = View(outputs.emplace_back(allocate(params_.f))).data;
    if (saves) params_.gate_up = View(outputs.emplace_back(allocate(2 * params_.f))).data;
    print_config([&] { return plan(device, saves); });
    throw_on_error(launch_gated_product(params_, choose_gated_product_config(params_, device),
                                        current_stream(x_.device_index)),
                   kOp);
    return outputs;
  }

  // What run() launches, as JSON.
  std::string plan(const DeviceTraits& device, bool saves) const {
    const GemmConfig config = choose_gated_product_config(params_, device);
    return concat("{\"op\": \"", kOp, "\", \"m\": ", params_.m, ", \"f\": ", params_.f,
                  ", \"k\": ", params_.k, ", \"kernel\": \"gated_product_kernel_sm90\"",
                  ", \"saves\": ", saves ? "true" : "false", ", \"tile_rows\": ", config.tile_rows,
                  ", \"tile_columns\": ", config.tile_columns, ", \"cluster\": ", config.cluster,
                  ", \"group\": ", config.group, ", \"blocks\": ", config.blocks, "}");
  }

 private:
  static constexpr const char* kOp = "gated_product";

  static std::string shape_of(const View& view) { return shape_string(view.sizes, view.dim); }

  // A matrix (rows, K) like x.
  GemmMatrix rows_of(const char* name, const View& view, int64_t rows) {
    if (view.device_type != x_.device_type || view.device_index != x_.device_index)
      fail(kOp, ": ", name, " is on another device than x");
    if (view.dtype != x_.dtype) fail(kOp, ": ", name, " must have the dtype of x");
    if (view.dim != 2 || view.sizes[0] != rows || view.sizes[1] != params_.k)
      fail(kOp, ": ", name, " must have shape (", rows > 0 ? text(rows) : "F", ", ", params_.k,
           "); got ", shape_of(view));
    // The next row of a single one is nobody's: it may be anywhere.
    const int64_t stride = rows > 1 ? view.strides[0] : ceil_div(params_.k, 8) * 8;
    rows_can_be_read_ &= (params_.k == 1 || view.strides[1] == 1) && stride >= params_.k;
    return {view.data, stride};
  }

  Tensor allocate(int64_t columns) const {
    const int64_t sizes[2] = {params_.m, columns};
    return empty_contiguous(sizes, 2, x_.dtype, x_.device_type, x_.device_index);
  }

  View x_;
  GatedProductParams params_;
  bool rows_can_be_read_ = true;
};

std::vector<Tensor> gated_product(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                                  int64_t activation, bool saves) {
  return GatedProduct(x, w_gate, w_up, activation).run(saves);
}

// What gated_product would launch, or "" where there is no kernel. The operands may be CPU tensors,
// which stand for CUDA tensors of that layout.
std::string gated_product_plan(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                               int64_t activation, bool saves, int64_t num_sms) {
  const GatedProduct product(x, w_gate, w_up, activation);
  const DeviceTraits device = planned_device<gated_mlp_device_traits>(num_sms);
  return product.has_kernel(device) ? product.plan(device, saves) : "";
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("gated_product", TORCH_BOX(&gated_product));
  m.impl("gated_mlp_decode", TORCH_BOX(&gated_mlp_decode));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("gated_product_plan", TORCH_BOX(&gated_product_plan));
  m.impl("gated_mlp_decode_plan", TORCH_BOX(&gated_mlp_decode_plan));
}

}  // namespace fusedcuda
