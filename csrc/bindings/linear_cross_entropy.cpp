// The linear_cross_entropy family for torch. What a call consists of, chunk by chunk, is in
// fusedcuda/ops/_linear_cross_entropy_chunks.py: the products are operators of linear_act, the loss
// of the rows is one of cross_entropy. Here is what neither has.
#include "../kernels/linear_cross_entropy.h"

#include "shim.h"

namespace fusedcuda {
namespace {

// gradient *= factor, in place; nothing is moved where the factor is 1.
void scale_(Tensor gradient, const Tensor& factor) {
  constexpr const char* kOp = "linear_cross_entropy_scale_";
  const View view(gradient), by(factor);
  const std::optional<DType> dtype = dtype_of(view);
  if (!dtype) fail(kOp, ": gradient must be a float64, float32, float16 or bfloat16 tensor");
  if (!view.is_contiguous()) fail(kOp, ": gradient must be contiguous");
  const DType compute = *dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (by.dim != 0 || dtype_of(by) != compute) {
    fail(kOp, ": factor must be a 0-d ", compute == DType::kFloat64 ? "float64" : "float32",
         " tensor");
  }
  if (by.device_type != view.device_type || by.device_index != view.device_index)
    fail(kOp, ": factor is on another device than gradient");

  ScaleGradientParams params;
  params.dtype = *dtype;
  params.count = 1;
  for (int64_t d = 0; d < view.dim; ++d) params.count *= view.sizes[d];
  params.gradient = view.data;
  params.factor = by.data;
  DeviceScope scope(view.device_index);
  const ScaleGradientConfig config = choose_scale_gradient_config(
      params, device_traits<linear_cross_entropy_device_traits>(view.device_index));
  throw_on_error(launch_scale_gradient(params, config, current_stream(view.device_index)), kOp);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("linear_cross_entropy_scale_", TORCH_BOX(&scale_));
}

}  // namespace fusedcuda
