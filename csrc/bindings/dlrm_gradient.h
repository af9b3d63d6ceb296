// One call of the gradient of a table: checks of its operands, the parameters that a launch takes,
// and torch's operator for what is too large.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../kernels/dlrm_gradient.h"
#include "../kernels/dlrm_gradient_config.h"
#include "copies.h"
#include "shim.h"

namespace fusedcuda {

inline const char* name_of(TableGradientPath path) {
  switch (path) {
    case TableGradientPath::kEmpty:
      return "empty";
    case TableGradientPath::kZeros:
      return "zeros";
    case TableGradientPath::kSorted:
      return "sorted";
    default:
      return "torch";
  }
}

class TableGradientCall {
 public:
  TableGradientCall(const Tensor& grad, const Tensor& indices, int64_t rows)
      : given_(grad), given_indices_(indices), grad_(grad), indices_(indices) {
    if (!dtype_of(grad_))
      fail(kOp, ": grad must be a float64, float32, float16 or bfloat16 tensor");
    const bool is_int32 = indices_.dtype == aoti_torch_dtype_int32();
    if (!is_int32 && indices_.dtype != aoti_torch_dtype_int64())
      fail(kOp, ": indices must be an int64 or int32 tensor");
    if (indices_.device_type != grad_.device_type || indices_.device_index != grad_.device_index)
      fail(kOp, ": indices is on another device than grad");
    bool matches = grad_.dim >= 2 && grad_.dim == indices_.dim + 1;
    for (int64_t d = 0; matches && d < indices_.dim; ++d)
      matches = grad_.sizes[d] == indices_.sizes[d];
    if (!matches) {
      fail(kOp, ": grad must have the shape of indices, ",
           shape_string(indices_.sizes, indices_.dim), ", and one more dimension; got ",
           shape_string(grad_.sizes, grad_.dim));
    }
    if (rows < 0) fail(kOp, ": rows must not be negative; got ", rows);
    params_.dtype = *dtype_of(grad_);
    params_.items = 1;
    for (int64_t d = 0; d < indices_.dim; ++d) params_.items *= indices_.sizes[d];
    params_.rows = rows;
    params_.columns = grad_.sizes[grad_.dim - 1];
    params_.is_int32 = is_int32;
    if (rows == 0 && params_.items > 0)
      fail(kOp, ": rows must be at least 1, a row for the indices; got 0");
  }

  TableGradientConfig choose(const DeviceTraits& device) {
    params_.grad = contiguous("grad", given_).data;
    params_.indices = contiguous("indices", given_indices_).data;
    return choose_table_gradient_config(params_, device);
  }

  Tensor run(const TableGradientConfig& config, cudaStream_t stream) {
    if (config.path == TableGradientPath::kTorch) return sum_by_torch();
    const int64_t sizes[] = {params_.rows, params_.columns};
    Tensor gradient = allocate(sizes, 2, grad_.dtype);
    params_.table_grad = View(gradient).data;
    const Tensor workspace = allocate(&config.workspace.bytes, 1, aoti_torch_dtype_uint8());
    throw_on_error(launch_table_gradient(params_, config, View(workspace).data, stream), kOp);
    return gradient;
  }

  int32_t device_index() const { return grad_.device_index; }

  std::string describe(const TableGradientConfig& config) const {
    return concat(
        "{\"op\": \"", kOp, "\", \"path\": \"", name_of(config.path), "\", \"vec\": ", config.vec,
        ", \"passes\": ", config.passes, ", \"digit_bits\": ", config.digit_bits,
        ", \"tiles\": ", config.tiles, ", \"levels\": ", config.levels,
        ", \"threads\": ", config.threads_x * config.threads_y,
        ", \"column_tiles\": ", config.column_tiles, ", \"items\": ", params_.items,
        ", \"rows\": ", params_.rows, ", \"columns\": ", params_.columns,
        ", \"launches\": ", config.launches(), ", \"workspace_bytes\": ", config.workspace.bytes,
        ", \"copies\": [", copies_.names(), "]}");
  }

  void print(const TableGradientConfig& config) const {
    print_config([&] { return describe(config); });
  }

 private:
  static constexpr const char* kOp = "embedding_dense_backward";
  // The most indices that torch adds up without sorting them. There it rounds to the dtype of grad
  // time and again, and takes no row from 2^31 on: it is given more, of which the others add zeros.
  static constexpr int64_t kUnsorted = 3072;

  Tensor sum_by_torch() const {
    Tensor grad = given_, indices = given_indices_;
    if (params_.items <= kUnsorted) {
      const int64_t zeros = kUnsorted + 1 - params_.items;
      grad = torch::stable::pad(torch::stable::flatten(grad, 0, -2), {0, 0, 0, zeros});
      indices = torch::stable::pad(torch::stable::flatten(indices, 0, -1), {0, zeros});
    }
    constexpr int64_t kNoPadding = -1;
    return call_torch("aten::embedding_dense_backward", "", grad, indices, params_.rows, kNoPadding,
                      false);
  }

  View contiguous(const char* name, const Tensor& tensor) {
    const View view(tensor);
    if (view.is_contiguous()) return view;
    return copies_.keep(name, torch::stable::contiguous(tensor));
  }

  Tensor allocate(const int64_t* sizes, int64_t dim, int32_t dtype) const {
    return empty_contiguous(sizes, dim, dtype, grad_.device_type, grad_.device_index);
  }

  Tensor given_, given_indices_;
  View grad_, indices_;
  TableGradientParams params_;
  Copies copies_;
};

}  // namespace fusedcuda
