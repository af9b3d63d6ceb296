// What the operators of the lora family have in common that take a matrix and its dropout.
#pragma once

#include <cmath>
#include <optional>
#include <string>

#include "../kernels/lora.h"
#include "row_call.h"

namespace fusedcuda {

using OptionalTensor = std::optional<Tensor>;

inline std::string shape_of(const View& view) { return shape_string(view.sizes, view.dim); }

// What the operators have in common: x, a matrix, its dropout, and what is allocated beside it.
class LoraCall {
 public:
  LoraCall(const char* op, const Tensor& x, const OptionalTensor& seed, double dropout_p)
      : op(op), rows(op, "x", x), x_(x) {
    if (x_.dim != 2) fail(op, ": x must be a matrix; got shape ", shape_of(x_));
    if (!(dropout_p >= 0 && dropout_p <= 1)) fail(op, ": dropout_p must be 0 to 1");
    if (!seed) return;
    const View view(*seed);
    if (view.dtype != aoti_torch_dtype_int64() || view.dim > 1 ||
        (view.dim == 1 && view.sizes[0] != 1))
      fail(op, ": seed must be an int64 tensor of one element");
    check_device("seed", view);
    dropout_ = {static_cast<const int64_t*>(view.data),
                static_cast<uint32_t>(std::nearbyint(dropout_p * 65536))};
    keep_factor_ = dropout_p < 1 ? 1 / (1 - dropout_p) : 0;
  }

  template <typename Params>
  Params parameters(double scale) {
    Params params = rows.parameters<Params>();
    params.x = rows.first();
    params.scale = scale * keep_factor_;
    params.dropout = dropout_;
    return params;
  }

  // The products are of 16-bit types.
  void check_half() const {
    if (size_of(rows.dtype()) != 2) fail(op, ": x must be a float16 or bfloat16 tensor");
  }

  void check_rank(int64_t rank) const {
    if (rank < 1 || rank > kMaxLoraRank)
      fail(op, ": the rank must be 1 to ", kMaxLoraRank, "; got ", rank);
  }

  void check_device(const char* name, const View& view) const {
    if (view.device_type != x_.device_type || view.device_index != x_.device_index)
      fail(op, ": ", name, " is on another device than x");
  }

  Tensor allocate(int64_t rows, int64_t columns, DType dtype) const {
    const int64_t sizes[2] = {rows, columns};
    return empty_contiguous(sizes, 2, torch_dtype(dtype), x_.device_type, x_.device_index);
  }

  const char* op;
  RowCall rows;

 private:
  View x_;
  LoraDropout dropout_;
  double keep_factor_ = 1;
};

}  // namespace fusedcuda
