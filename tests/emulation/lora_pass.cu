// One pass over x for the products of a low-rank adapter, as csrc/bindings/lora_pass.h makes it.
#include "entry.h"
#include "kernels/lora_pass.cu"

namespace {

using namespace fusedcuda;

// Call in test_lora_pass_on_cpu.py.
struct Call {
  int dtype, up_dtype, num_sms, columns, rank, transposed;
  int64_t rows, x_stride, factor_stride, threshold;
  void *x, *factor, *t, *seed, *down, *up;
  float down_scale, up_scale;
};

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    DeviceTraits device;
    device.num_sms = call->num_sms;
    LoraPassParams params;
    params.dtype = static_cast<DType>(call->dtype);
    params.rows = call->rows;
    params.columns = call->columns;
    params.rank = call->rank;
    params.x = RowMatrix::make(call->x, call->x_stride, call->rows, call->columns, 2);
    params.dropout = {static_cast<const int64_t*>(call->seed),
                      static_cast<uint32_t>(call->threshold)};
    params.factor = call->factor;
    params.factor_stride = call->factor_stride;
    params.down_scale = call->down_scale;
    params.down = call->down;
    params.t = call->t;
    params.up_scale = call->up_scale;
    params.up_dtype = static_cast<DType>(call->up_dtype);
    params.transposed = call->transposed;
    params.up = call->up;
    emulation::check(lora_pass_can_run(params, device), "the pass cannot run this");
    const LoraPassConfig config = choose_lora_pass_config(params, device);
    const emulation::Workspace workspace(config.workspace_size() * sizeof(float));
    emulation::check_launch(launch_lora_pass(params, config, workspace.data(), nullptr));
    workspace.check();
  });
}
