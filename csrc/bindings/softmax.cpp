// The softmax family for torch: checks, empty case, allocation, launch. Schemas and references are
// in fusedcuda/ops/softmax.py.
#include "../kernels/softmax.h"

#include <string>

#include "row_call.h"

namespace fusedcuda {
namespace {

// Parameters without the matrices.
template <typename Params>
Params parameters(const RowCall& call, bool log, double scale) {
  auto params = call.parameters<Params>();
  params.log = log;
  params.scale = scale;
  return params;
}

Tensor forward(const char* op, bool log, const Tensor& x, double scale) {
  RowCall call(op, "x", x);
  auto params = parameters<SoftmaxParams>(call, log, scale);
  Tensor y = call.allocate_rows();
  if (call.is_empty()) return y;
  params.x = call.first();
  params.y = call.written(y);
  DeviceScope scope(call.device_index());
  const RowConfig config =
      choose_softmax_config(params, device_traits<softmax_device_traits>(call.device_index()));
  call.print(config);
  throw_on_error(launch_softmax(params, config, current_stream(call.device_index())), op);
  return y;
}

Tensor backward(const char* op, bool log, const Tensor& dy, const Tensor& y, double scale) {
  RowCall call(op, "y", y);
  auto params = parameters<SoftmaxBwdParams>(call, log, scale);
  params.y = call.first();
  params.dy = call.like_first("dy", dy);
  Tensor dx = call.allocate_rows();
  if (call.is_empty()) return dx;
  params.dx = call.written(dx);
  DeviceScope scope(call.device_index());
  const RowConfig config =
      choose_softmax_bwd_config(params, device_traits<softmax_device_traits>(call.device_index()));
  call.print(config);
  throw_on_error(launch_softmax_bwd(params, config, current_stream(call.device_index())), op);
  return dx;
}

Tensor softmax(const Tensor& x, double scale) { return forward("softmax", false, x, scale); }

Tensor log_softmax(const Tensor& x, double scale) { return forward("log_softmax", true, x, scale); }

Tensor softmax_backward(const Tensor& dy, const Tensor& y, double scale) {
  return backward("softmax_backward", false, dy, y, scale);
}

Tensor log_softmax_backward(const Tensor& dy, const Tensor& y, double scale) {
  return backward("log_softmax_backward", true, dy, y, scale);
}

// What softmax(x), or its backward with a gradient laid out like the output, would launch, as JSON.
// x may be a CPU tensor, which stands for a CUDA tensor of that layout.
std::string softmax_plan(const Tensor& x, bool is_backward, int64_t num_sms) {
  const DeviceTraits device = planned_device<softmax_device_traits>(num_sms);
  RowCall call(is_backward ? "softmax_backward" : "softmax", "x", x);
  const Tensor y = call.allocate_rows();
  RowConfig config;
  if (is_backward) {
    auto params = parameters<SoftmaxBwdParams>(call, false, 1);
    params.dy = params.y = params.dx = call.written(y);
    config = choose_softmax_bwd_config(params, device);
  } else {
    auto params = parameters<SoftmaxParams>(call, false, 1);
    params.x = call.first();
    params.y = call.written(y);
    config = choose_softmax_config(params, device);
  }
  return call.describe(config);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CUDA, m) {
  m.impl("softmax", TORCH_BOX(&softmax));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward));
  m.impl("log_softmax", TORCH_BOX(&log_softmax));
  m.impl("log_softmax_backward", TORCH_BOX(&log_softmax_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fusedcuda, CompositeExplicitAutograd, m) {
  m.impl("softmax_plan", TORCH_BOX(&softmax_plan));
}

}  // namespace fusedcuda
