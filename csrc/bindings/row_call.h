// One call of an operator that reduces over the last dimension: checks of its arguments, and rows,
// values of rows and vectors as the kernels take them.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "../kernels/common/row.h"
#include "copies.h"
#include "shim.h"

namespace fusedcuda {

// A tensor with one value a column, in the rows' dtype or float32.
struct RowVector {
  void* data = nullptr;
  bool is_float32 = false;
};

// Whether the columns are neighbours in memory and one stride leads from each row to the next.
inline bool has_one_row_stride(const View& view, int64_t* stride) {
  const int64_t columns = view.sizes[view.dim - 1];
  if (columns > 1 && view.strides[view.dim - 1] != 1) return false;
  *stride = columns;
  int64_t rows = 1;
  for (int64_t d = view.dim - 2; d >= 0; --d) {
    if (view.sizes[d] == 1) continue;
    if (rows == 1) {
      *stride = view.strides[d];
    } else if (view.strides[d] != *stride * rows) {
      return false;
    }
    rows *= view.sizes[d];
  }
  return true;
}

// A configuration as members of a JSON object. Families whose configuration has more to it say that
// in an overload.
inline std::string json_members(const RowConfig& config) {
  return concat("\"path\": \"", name_of(config.path),
                "\", \"aligned\": ", config.aligned ? "true" : "false", ", \"vec\": ", config.vec,
                ", \"items\": ", config.items, ", \"threads_per_row\": ", config.threads_per_row,
                ", \"rows_per_block\": ", config.rows_per_block, ", \"cluster\": ", config.cluster,
                ", \"blocks\": ", config.blocks);
}

// The first argument gives shape, dtype and device; the others have to fit it. Copies that had to
// be made live as long as the call.
class RowCall {
 public:
  RowCall(const char* op, const char* name, const Tensor& tensor)
      : op_(op), name_(name), tensor_(tensor), view_(tensor) {
    const std::optional<DType> dtype = dtype_of(view_);
    if (!dtype) fail_dtype(name);
    dtype_ = *dtype;
    if (view_.dim == 0) fail(op, ": ", name, " must have at least one dimension; got a 0-d tensor");
    for (int64_t d = 0; d < view_.dim - 1; ++d) rows_ *= view_.sizes[d];
    const int64_t columns = view_.sizes[view_.dim - 1];
    if (columns > std::numeric_limits<int>::max())
      fail(op, ": the last dimension of ", name, " must be below 2^31; got ", columns);
    columns_ = static_cast<int>(columns);
  }

  int64_t rows() const { return rows_; }
  int columns() const { return columns_; }
  DType dtype() const { return dtype_; }
  DType compute_dtype() const {
    return dtype_ == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }
  int32_t device_index() const { return view_.device_index; }
  bool is_empty() const { return rows_ == 0 || columns_ == 0; }

  // The parameters of a launch, with what all families call by the same names.
  template <typename Params>
  Params parameters() const {
    Params params;
    params.dtype = dtype_;
    params.rows = rows_;
    params.columns = columns_;
    return params;
  }

  // --- What is read

  RowMatrix first() { return matrix(name_, tensor_, view_); }

  // An argument of the first one's shape, dtype and device.
  RowMatrix like_first(const char* name, const Tensor& tensor) {
    const View view(tensor);
    check_device(name, view);
    if (view.dtype != view_.dtype) fail(op_, ": ", name, " must have the dtype of ", name_);
    if (!has_shape(view, view_.dim)) fail_shape(name, view, view_.dim);
    return matrix(name, tensor, view);
  }

  // One value a row, in what is computed in.
  const void* values(const char* name, const Tensor& tensor) {
    const View view = check_values(name, tensor);
    return view.is_contiguous() ? view.data
                                : copies_.keep(name, torch::stable::contiguous(tensor)).data;
  }

  View check_values(const char* name, const Tensor& tensor) const {
    const View view(tensor);
    check_device(name, view);
    if (view.dtype != torch_dtype(compute_dtype())) {
      fail(op_, ": ", name, " must be a ", dtype_ == DType::kFloat64 ? "float64" : "float32",
           " tensor");
    }
    if (!has_shape(view, view_.dim - 1)) fail_shape(name, view, view_.dim - 1);
    return view;
  }

  View check_vector(const char* name, const Tensor& tensor) const {
    const View view(tensor);
    check_device(name, view);
    if (!dtype_of(view)) fail_dtype(name);
    if (view.dim != 1 || view.sizes[0] != columns_) {
      fail(op_, ": ", name, " must have shape (", columns_, ",), the last dimension of ", name_,
           "; got ", shape_string(view.sizes, view.dim));
    }
    return view;
  }

  // One value a column. A dtype that the kernels do not read is converted to what is computed in.
  RowVector vector(const char* name, const Tensor& tensor) {
    const View view = check_vector(name, tensor);
    const DType kept = vector_dtype(view);
    return {vector_in(kept, name, tensor, view), kept == DType::kFloat32};
  }

