// A linear layer with its adapter in one launch for torch, what lora_product and lora_decode have
// in common: checks, allocation. Schemas and references are in fusedcuda/ops/lora.py.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../kernels/lora.h"
#include "shim.h"

namespace fusedcuda {

struct AdaptedArguments {
  const Tensor& x;                    // (M, K)
  const Tensor& weight;               // (N, K), stored by rows or by columns
  const std::optional<Tensor>& bias;  // (N,)
  const Tensor& down;                 // (r, K)
  const Tensor& up;                   // (N, r rounded up to 8), stored as the weight
  double scale;
};

// That the elements of a row lie side by side and rows start at multiples of 16 bytes is what the
// kernels want; where they do not there is none.
class AdaptedLinear {
 public:
  AdaptedLinear(const char* op, const AdaptedArguments& a) : op_(op), x_(a.x) {
    if (x_.dim != 2) fail(op_, ": x must be a matrix (M, K); got shape ", shape_of(x_));
    const std::optional<DType> dtype = dtype_of(x_);
    if (!dtype) fail(op_, ": x must be a float64, float32, float16 or bfloat16 tensor");
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

 protected:
  bool rows_can_be_read() const { return rows_can_be_read_; }
  int32_t device_index() const { return x_.device_index; }

  // [y, t], which the parameters then write.
  std::vector<Tensor> allocate_outputs() {
    LinearActParams& linear = params_.linear;
    std::vector<Tensor> outputs = {allocate(linear.n), allocate(linear.extra_k)};
    linear.output.data = View(outputs[0]).data;
    linear.extra_a.data = View(outputs[1]).data;
    return outputs;
  }

  Tensor allocate_bytes(int64_t bytes) const {
    return empty_contiguous(&bytes, 1, aoti_torch_dtype_uint8(), x_.device_type, x_.device_index);
  }

  std::string json_members(const char* kernel) const {
    const LinearActParams& linear = params_.linear;
    return concat("\"op\": \"", op_, "\", \"m\": ", linear.m, ", \"n\": ", linear.n,
                  ", \"k\": ", linear.k, ", \"rank\": ", params_.rank, ", \"kernel\": \"", kernel,
                  "\"");
  }

  const char* const op_;
  LoraProductParams params_;

 private:
  // Stands for what is not allocated yet.
  static inline void* const kSomewhere = reinterpret_cast<void*>(uintptr_t{1} << 20);

  static std::string shape_of(const View& view) { return shape_string(view.sizes, view.dim); }

  void check(const char* name, const View& view) const {
    if (view.device_type != x_.device_type || view.device_index != x_.device_index)
      fail(op_, ": ", name, " is on another device than x");
    if (view.dtype != x_.dtype) fail(op_, ": ", name, " must have the dtype of x");
  }

  GemmFactor factor_of(const char* name, const View& view, int64_t rows, int64_t columns,
                       bool by_rows) {
    check(name, view);
    if (view.dim != 2 || view.sizes[0] != rows || view.sizes[1] != columns)
      fail(op_, ": ", name, " must have shape (", rows, ", ", columns, "); got ", shape_of(view));
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
      fail(op_, ": bias must have shape (", params_.linear.n, ",); got ", shape_of(view));
    rows_can_be_read_ &= view.is_contiguous();
    params_.linear.bias = view.data;
  }

  Tensor allocate(int64_t columns) const {
    const int64_t sizes[2] = {params_.linear.m, columns};
    return empty_contiguous(sizes, 2, x_.dtype, x_.device_type, x_.device_index);
  }

  View x_;
  bool rows_can_be_read_ = true;
};

}  // namespace fusedcuda
