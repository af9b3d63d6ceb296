// One pointwise call as csrc/bindings/pointwise.cpp makes it, with the launches emulated.
#include "entry.h"
#include "kernels/pointwise.h"
#include "kernels/pointwise_config.h"

namespace {

using namespace fusedcuda;

using emulation::check;
using emulation::check_launch;

// One launch, as Launch in pointwise_emulator.py.
struct Launch {
  const char* path;
  const char* gradients[kMaxOperands];
  int vec;
  int num_partials;  // the most of any gradient
};

struct Tensor {
  void* data;  // null: the number
  double number;
  const int64_t* strides;  // in elements, 0 where the tensor is broadcast; null for a number
};

struct Call {
  int op, activation, dtype;
  unsigned wanted;  // operands whose gradients are made; 0: forward
  int num_sms;
  int max_grid_y;
  int num_dims, num_tensors;
  const int64_t* sizes;
  const Tensor* tensors;
  // Results:
  Launch launches[kMaxOperands];
  int num_launches;
};

// What choose_grid does for more tiles of rows than a grid has in y, with a smaller limit.
void limit_grid_y(int limit, PointwisePlan* plan) {
  if (plan->path != PointwisePath::kBroadcast || plan->blocks_y <= limit) return;
  const int64_t row_tiles = plan->blocks_y;
  plan->blocks_z = ceil_div(row_tiles, limit);
  plan->blocks_y = ceil_div(row_tiles, plan->blocks_z);
}

PointwiseParams params_of(const Call& call) {
  PointwiseParams params;
  params.op = static_cast<PointwiseOp>(call.op);
  params.activation = static_cast<Activation>(call.activation);
  params.dtype = static_cast<DType>(call.dtype);
  params.space.num_dims = call.num_dims;
  params.space.num_tensors = call.num_tensors;
  std::copy_n(call.sizes, call.num_dims, params.space.sizes);
  for (int t = 0; t < call.num_tensors; ++t) {
    const Tensor& tensor = call.tensors[t];
    params.tensors[t].data = tensor.data;
    params.tensors[t].number = tensor.number;
    for (int d = 0; d < call.num_dims; ++d)
      params.space.strides[t][d] = tensor.strides != nullptr ? tensor.strides[d] : 0;
  }
  return params;
}

Launch summary(const PointwisePlan& plan, int operands) {
  Launch launch = {name_of(plan.path), {}, plan.vec, 0};
  for (int k = 0; k < operands; ++k) {
    launch.gradients[k] = name_of(plan.gradients[k]);
    launch.num_partials = std::max(launch.num_partials, static_cast<int>(plan.num_partials[k]));
  }
  return launch;
}

void run(Call& call) {
  const PointwiseParams params = params_of(call);
  DeviceTraits device;
  device.num_sms = call.num_sms;
  constexpr const char* kTooManyDims = "more dimensions than the kernels take";
  PointwisePlan plan;
  call.num_launches = 0;
  if (call.wanted == 0) {
    check(choose_pointwise_config(params, device, &plan), kTooManyDims);
    limit_grid_y(call.max_grid_y, &plan);
    check_launch(launch_pointwise(params, plan, nullptr));
    call.launches[call.num_launches++] = summary(plan, 0);
    return;
  }
  for (unsigned wanted = call.wanted, remaining; wanted != 0; wanted = remaining) {
    check(choose_pointwise_bwd_config(params, wanted, device, &plan, &remaining), kTooManyDims);
    limit_grid_y(call.max_grid_y, &plan);
    const bool is_double = params.dtype == DType::kFloat64;
    const emulation::Workspace workspace(plan.workspace_size * (is_double ? 8 : 4));
    check_launch(launch_pointwise_bwd(params, plan, workspace.data(), nullptr));
    workspace.check();
    call.launches[call.num_launches++] = summary(plan, num_operands(params.op));
  }
}

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] { run(*call); });
}