  // One value a column, in what is computed in.
  const void* computed_vector(const char* name, const Tensor& tensor) {
    const View view = check_vector(name, tensor);
    return vector_in(compute_dtype(), name, tensor, view);
  }

  // --- What is written: contiguous

  Tensor allocate_rows() const { return allocate(view_.dim, view_.dtype); }
  Tensor allocate_values() const { return allocate(view_.dim - 1, torch_dtype(compute_dtype())); }
  Tensor allocate_scalar() const { return allocate(0, torch_dtype(compute_dtype())); }
  // The gradient of `vector`, in the dtype in which vector() hands that out.
  Tensor allocate_vector(const Tensor& vector) const {
    return allocate_columns(torch_dtype(vector_dtype(View(vector))), columns_);
  }
  Tensor allocate_workspace(int64_t elements) const {
    return allocate_columns(torch_dtype(compute_dtype()), elements);
  }

  RowMatrix written(const Tensor& tensor) const { return make(View(tensor).data, columns_); }

  // What allocate_vector() gave, in the dtype of `vector`.
  static Tensor in_dtype_of(const Tensor& vector, const Tensor& gradient) {
    const std::optional<DType> dtype = dtype_of(View(vector));
    if (dtype == dtype_of(View(gradient))) return gradient;
    return torch::stable::to(gradient, scalar_type(*dtype));
  }

  // The configuration as JSON, for explain() and FUSEDCUDA_PRINT_CONFIG. "copies": the arguments
  // that had to be made contiguous or converted.
  template <typename Config>
  std::string describe(const Config& config) const {
    return concat("{\"op\": \"", op_, "\", \"rows\": ", rows_, ", \"columns\": ", columns_, ", ",
                  json_members(config), ", \"copies\": [", copies_.names(), "]}");
  }

  template <typename Config>
  void print(const Config& config) const {
    print_config([&] { return describe(config); });
  }

 private:
  static torch::headeronly::ScalarType scalar_type(DType dtype) {
    switch (dtype) {
      case DType::kBFloat16:
        return torch::headeronly::ScalarType::BFloat16;
      case DType::kFloat16:
        return torch::headeronly::ScalarType::Half;
      case DType::kFloat32:
        return torch::headeronly::ScalarType::Float;
      default:
        return torch::headeronly::ScalarType::Double;
    }
  }

  DType vector_dtype(const View& view) const {
    const DType given = *dtype_of(view);
    return given == dtype_ || given == DType::kFloat32 ? given : compute_dtype();
  }

  void* vector_in(DType dtype, const char* name, const Tensor& tensor, const View& view) {
    Tensor read = tensor;
    if (dtype != *dtype_of(view)) read = torch::stable::to(read, scalar_type(dtype));
    if (!View(read).is_contiguous()) read = torch::stable::contiguous(read);
    if (read.get() != tensor.get()) copies_.keep(name, read);
    return View(read).data;
  }

  RowMatrix make(void* data, int64_t stride) const {
    return RowMatrix::make(data, stride, rows_, columns_, size_of(dtype_));
  }

  RowMatrix matrix(const char* name, const Tensor& tensor, const View& view) {
    int64_t stride;
    if (has_one_row_stride(view, &stride)) return make(view.data, stride);
    return make(copies_.keep(name, torch::stable::contiguous(tensor)).data, columns_);
  }

  Tensor allocate(int64_t dim, int32_t dtype) const {
    return empty_contiguous(view_.sizes, dim, dtype, view_.device_type, view_.device_index);
  }
  Tensor allocate_columns(int32_t dtype, int64_t size) const {
    return empty_contiguous(&size, 1, dtype, view_.device_type, view_.device_index);
  }

  // Whether `view` has the first `dim` dimensions of the first argument.
  bool has_shape(const View& view, int64_t dim) const {
    return view.dim == dim && std::equal(view.sizes, view.sizes + dim, view_.sizes);
  }

  void check_device(const char* name, const View& view) const {
    if (view.device_type != view_.device_type || view.device_index != view_.device_index)
      fail(op_, ": ", name, " is on another device than ", name_);
  }

  [[noreturn]] void fail_dtype(const char* name) const {
    fail(op_, ": ", name, " must be a float64, float32, float16 or bfloat16 tensor");
  }

  [[noreturn]] void fail_shape(const char* name, const View& view, int64_t dim) const {
    fail(op_, ": ", name, " must have shape ", shape_string(view_.sizes, dim), "; got ",
         shape_string(view.sizes, view.dim));
  }

  const char* op_;
  const char* name_;
  const Tensor& tensor_;
  View view_;
  DType dtype_ = DType::kFloat32;
  int64_t rows_ = 1;
  int columns_ = 0;
  Copies copies_;
};

}  // namespace fusedcuda
