// One call of a linear operator: checks of its arguments, and matrices and factors as the steps
// take them.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "copies.h"
#include "linear_act_steps.h"
#include "shim.h"

namespace fusedcuda {

using OptionalTensor = std::optional<Tensor>;

inline Activation activation_of(const char* op, int64_t code) {
  if (code < 0 || code >= kNumActivations)
    fail(op, ": activation must be a code from 0 to ", kNumActivations - 1, "; got ", code);
  return static_cast<Activation>(code);
}

// The dimensions from `first` to before `last` as one: their number of elements, and the stride
// from each to the next, if there is one.
inline bool merge_dimensions(const View& view, int64_t first, int64_t last, int64_t* count,
                             int64_t* stride) {
  *count = 1;
  *stride = 0;
  for (int64_t d = last - 1; d >= first; --d) {
    if (view.sizes[d] == 1) continue;
    if (*count == 1) {
      *stride = view.strides[d];
    } else if (view.strides[d] != *stride * *count) {
      return false;
    }
    *count *= view.sizes[d];
  }
  return true;
}

// x (..., K) and weight (N, K), or (B, ..., K) and (B, N, K). What is only asked for its shape is
// not read.
class LinearCall {
 public:
  LinearCall(const char* op, const char* x_name, const Tensor& x, const char* weight_name,
             const Tensor& weight, Copies& copies, bool eight_bits = false)
      : op_(op),
        x_name_(x_name),
        weight_name_(weight_name),
        x_(x),
        weight_(weight),
        x_view_(x),
        weight_view_(weight),
        copies_(copies),
        eight_bits_(eight_bits) {
    check_operand(x_name, x_view_);
    check_operand(weight_name, weight_view_);
    const View &a = x_view_, &w = weight_view_;
    if (a.dim == 0) fail(op, ": ", x_name, " must have at least one dimension; got a 0-d tensor");
    batched_ = w.dim == 3;
    const int64_t k = a.sizes[a.dim - 1];
    if ((w.dim != 2 && !batched_) || w.sizes[w.dim - 1] != k) {
      fail(op, ": ", weight_name, " must have shape (N, ", k, ") or (B, N, ", k, ") to go with ",
           x_name, " of shape ", shape(a), "; got ", shape(w));
    }
    if (batched_ && (a.dim < 2 || a.sizes[0] != w.sizes[0])) {
      fail(op, ": ", x_name, " must have shape (", w.sizes[0], ", ..., ", k,
           ") to go with a batch of weights of shape ", shape(w), "; got ", shape(a));
    }
    layer_.dtype = dtype_of(a).value_or(DType::kBFloat16);
    layer_.batch = batched_ ? w.sizes[0] : 1;
    layer_.n = w.sizes[w.dim - 2];
    layer_.k = k;
    layer_.m = 1;
    for (int64_t d = batched_; d < a.dim - 1; ++d) layer_.m *= a.sizes[d];
    layer_.device = a.device_index < 0 ? 0 : a.device_index;
    output_sizes_.assign(a.sizes, a.sizes + a.dim);
    output_sizes_.back() = layer_.n;
  }

  const LinearLayer& layer() const { return layer_; }
  const View& x_view() const { return x_view_; }
  const View& weight_view() const { return weight_view_; }
  bool batched() const { return batched_; }

  // --- What is read

  LinearFactor x() { return factor(x_name_, x_, x_view_); }
  LinearFactor weight() { return factor(weight_name_, weight_, weight_view_); }

  // (N,) or (B, N); the distance of the batch's goes to `batch_stride`.
  void* bias(const Tensor& tensor, int64_t* batch_stride) {
    const char* name = "bias";
    View view(tensor);
    check_device(name, view);
    if (view.dtype != (eight_bits_ ? aoti_torch_dtype_bfloat16() : x_view_.dtype))
      fail(op_, ": bias must be a tensor of ", eight_bits_ ? "bfloat16" : "the dtype of x");
    const bool one_each = batched_ && view.dim == 2;
    const bool fits = view.dim == 1 + one_each && view.sizes[view.dim - 1] == layer_.n &&
                      (!one_each || view.sizes[0] == layer_.batch);
    if (!fits) fail(op_, ": ", name, " must have shape (", layer_.n, ",); got ", shape(view));
    if (!view.is_contiguous()) view = copies_.keep(name, torch::stable::contiguous(tensor));
    *batch_stride = one_each ? layer_.n : 0;
    return view.data;
  }

  // A tensor of the output's shape.
  LinearMatrix like_output(const char* name, const Tensor& tensor) {
    const View view(tensor);
    check_like_output(name, view);
    LinearMatrix matrix;
    if (as_rows(view, batched_, &matrix.stride)) {
      matrix.data = view.data;
      matrix.batch_stride = batched_ ? view.strides[0] : 0;
      return matrix;
    }
    return contiguous_copy(name, tensor);
  }

  // The same with one stride for all rows of the batch.
  LinearMatrix rows_like_output(const char* name, const Tensor& tensor) {
    const View view(tensor);
    check_like_output(name, view);
    LinearMatrix matrix;
    if (!as_rows(view, 0, &matrix.stride)) return contiguous_copy(name, tensor);
    matrix.data = view.data;
    // The next row of a single one is nobody's: such a row may have any stride.
    if (layer_.batch * layer_.m <= 1) matrix.stride = layer_.n;
    matrix.batch_stride = layer_.m * matrix.stride;
    return matrix;
  }

