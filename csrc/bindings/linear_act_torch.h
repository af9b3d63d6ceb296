// The steps of a linear layer that torch's own operators make, on memory that is not theirs.
#pragma once

#include <array>

#include "linear_act_steps.h"
#include "shim.h"

namespace fusedcuda {

inline int32_t torch_type(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_64F:
      return aoti_torch_dtype_float64();
    case CUDA_R_32F:
      return aoti_torch_dtype_float32();
    case CUDA_R_16F:
      return aoti_torch_dtype_float16();
    case CUDA_R_16BF:
      return aoti_torch_dtype_bfloat16();
    default:
      return aoti_torch_dtype_float8_e4m3fn();
  }
}

// On one device and its current stream.
class TorchSteps {
 public:
  TorchSteps(int32_t device_type, int32_t device_index)
      : device_type_(device_type), device_index_(device_index) {}

  void bias_rows(const BiasRows& b, DType dtype) const {
    const int32_t type = torch_dtype(dtype);
    const std::array<int64_t, 3> sizes = {b.batch, b.m, b.n};
    Tensor output = at(b.output.data, type, sizes, {b.output.batch_stride, b.output.stride, 1});
    torch::stable::copy_(output, at(b.bias, type, sizes, {b.bias_batch, 0, 1}));
  }

  // Everything is added up in float32 (float64) and rounded once. An operator that writes to a
  // given tensor is one that autocast does not touch, and products of 16 and 8 bits are exact in
  // TF32.
  void product(const Matmul& matmul) const {
    using torch::headeronly::ScalarType;
    const MatmulProblem& p = matmul.problem;
    const MatmulOperands& o = matmul.operands;
    const int32_t type = torch_type(p.type), output_type = torch_type(p.output_type);
    const ScalarType wide = p.type == CUDA_R_64F ? ScalarType::Double : ScalarType::Float;
    auto factor = [&](const void* data, bool rows_first, const std::array<int64_t, 3>& sizes,
                      int64_t stride, int64_t batch) {
      const int64_t row = rows_first ? stride : 1, column = rows_first ? 1 : stride;
      return torch::stable::to(at(data, type, sizes, {batch, row, column}), wide);
    };
    const Tensor a = factor(o.a, p.a_k_is_inner, {p.batch, p.m, p.k}, p.a_stride, p.a_batch);
    const Tensor b = factor(o.b, !p.b_k_is_inner, {p.batch, p.k, p.n}, p.b_stride, p.b_batch);
    const int64_t sizes[] = {p.batch, p.m, p.n};
    const int32_t wide_type =
        wide == ScalarType::Double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
    Tensor z = empty_contiguous(sizes, 3, wide_type, device_type_, device_index_);
    call_torch("aten::bmm", "out", a, b, z);
    if (p.scaled_factors) {
      z = call_torch("aten::mul", "Tensor", z, number_at(o.a_scale));
      z = call_torch("aten::mul", "Tensor", z, number_at(o.b_scale));
    }
    auto add = [&](const void* data, std::array<int64_t, 3> strides) {
      if (data == nullptr) return;
      // torch's subtract is what the stable interface has for adding.
      const Tensor summand = at(data, output_type, {p.batch, p.m, p.n}, strides);
      z = torch::stable::subtract(z, torch::stable::to(summand, wide), -1);
    };
    add(o.bias, {p.bias_batch, 0, 1});
    add(o.c, {p.c_batch, p.c_stride, 1});
    Tensor output =
        at(o.output, output_type, {p.batch, p.m, p.n}, {p.output_batch, p.output_stride, 1});
    torch::stable::copy_(output, z);
  }

  // Saturated: the conversion alone would make NaN of what is too large.
  void quantize(const Quantize& q) const {
    const Tensor y = at(q.from, aoti_torch_dtype_bfloat16(), {1, 1, q.count}, {0, 0, 1});
    const Tensor quotient =
        call_torch("aten::div", "Tensor",
                   torch::stable::to(y, torch::headeronly::ScalarType::Float), number_at(q.scale));
    constexpr double kLargest = 448;
    const std::optional<Tensor> lowest = number(-kLargest), highest = number(kLargest);
    const Tensor saturated = call_torch("aten::clamp", "Tensor", quotient, lowest, highest);
    Tensor output = at(q.to, aoti_torch_dtype_float8_e4m3fn(), {1, 1, q.count}, {0, 0, 1});
    torch::stable::copy_(output, saturated);
  }

 private:
  // The tensor of this layout at an address, which it does not own.
  Tensor at(const void* data, int32_t dtype, std::array<int64_t, 3> sizes,
            std::array<int64_t, 3> strides) const {
    AtenTensorHandle handle;
    check_shim(
        aoti_torch_create_tensor_from_blob(const_cast<void*>(data), 3, sizes.data(), strides.data(),
                                           0, dtype, device_type_, device_index_, &handle),
        "a view");
    return Tensor(handle);
  }

  Tensor number_at(const void* data) const {
    return at(data, aoti_torch_dtype_float32(), {1, 1, 1}, {1, 1, 1});
  }

  // On the device, as no call may wait for one from the host.
  Tensor number(double value) const {
    const Tensor tensor =
        empty_contiguous(nullptr, 0, aoti_torch_dtype_float32(), device_type_, device_index_);
    return torch::stable::fill_(tensor, value);
  }

  int32_t device_type_, device_index_;
};

}  // namespace fusedcuda
