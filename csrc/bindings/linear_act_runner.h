// What the steps of a linear layer call on a GPU: cuBLASLt, the launchers, and torch's operators
// for what neither has.
#pragma once

#include "cublaslt_torch.h"
#include "linear_act_run.h"
#include "linear_act_torch.h"
#include "shim.h"

namespace fusedcuda {

// On the current device and stream.
class TorchRunner {
 public:
  TorchRunner(const char* op, DType dtype, const PlanSource& source, int32_t device)
      : op_(op),
        dtype_(dtype),
        source_(source),
        device_(device),
        stream_(current_stream(device)),
        torch_(aoti_torch_device_type_cuda(), device) {}

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

  void hopper(const LinearActParams& params, const GemmConfig& config) {
    throw_on_error(launch_linear_act(params, config, stream_), op_);
  }

  void narrow(const LinearActParams& params) {
    const NarrowConfig config = choose_narrow_config(params, source_.device.num_sms);
    throw_on_error(launch_linear_narrow(params, config, source_.device.dependent_launch, stream_),
                   op_);
  }

  void hopper_bwd(const LinearActBwdParams& params, const LinearActBwdConfig& config) {
    std::optional<Tensor> memory;
    void* const workspace = allocate(config.workspace_bytes, &memory);
    throw_on_error(launch_linear_act_bwd(params, config, workspace, stream_), op_);
  }

  void one_output_bwd(const OneOutputBwdParams& params, const OneOutputConfig& config) {
    std::optional<Tensor> memory;
    void* const workspace = allocate(config.workspace_bytes(params.dtype), &memory);
    throw_on_error(launch_one_output_bwd(params, config, workspace, stream_), op_);
  }

  void column_sums(const ColumnSumsParams& params, const ColumnSumsConfig& config) {
    std::optional<Tensor> memory;
    void* const workspace = allocate(config.workspace_bytes, &memory);
    throw_on_error(launch_column_sums(params, config, workspace, stream_), op_);
  }

  void act_rows(const ActRowsParams& params) {
    throw_on_error(launch_act_rows(params, stream_), op_);
  }

  void pad_rows(const PadRowsParams& params) {
    throw_on_error(launch_pad_rows(params, stream_), op_);
  }

  void dot_rows(const Matmul& matmul) {
    const MatmulProblem& p = matmul.problem;
    const MatmulOperands& operands = matmul.operands;
    DotRowsParams params;
    params.dtype = dtype_;
    params.batch = p.batch;
    params.m = p.m;
    params.k = p.k;
    params.x = {operands.a, p.a_stride, p.a_k_is_inner};
    params.x_batch = p.a_batch;
    params.weight = operands.b;
    params.weight_step = p.b_k_is_inner ? 1 : p.b_stride;
    params.weight_batch = p.b_batch;
    params.bias = operands.bias;
    params.bias_batch = p.bias_batch;
    params.residual = {const_cast<void*>(operands.c), p.c_stride};
    params.residual_batch = p.c_batch;
    params.output = {operands.output, p.output_stride};
    params.output_batch = p.output_batch;
    params.dependent = source_.device.dependent_launch;
    throw_on_error(launch_dot_rows(params, stream_), op_);
  }

  void copy(const Copy& copy) {
    throw_on_error(
        cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, stream_), op_);
  }

  void bias_rows(const BiasRows& rows) { torch_.bias_rows(rows, dtype_); }
  void product(const Matmul& matmul) { torch_.product(matmul); }
  void quantize(const Quantize& quantize) { torch_.quantize(quantize); }

 private:
  // Null if it is of no bytes.
  void* allocate(int64_t bytes, std::optional<Tensor>* memory) const {
    if (bytes == 0) return nullptr;
    *memory = empty_contiguous(&bytes, 1, aoti_torch_dtype_uint8(), aoti_torch_device_type_cuda(),
                               device_);
    return View(**memory).data;
  }

  const char* op_;
  DType dtype_;
  const PlanSource& source_;
  int32_t device_;
  cudaStream_t stream_;
  TorchSteps torch_;
};

}  // namespace fusedcuda