  void* saved(const Tensor& tensor, SavedForBackward saves) {
    const View view(tensor);
    check_device("saved", view);
    const bool is_mask = saves == SavedForBackward::kMask;
    const int64_t sizes[2] = {layer_.batch * layer_.m, mask_row_bytes(layer_.n)};
    const bool fits = is_mask ? view.dim == 2 && std::equal(sizes, sizes + 2, view.sizes)
                              : has_output_shape(view);
    if (view.dtype != (is_mask ? aoti_torch_dtype_uint8() : x_view_.dtype) || !fits)
      fail(op_, ": saved is not what the forward saved; got a tensor of shape ", shape(view));
    if (view.is_contiguous()) return view.data;
    return copies_.keep("saved", torch::stable::contiguous(tensor)).data;
  }

  // --- What is written: contiguous

  Tensor allocate_output() const { return allocate_output(x_view_.dtype); }
  Tensor allocate_output(int32_t dtype) const {
    return allocate(output_sizes_.data(), output_sizes_.size(), dtype);
  }
  Tensor allocate_saved(SavedForBackward saves) const {
    if (saves != SavedForBackward::kMask) return allocate_output();
    const int64_t sizes[2] = {layer_.batch * layer_.m, mask_row_bytes(layer_.n)};
    return allocate(sizes, 2, aoti_torch_dtype_uint8());
  }
  Tensor allocate_dx() const { return allocate(x_view_.sizes, x_view_.dim, x_view_.dtype); }
  Tensor allocate_dweight() const {
    return allocate(weight_view_.sizes, weight_view_.dim, x_view_.dtype);
  }
  Tensor allocate_dbias() const {
    return allocate(weight_view_.sizes, weight_view_.dim - 1, x_view_.dtype);
  }
  Tensor allocate_elements(int64_t count, int32_t dtype) const {
    return allocate(&count, 1, dtype);
  }

  LinearMatrix written(const Tensor& tensor) const {
    return contiguous_matrix(View(tensor).data, layer_.m, layer_.n);
  }

 private:
  static std::string shape(const View& view) { return shape_string(view.sizes, view.dim); }

  void check_operand(const char* name, const View& view) const {
    check_device(name, view);
    if (eight_bits_) {
      if (view.dtype == aoti_torch_dtype_float8_e4m3fn()) return;
      fail(op_, ": ", name, " must be a float8_e4m3fn tensor");
    }
    if (!dtype_of(view))
      fail(op_, ": ", name, " must be a float64, float32, float16 or bfloat16 tensor");
    if (view.dtype != x_view_.dtype) fail(op_, ": ", name, " must have the dtype of ", x_name_);
  }

  void check_device(const char* name, const View& view) const {
    if (view.device_type != x_view_.device_type || view.device_index != x_view_.device_index)
      fail(op_, ": ", name, " is on another device than ", x_name_);
  }

  bool has_output_shape(const View& view) const {
    return view.dim == static_cast<int64_t>(output_sizes_.size()) &&
           std::equal(output_sizes_.begin(), output_sizes_.end(), view.sizes);
  }

  void check_like_output(const char* name, const View& view) const {
    check_operand(name, view);
    if (has_output_shape(view)) return;
    fail(op_, ": ", name, " must have shape ",
         shape_string(output_sizes_.data(), output_sizes_.size()), "; got ", shape(view));
  }

  // Whether the dimensions from `first` on are rows of neighbours, one stride apart and not on top
  // of each other.
  bool as_rows(const View& view, int64_t first, int64_t* stride) const {
    const int64_t columns = view.sizes[view.dim - 1];
    int64_t rows;
    return (columns <= 1 || view.strides[view.dim - 1] == 1) &&
           merge_dimensions(view, first, view.dim - 1, &rows, stride) &&
           (rows <= 1 || *stride >= std::max<int64_t>(columns, 1));
  }

  LinearFactor factor(const char* name, const Tensor& tensor, const View& view) {
    LinearFactor result;
    result.batch_stride = batched_ ? view.strides[0] : 0;
    result.matrix.data = view.data;
    if (as_rows(view, batched_, &result.matrix.stride)) return result;
    int64_t rows, stride;
    const int64_t of_k = view.strides[view.dim - 1];
    if (merge_dimensions(view, batched_, view.dim - 1, &rows, &stride) &&
        (rows <= 1 || stride == 1) && of_k >= std::max<int64_t>(rows, 1) && !eight_bits_) {
      result.matrix.stride = of_k;
      result.matrix.k_is_inner = false;
      return result;
    }
    const View copy = copies_.keep(name, torch::stable::contiguous(tensor));
    const int64_t k = view.sizes[view.dim - 1];
    return {{copy.data, k, true}, batched_ ? copy.strides[0] : 0};
  }

  LinearMatrix contiguous_copy(const char* name, const Tensor& tensor) {
    return contiguous_matrix(copies_.keep(name, torch::stable::contiguous(tensor)).data, layer_.m,
                             layer_.n);
  }

  Tensor allocate(const int64_t* sizes, int64_t dim, int32_t dtype) const {
    return empty_contiguous(sizes, dim, dtype, x_view_.device_type, x_view_.device_index);
  }

  const char* op_;
  const char* x_name_;
  const char* weight_name_;
  const Tensor& x_;
  const Tensor& weight_;
  View x_view_, weight_view_;
  Copies& copies_;
  const bool eight_bits_;
  LinearLayer layer_;
  bool batched_ = false;
  std::vector<int64_t> output_sizes_;
};

// Memory for a copy of a bias that is not aligned.
inline void read_bias(LinearCall& call, const OptionalTensor& bias, LinearForward* f,
                      OptionalTensor* aligned) {
  if (!bias) return;
  f->bias = call.bias(*bias, &f->bias_batch);
  if (alignment_of(f->bias) >= 16) return;
  *aligned = call.allocate_elements(f->layer.batch * f->layer.n, View(*bias).dtype);
  f->aligned_bias = View(**aligned).data;
}

}  // namespace fusedcuda
