// What Python calls (emulator.py): guarded memory, and one pointwise call as
// csrc/bindings/pointwise.cpp makes it, with the launches emulated.
#include <cstdio>
#include <stdexcept>

#include "execution.h"
#include "kernels/pointwise.h"
#include "kernels/pointwise_config.h"

namespace {

using namespace fusedcuda;

// One launch, as Launch in emulator.py.
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
  int reversed;
  int num_dims, num_tensors;
  const int64_t* sizes;
  const Tensor* tensors;
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

void check(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(message);
}

int run(const Call& call, Launch* launches) {
  const PointwiseParams params = params_of(call);
  DeviceTraits device;
  device.num_sms = call.num_sms;
  emulation::set_reversed(call.reversed != 0);
  constexpr const char* kTooManyDims = "more dimensions than the kernels take";
  constexpr const char* kRefused = "the launch was refused: grid, block or parameters too large";
  PointwisePlan plan;
  if (call.wanted == 0) {
    check(choose_pointwise_config(params, device, &plan), kTooManyDims);
    limit_grid_y(call.max_grid_y, &plan);
    check(launch_pointwise(params, plan, nullptr) == cudaSuccess, kRefused);
    launches[0] = summary(plan, 0);
    return 1;
  }
  int count = 0;
  for (unsigned wanted = call.wanted, remaining; wanted != 0; wanted = remaining) {
    check(choose_pointwise_bwd_config(params, wanted, device, &plan, &remaining), kTooManyDims);
    limit_grid_y(call.max_grid_y, &plan);
    const bool is_double = params.dtype == DType::kFloat64;
    const emulation::GuardedMemory workspace(plan.workspace_size * (is_double ? 8 : 4));
    check(launch_pointwise_bwd(params, plan, workspace.data(), nullptr) == cudaSuccess, kRefused);
    check(workspace.is_intact(), "the kernels wrote beside the workspace");
    launches[count++] = summary(plan, num_operands(params.op));
  }
  return count;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The number of launches, or -1 with what went wrong in `error`.
EXPORT int emulate_pointwise(const Call* call, Launch* launches, char* error, size_t error_size) {
  try {
    return run(*call, launches);
  } catch (const std::exception& exception) {
    std::snprintf(error, error_size, "%s", exception.what());
    return -1;
  }
}

EXPORT void* guarded_create(size_t size) { return new emulation::GuardedMemory(size); }
EXPORT void guarded_destroy(emulation::GuardedMemory* memory) { delete memory; }
EXPORT void* guarded_data(emulation::GuardedMemory* memory) { return memory->data(); }
EXPORT int guarded_is_intact(emulation::GuardedMemory* memory) { return memory->is_intact(); }
