// One call of the interaction of a DLRM's vectors: checks of its operands, and the parameters that
// a launch takes. The vectors lie one behind the other, or are rows of a table.
#pragma once

#include <string>
#include <vector>

#include "../kernels/dlrm.h"
#include "../kernels/dlrm_config.h"
#include "copies.h"
#include "row_call.h"

namespace fusedcuda {

inline std::string shape_of(const View& view) { return shape_string(view.sizes, view.dim); }

inline const char* name_of(DotPath path) {
  switch (path) {
    case DotPath::kEmpty:
      return "empty";
    case DotPath::kTensorCores:
      return "tensor_cores";
    default:
      return "threads";
  }
}

// Bits of a mask of gradients: of dense, and of the vectors beside it.
constexpr int64_t kDenseGrad = 1, kEmbeddingsGrad = 2;
constexpr int64_t kAllDotGradients = kDenseGrad | kEmbeddingsGrad;

class DotCall {
 public:
  DotCall(const char* op, const Tensor& dense, const Tensor& embeddings, bool upper)
      : DotCall(op, dense, upper) {
    const View vectors(embeddings);
    check_vectors("embeddings", vectors);
    const int64_t batch = params_.batch, columns = params_.columns;
    if (vectors.dim != 3 || vectors.sizes[0] != batch || vectors.sizes[2] != columns) {
      fail(op, ": embeddings must have shape (", batch, ", F - 1, ", columns, "); got ",
           shape_of(vectors));
    }
    set_vectors(vectors.sizes[1] + 1);
    const View read = with_neighbours("embeddings", embeddings);
    params_.embeddings = read.data;
    params_.sample_stride = stride_of(read, 0);
    params_.vector_stride = stride_of(read, 1);
  }

  // The vectors beside the dense one are the rows of `weight` that `indices` names.
  DotCall(const char* op, const Tensor& dense, const Tensor& weight, const Tensor& indices,
          bool upper)
      : DotCall(op, dense, upper) {
    const View table(weight), rows(indices);
    check_vectors("weight", table);
    const int64_t batch = params_.batch, columns = params_.columns;
    if (table.dim != 2 || table.sizes[1] != columns)
      fail(op, ": weight must have shape (V, ", columns, "); got ", shape_of(table));
    const bool is_int32 = rows.dtype == aoti_torch_dtype_int32();
    if (!is_int32 && rows.dtype != aoti_torch_dtype_int64())
      fail(op, ": indices must be an int64 or int32 tensor");
    check_device("indices", rows);
    if (rows.dim != 2 || rows.sizes[0] != batch)
      fail(op, ": indices must have shape (", batch, ", F - 1); got ", shape_of(rows));
    if (table.sizes[0] == 0 && batch * rows.sizes[1] > 0)
      fail(op, ": weight must have a row for the indices; got ", shape_of(table));
    set_vectors(rows.sizes[1] + 1);
    const View read = with_neighbours("weight", weight);
    params_.embeddings = read.data;
    params_.vector_stride = stride_of(read, 0);
    params_.lookup = {rows.data, is_int32, rows.strides[0], rows.strides[1], table.sizes[0]};
  }

  void set_width(const char* name, int64_t width) {
    const int64_t least = params_.columns + params_.vectors * (params_.vectors - 1) / 2;
    if (width < least || width >= least + kMaxDotPadding) {
      fail(op_, ": ", name, " must be ", least, " to ", least + kMaxDotPadding - 1, ": ",
           params_.columns, " elements, the products of ", params_.vectors,
           " vectors, and padding; got ", width);
    }
    params_.width = static_cast<int>(width);
  }

  Tensor allocate_output() const { return allocate({params_.batch, params_.width}); }

  DotParams forward_params(const Tensor& output) const {
    DotParams params;
    static_cast<DotVectors&>(params) = params_;
    params.output = View(output).data;
    return params;
  }

