// A linear layer with its adapter in one launch for torch: checks, allocation, launch. Schemas and
// references are in fusedcuda/ops/lora.py.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "../kernels/lora.h"
#include "../kernels/lora_product_config.h"
#include "shim.h"

namespace fusedcuda {

struct LoraProductArguments {
  const Tensor& x;                    // (M, K)
  const Tensor& weight;               // (N, K), stored by rows or by columns
  const std::optional<Tensor>& bias;  // (N,)
  const Tensor& down;                 // (r, K)
  const Tensor& up;                   // (N, r rounded up to 8), stored as the weight
  double scale;
};

// That the elements of a row lie side by side and rows start at multiples of 16 bytes is what the
// kernel wants; where they do not there is none.
class LoraProduct {
 public:
  explicit LoraProduct(const LoraProductArguments& a) : x_(a.x) {
    if (x_.dim != 2) fail(kOp, ": x must be a matrix (M, K); got shape ", shape_of(x_));
    const std::optional<DType> dtype = dtype_of(x_);
    if (!dtype) fail(kOp, ": x must be a float64, float32, float16 or bfloat16 tensor");
    LinearActParams& linear = params_.linear;
    linear.dtype = *dtype;
    linear.m = x_.sizes[0];
    linear.k = x_.sizes[1];
    const View weight(a.weight), down(a.down), up(a.up);
    linear.n = weight.dim == 2 ? weight.sizes[0] : 0;
    params_.rank = static_cast<int>(down.dim == 2 ? down.sizes[0] : 0);
    linear.extra_k = lora_pitch(params_.rank);
    linear.a = factor_of("x", x_, linear.m, linear.k, true);
    // Of a single column both are true.
    const bool by_rows = weight.dim != 2 || weight.sizes[1] == 1 || weight.strides[1] == 1;
    linear.b = factor_of("weight", weight, linear.n, linear.k, by_rows);
    params_.down = factor_of("down", down, params_.rank, linear.k, true);
    linear.extra_b = factor_of("up", up, linear.n, linear.extra_k, by_rows);
    params_.scale = static_cast<float>(a.scale);
    linear.extra_a = {kSomewhere, linear.extra_k, true};
    linear.output = {kSomewhere, linear.n};
    if (a.bias) set_bias(View(*a.bias));
  }

  bool has_kernel(const DeviceTraits& device) const {
    return rows_can_be_read_ && lora_product_can_run(params_, device);
  }

  // [y, t], or nothing where there is no kernel.
  std::vector<Tensor> run() {
    const DeviceScope scope(x_.device_index);
    const DeviceTraits& device = device_traits<lora_product_device_traits>(x_.device_index);
    if (!has_kernel(device)) return {};
    LinearActParams& linear = params_.linear;
    std::vector<Tensor> outputs = {allocate(linear.n), allocate(linear.extra_k)};
    linear.output.data = View(outputs[0]).data;
    linear.extra_a.data = View(outputs[1]).data;
    const int64_t bytes = lora_product_counters(linear.m) * static_cast<int64_t>(sizeof(unsigned));
    const Tensor counters =
        empty_contiguous(&bytes, 1, aoti_torch_dtype_uint8(), x_.device_type, x_.device_index);
    params_.counters = static_cast<unsigned*>(View(counters).data);
    const cudaStream_t stream = current_stream(x_.device_index);
    throw_on_error(cudaMemsetAsync(params_.counters, 0, static_cast<size_t>(bytes), stream), kOp);
    static const bool prints = environment_flag("FUSEDCUDA_PRINT_CONFIG");
    if (prints) std::fprintf(stderr, "fusedcuda: %s\n", plan(device).c_str());
    const GemmConfig config = choose_lora_product_config(params_, device);
    throw_on_error(launch_lora_product(params_, config, stream), kOp);
    return outputs;
  }

  // What run() launches, as JSON.
  std::string plan(const DeviceTraits& device) const {
    const GemmConfig config = choose_lora_product_config(params_, device);
    const LinearActParams& linear = params_.linear;
    return concat("{\"op\": \"", kOp, "\", \"m\": ", linear.m, ", \"n\": ", linear.n,
                  ", \"k\": ", linear.k, ", \"rank\": ", params_.rank,
                  ", \"kernel\": \"lora_product_kernel_sm90\", \"tile_rows\": ", config.tile_rows,
                  ", \"tile_columns\": ", config.tile_columns, ", \"cluster\": ", config.cluster,
                  ", \"group\": ", config.group, ", \"blocks\": ", config.blocks, "}");
  }

 private:
  static constexpr const char* kOp = "lora_product";
  // Stands for what is not allocated yet.
  static inline void* const kSomewhere = reinterpret_cast<void*>(uintptr_t{1} << 20);

  static std::string shape_of(const View& view) { return shape_string(view.sizes, view.dim); }

  void check(const char* name, const View& view) const {
    if (view.device_type != x_.device_type || view.device_index != x_.device_index)
      fail(kOp, ": ", name, " is on another device than x");
    if (view.dtype != x_.dtype) fail(kOp, ": ", name, " must have the dtype of x");
  }

  GemmFactor factor_of(const char* name, const View& view, int64_t rows, int64_t columns,
                       bool by_rows) {
    check(name, view);
    if (view.dim != 2 || view.sizes[0] != rows || view.sizes[1] != columns)
      fail(kOp, ": ", name, " must have shape (", rows, ", ", columns, "); got ", shape_of(view));
    const int inner = by_rows ? 1 : 0, outer = 1 - inner;
    // The next line of a single one is nobody's: it may be anywhere.
    const int64_t stride =
        view.sizes[outer] > 1 ? view.strides[outer] : ceil_div(view.sizes[inner], 8) * 8;
    rows_can_be_read_ &=
        (view.sizes[inner] <= 1 || view.strides[inner] == 1) && stride >= view.sizes[inner];
    return {view.data, stride, by_rows};
  }

  void set_bias(const View& view) {
    check("bias", view);
    if (view.dim != 1 || view.sizes[0] != params_.linear.n)
      fail(kOp, ": bias must have shape (", params_.linear.n, ",); got ", shape_of(view));
    rows_can_be_read_ &= view.is_contiguous();
    params_.linear.bias = view.data;
  }

  Tensor allocate(int64_t columns) const {
    const int64_t sizes[2] = {params_.linear.m, columns};
    return empty_contiguous(sizes, 2, x_.dtype, x_.device_type, x_.device_index);
  }

  View x_;
  LoraProductParams params_;
  bool rows_can_be_read_ = true;
};

inline std::vector<Tensor> lora_product(const Tensor& x, const Tensor& weight,
                                        std::optional<Tensor> bias, const Tensor& down,
                                        const Tensor& up, double scale) {
  return LoraProduct({x, weight, bias, down, up, scale}).run();
}

// What lora_product would launch, or "" where there is no kernel. The operands may be CPU tensors,
// which stand for CUDA tensors of that layout.
inline std::string lora_product_plan(const Tensor& x, const Tensor& weight,
                                     std::optional<Tensor> bias, const Tensor& down,
                                     const Tensor& up, double scale, int64_t num_sms) {
  const LoraProduct product({x, weight, bias, down, up, scale});
  const DeviceTraits device = planned_device<lora_product_device_traits>(num_sms);
  return product.has_kernel(device) ? product.plan(device) : "";
}

}  // namespace fusedcuda
