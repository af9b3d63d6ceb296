// What the steps of a linear layer call on a GPU: cuBLASLt, the launchers, and torch's operators
// for what neither has.
#pragma once

#include <array>

#include "cublaslt_torch.h"
#include "linear_act_run.h"
#include "shim.h"

namespace fusedcuda {

// --- torch's operators on memory that is not theirs

// The tensor of this layout at an address, which it does not own.
inline Tensor tensor_at(const void* data, int32_t dtype, std::array<int64_t, 3> sizes,
                        std::array<int64_t, 3> strides, int32_t device) {
  AtenTensorHandle handle;
  check_shim(
      aoti_torch_create_tensor_from_blob(const_cast<void*>(data), 3, sizes.data(), strides.data(),
                                         0, dtype, aoti_torch_device_type_cuda(), device, &handle),
      "a view");
  return Tensor(handle);
}

template <typename... Arguments>
Tensor call_torch(const char* op, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  check_shim(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION), op);
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor to_dtype(const Tensor& tensor, torch::headeronly::ScalarType dtype) {
  return torch::stable::to(tensor, dtype);
}

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

// --- Steps

// On the current device and stream.
class TorchRunner {
 public:
  TorchRunner(const char* op, DType dtype, const PlanSource& source, int32_t device)
      : op_(op), dtype_(dtype), source_(source), device_(device), stream_(current_stream(device)) {}

  cublasStatus_t matmul(MatmulPlan& plan, const MatmulOperands& operands) {
    std::optional<Tensor> temporary;
    void* workspace = nullptr;
    const size_t bytes = plan.workspace_bytes();
    if (bytes > 0) {
      workspace =
          workspaces().get(device_, stream_, bytes, source_.context.workspace_limit, &temporary);
    }
    return plan.run(source_.context.handle, operands, workspace, stream_);
  }

  void hopper(const LinearActParams& params, const LinearActConfig& config) {
    throw_on_error(launch_linear_act(params, config, stream_), op_);
  }

  void hopper_bwd(const LinearActBwdParams& params, const LinearActBwdConfig& config) {
    std::optional<Tensor> workspace;
    void* data = nullptr;
    if (config.workspace_bytes > 0) {
      workspace = empty_contiguous(&config.workspace_bytes, 1, aoti_torch_dtype_uint8(),
                                   aoti_torch_device_type_cuda(), device_);
      data = View(*workspace).data;
    }
    throw_on_error(launch_linear_act_bwd(params, config, data, stream_), op_);
  }

  void act_rows(const ActRowsParams& params) {
    throw_on_error(launch_act_rows(params, stream_), op_);
  }

  void pad_rows(const PadRowsParams& params) {
    throw_on_error(launch_pad_rows(params, stream_), op_);
  }

  void copy(const Copy& copy) {
    throw_on_error(
        cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, stream_), op_);
  }

  void sum(const ColumnSum& s) {
    const int32_t type = torch_dtype(dtype_);
    const Tensor rows =
        at(s.matrix.data, type, {s.batch, s.m, s.n}, {s.m * s.matrix.stride, s.matrix.stride, 1});
    Tensor result = at(s.sum, type, {s.batch, 1, s.n}, {s.n, s.n, 1});
    const int64_t dimension = 1;
    torch::stable::sum_out(result, rows, torch::headeronly::IntHeaderOnlyArrayRef(&dimension, 1),
                           true);
  }

  // 8-bit factors are multiplied in float32.
  void product(const Matmul& matmul) {
    const MatmulProblem& p = matmul.problem;
    const MatmulOperands& o = matmul.operands;
    const int32_t type = torch_type(p.type), wide = torch_type(p.output_type);
    auto inner = [](bool k_is_inner, int64_t stride, int64_t batch) -> std::array<int64_t, 3> {
      return {batch, k_is_inner ? stride : 1, k_is_inner ? 1 : stride};
    };
    Tensor a = at(o.a, type, {p.batch, p.m, p.k}, inner(p.a_k_is_inner, p.a_stride, p.a_batch));
    Tensor b = at(o.b, type, {p.batch, p.k, p.n}, inner(!p.b_k_is_inner, p.b_stride, p.b_batch));
    if (p.scaled_factors) {
      a = scaled(a, o.a_scale);
      b = scaled(b, o.b_scale);
    }
    Tensor z = torch::stable::matmul(a, b);
    // As torch's subtract is what the stable interface has for adding.
    if (o.bias != nullptr)
      z = torch::stable::subtract(z, at(o.bias, wide, {p.batch, 1, p.n}, {p.bias_batch, 0, 1}), -1);
    if (o.c != nullptr) {
      const Tensor c = at(o.c, wide, {p.batch, p.m, p.n}, {p.c_batch, p.c_stride, 1});
      z = torch::stable::subtract(z, c, -1);
    }
    Tensor output = at(o.output, wide, {p.batch, p.m, p.n}, {p.output_batch, p.output_stride, 1});
    torch::stable::copy_(output, z);
  }

  void quantize(const Quantize& q) {
    const Tensor y = at(q.from, aoti_torch_dtype_bfloat16(), {1, 1, q.count}, {0, 0, 1});
    const Tensor scale = at(q.scale, aoti_torch_dtype_float32(), {1, 1, 1}, {1, 1, 1});
    const Tensor quotient =
        call_torch("aten::div", "Tensor", to_dtype(y, torch::headeronly::ScalarType::Float), scale);
    constexpr double kLargest = 448;
    const Tensor saturated = call_torch("aten::hardtanh", "", quotient, -kLargest, kLargest);
    Tensor output = at(q.to, aoti_torch_dtype_float8_e4m3fn(), {1, 1, q.count}, {0, 0, 1});
    torch::stable::copy_(output, saturated);
  }

 private:
  Tensor at(const void* data, int32_t dtype, std::array<int64_t, 3> sizes,
            std::array<int64_t, 3> strides) const {
    return tensor_at(data, dtype, sizes, strides, device_);
  }

  Tensor scaled(const Tensor& factor, const void* scale) const {
    return call_torch("aten::mul", "Tensor", to_dtype(factor, torch::headeronly::ScalarType::Float),
                      at(scale, aoti_torch_dtype_float32(), {1, 1, 1}, {1, 1, 1}));
  }

  const char* op_;
  DType dtype_;
  const PlanSource& source_;
  int32_t device_;
  cudaStream_t stream_;
};

}  // namespace fusedcuda