  // The gradients in `mask` go to the end of `gradients`.
  DotBwdParams backward_params(const Tensor& grad, int64_t mask, std::vector<Tensor>* gradients) {
    set_width("the width of grad", check_grad(View(grad)));
    DotBwdParams params;
    static_cast<DotVectors&>(params) = params_;
    const View read = with_neighbours("grad", grad);
    params.grad = read.data;
    params.grad_stride = stride_of(read, 0);
    auto written = [&](std::initializer_list<int64_t> sizes) {
      return View(gradients->emplace_back(allocate(sizes))).data;
    };
    const int64_t batch = params_.batch, columns = params_.columns;
    if (mask & kDenseGrad) params.dense_grad = written({batch, columns});
    if (mask & kEmbeddingsGrad)
      params.embeddings_grad = written({batch, params_.vectors - 1, columns});
    return params;
  }

  const char* op() const { return op_; }
  int32_t device_index() const { return dense_.device_index; }

  std::string describe(const DotConfig& config) const {
    const int vec = config.aligned ? kVectorBytes / size_of(params_.dtype) : 1;
    return concat("{\"op\": \"", op_, "\", \"path\": \"", name_of(config.path),
                  "\", \"vec\": ", vec,
                  ", \"row_vec\": ", config.aligned_row ? kVectorBytes / size_of(params_.dtype) : 1,
                  ", \"tiles\": ", config.tiles, ", \"stages\": ", config.stages,
                  ", \"threads\": ", config.threads, ", \"blocks\": ", config.blocks,
                  ", \"shared_bytes\": ", config.shared_bytes, ", \"vectors\": ", params_.vectors,
                  ", \"columns\": ", params_.columns, ", \"width\": ", params_.width,
                  ", \"copies\": [", copies_.names(), "]}");
  }

  void print(const DotConfig& config) const {
    print_config([&] { return describe(config); });
  }

 private:
  DotCall(const char* op, const Tensor& dense, bool upper) : op_(op), dense_(dense) {
    if (!dtype_of(dense_))
      fail(op, ": dense must be a float64, float32, float16 or bfloat16 tensor");
    if (dense_.dim != 2) fail(op, ": dense must have shape (B, E); got ", shape_of(dense_));
    const int64_t columns = dense_.sizes[1];
    if (columns < 1 || columns > kMaxDotColumns)
      fail(op, ": vectors must have 1 to ", kMaxDotColumns, " elements; got ", columns);
    params_.dtype = *dtype_of(dense_);
    params_.batch = dense_.sizes[0];
    params_.columns = static_cast<int>(columns);
    params_.upper = upper;
    const View read = with_neighbours("dense", dense);
    params_.dense = read.data;
    params_.dense_stride = stride_of(read, 0);
  }

  void check_vectors(const char* name, const View& view) const {
    if (view.dtype != dense_.dtype) fail(op_, ": ", name, " must have dense's dtype");
    check_device(name, view);
  }

  // Its width: rows of the incoming gradient are as wide as those of the output.
  int64_t check_grad(const View& view) const {
    if (view.dtype != dense_.dtype) fail(op_, ": grad must have dense's dtype");
    check_device("grad", view);
    if (view.dim != 2 || view.sizes[0] != params_.batch)
      fail(op_, ": grad must have shape (", params_.batch, ", width); got ", shape_of(view));
    return view.sizes[1];
  }

  void set_vectors(int64_t vectors) {
    if (vectors > kMaxDotVectors)
      fail(op_, ": there may be ", kMaxDotVectors, " vectors, dense included; got ", vectors);
    params_.vectors = static_cast<int>(vectors);
  }

  Tensor allocate(std::initializer_list<int64_t> sizes) const {
    return empty_contiguous(sizes.begin(), static_cast<int64_t>(sizes.size()), dense_.dtype,
                            dense_.device_type, dense_.device_index);
  }

  void check_device(const char* name, const View& view) const {
    if (view.device_type != dense_.device_type || view.device_index != dense_.device_index)
      fail(op_, ": ", name, " is on another device than dense");
  }

  // Of one element the stride says nothing, and would only look unaligned.
  static int64_t stride_of(const View& view, int d) {
    return view.sizes[d] > 1 ? view.strides[d] : 0;
  }

  // The tensor, or a copy of it, whose last dimension has neighbours in memory.
  View with_neighbours(const char* name, const Tensor& tensor) {
    const View view(tensor);
    if (view.sizes[view.dim - 1] == 1 || view.strides[view.dim - 1] == 1) return view;
    return copies_.keep(name, torch::stable::contiguous(tensor));
  }

  const char* op_;
  View dense_;
  DotVectors params_;
  Copies copies_;
};

}  // namespace fusedcuda
