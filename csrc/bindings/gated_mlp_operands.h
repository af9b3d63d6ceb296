// The operands of a gated MLP of few rows for torch: checks, allocation.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "../kernels/gated_mlp_decode.h"
#include "shim.h"

namespace fusedcuda {

class GatedMlpOperands {
 public:
  GatedMlpOperands(const char* op, const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                   const Tensor& w_down, int64_t activation)
      : op_(op), x_(x) {
    const View gate(w_gate), up(w_up), down(w_down);
    if (x_.dim != 2) fail(op_, ": x must be a matrix (M, K); got shape ", shape_of(x_));
    if (activation < 0 || activation >= kNumActivations)
      fail(op_, ": activation must be a code from 0 to ", kNumActivations - 1, "; got ",
           activation);
    const std::optional<DType> dtype = dtype_of(x_);
    if (!dtype) fail(op_, ": x must be a float64, float32, float16 or bfloat16 tensor");
    if (gate.dim != 2) fail(op_, ": w_gate must be a matrix (F, K); got shape ", shape_of(gate));
    if (down.dim != 2) fail(op_, ": w_down must be a matrix (N, F); got shape ", shape_of(down));
    const int64_t m = x_.sizes[0], k = x_.sizes[1], f = gate.sizes[0], n = down.sizes[0];
    params_.dtype = *dtype;
    params_.activation = static_cast<Activation>(activation);
    params_.x = matrix("x", x_, m, k);
    params_.w_gate = matrix("w_gate", gate, f, k);
    params_.w_up = matrix("w_up", up, f, k);
    params_.w_down = matrix("w_down", down, n, f);
    fits_ &= std::max({m, k, f, n}) <= std::numeric_limits<int>::max() / 2;
    if (!fits_) return;
    params_.m = static_cast<int>(m);
    params_.k = static_cast<int>(k);
    params_.f = static_cast<int>(f);
    params_.n = static_cast<int>(n);
  }

 protected:
  bool fits() const { return fits_; }
  int32_t device_index() const { return x_.device_index; }

  // [y], and h, which the parameters then write.
  std::vector<Tensor> allocate_outputs(Tensor* h) {
    std::vector<Tensor> outputs = {allocate(params_.m, params_.n, x_.dtype)};
    *h = allocate(params_.m, params_.f, x_.dtype);
    params_.h = View(*h).data;
    params_.y = View(outputs[0]).data;
    return outputs;
  }

  std::string json_members() const {
    return concat("\"op\": \"", op_, "\", \"m\": ", params_.m, ", \"k\": ", params_.k,
                  ", \"f\": ", params_.f, ", \"n\": ", params_.n);
  }

  Tensor allocate(int64_t rows, int64_t columns, int32_t dtype) const {
    const int64_t sizes[2] = {rows, columns};
    return empty_contiguous(sizes, 2, dtype, x_.device_type, x_.device_index);
  }

  const char* const op_;
  GatedMlpDecodeParams params_;

 private:
  static std::string shape_of(const View& view) { return shape_string(view.sizes, view.dim); }

  // That the elements of a row lie side by side is what the kernel wants, and no error where they
  // do not.
  GemmMatrix matrix(const char* name, const View& view, int64_t rows, int64_t columns) {
    if (view.device_type != x_.device_type || view.device_index != x_.device_index)
      fail(op_, ": ", name, " is on another device than x");
    if (view.dtype != x_.dtype) fail(op_, ": ", name, " must have the dtype of x");
    if (view.dim != 2 || view.sizes[0] != rows || view.sizes[1] != columns)
      fail(op_, ": ", name, " must have shape (", rows, ", ", columns, "); got ", shape_of(view));
    // The next row of a single one is nobody's: it may be anywhere.
    const int64_t stride = rows > 1 ? view.strides[0] : ceil_div(columns, 8) * 8;
    fits_ &= (columns == 1 || view.strides[1] == 1) && stride >= columns;
    return {view.data, stride};
  }

  View x_;
  bool fits_ = true;
};

}  // namespace fusedcuda
