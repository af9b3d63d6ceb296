// The kernels of linear_act as csrc/bindings/linear_act.cpp launches them, emulated.
#include "entry.h"
#include "kernels/linear_act.h"
#include "kernels/linear_act_columns_config.h"
#include "kernels/linear_act_config.h"

namespace {

using namespace fusedcuda;

// Call in linear_act_emulator.py.
struct Call {
  int dtype, activation, saves, kind;
  int64_t m, n, k;
  void *a, *b, *bias, *input, *saved, *output;
  int64_t a_stride, b_stride, input_stride, output_stride;
  void *dy, *x, *weight, *dx, *dweight, *dbias;
  int64_t dy_stride, x_stride, weight_stride, dx_stride;
  int b_k_is_inner;
  void *extra_a, *extra_b;  // with extra_k > 0
  int64_t extra_k, extra_a_stride, extra_b_stride;
  int num_sms, group;
  int dx_columns, dweight_columns, splits;  // 0 to choose; results: what was taken
  int64_t batch;                            // of kColumnSums, whose sums are `dbias`
  int only_choose;                          // of kColumnSums, kOneOutputBwd; then results
  int vectors, threads_along, slices;
  int64_t column_blocks, workspace_bytes;
};

enum Kind {
  kProduct,
  kGradient,
  kActivate,
  kActivateBackward,
  kPad,
  kDot,
  kColumnSums,
  kNarrow,
  kOneOutputBwd
};

LinearActParams product_of(const Call* call) {
  LinearActParams params;
  params.dtype = static_cast<DType>(call->dtype);
  params.activation = static_cast<Activation>(call->activation);
  params.m = call->m;
  params.n = call->n;
  params.k = call->k;
  params.a = {call->a, call->a_stride, true};
  params.b = {call->b, call->b_stride, call->b_k_is_inner != 0};
  params.bias = call->bias;
  params.extra_k = call->extra_k;
  params.extra_a = {call->extra_a, call->extra_a_stride, true};
  params.extra_b = {call->extra_b, call->extra_b_stride, call->b_k_is_inner != 0};
  params.output = {call->output, call->output_stride};
  params.saves = static_cast<SavedForBackward>(call->saves);
  params.saved = call->saved;
  return params;
}

void narrow(const Call* call) {
  const LinearActParams params = product_of(call);
  emulation::check(narrow_can_run(params), "the kernel for few inputs cannot run this");
  const NarrowConfig config = choose_narrow_config(params, call->num_sms);
  emulation::check_launch(launch_linear_narrow(params, config, false, nullptr));
}

void product(Call* call) {
  const LinearActParams params = product_of(call);
  DeviceTraits device;
  device.num_sms = call->num_sms;
  emulation::check(hopper_can_run(params, device), "the Hopper kernel cannot run this");
  GemmConfig config = choose_linear_act_config(params, device);
  if (call->group > 0) config.group = call->group;
  emulation::check_launch(launch_linear_act(params, config, nullptr));
}

void gradient(Call* call) {
  LinearActBwdParams params;
  params.dtype = static_cast<DType>(call->dtype);
  params.m = call->m;
  params.n = call->n;
  params.k = call->k;
  params.dy = {call->dy, call->dy_stride};
  params.mask = call->saved;
  params.x = {call->x, call->x_stride};
  params.weight = {call->weight, call->weight_stride};
  params.dx = {call->dx, call->dx_stride};
  params.dweight = call->dweight;
  params.dbias = call->dbias;
  DeviceTraits device;
  device.num_sms = call->num_sms;
  emulation::check(hopper_can_run(params, device), "the Hopper kernels cannot run this");
  LinearActBwdConfig config = choose_linear_act_bwd_config(params, device);
  if (call->dx_columns > 0) config.dx.tile_columns = call->dx_columns;
  if (call->dweight_columns > 0) config.dweight.tile_columns = call->dweight_columns;
  if (call->splits > 0) {
    config.dweight.splits = call->splits;
    gemm::set_blocks(params.n, params.k, device, &config.dweight);
    config.workspace_bytes = linear_act::bytes_of_parts(params, call->splits);
  }
  call->splits = config.dweight.splits;
  call->dx_columns = config.dx.tile_columns;
  call->dweight_columns = config.dweight.tile_columns;
  const emulation::Workspace workspace(config.workspace_bytes);
  emulation::check_launch(launch_linear_act_bwd(params, config, workspace.data(), nullptr));
  workspace.check();
}

ActRowsParams rows_of(const Call& call) {
  ActRowsParams params;
  params.dtype = static_cast<DType>(call.dtype);
  params.activation = static_cast<Activation>(call.activation);
  params.backward = call.kind != kActivate;
  params.m = call.m;
  params.n = call.n;
  params.input = {call.input, call.input_stride};
  params.saves = static_cast<SavedForBackward>(call.saves);
  params.saved = call.saved;
  params.output = {call.output, call.output_stride};
  params.dependent = true;
  return params;
}

void column_sums(Call* call) {
  const ColumnSumsParams params = {rows_of(*call), call->batch, call->dbias};
  DeviceTraits device;
  device.num_sms = call->num_sms;
  const ColumnSumsConfig config = choose_column_sums_config(params, device);
  call->vectors = config.vectors;
  call->threads_along = config.threads_along;
  call->slices = config.slices;
  call->column_blocks = config.column_blocks;
  call->workspace_bytes = config.workspace_bytes;
  if (call->only_choose) return;
  const emulation::Workspace workspace(config.workspace_bytes);
  emulation::check_launch(launch_column_sums(params, config, workspace.data(), nullptr));
  workspace.check();
}

// `vectors`, `threads_along`, `column_blocks`, `slices` and `workspace_bytes` as of the sums.
void one_output_bwd(Call* call) {
  OneOutputBwdParams params;
  params.dtype = static_cast<DType>(call->dtype);
  params.rows = call->m;
  params.columns = static_cast<int>(call->k);
  auto matrix = [&](void* data, int64_t stride) {
    return data == nullptr ? RowMatrix() : RowMatrix::make(data, stride, call->m, call->k, 2);
  };
  params.dy = {call->dy, call->dy_stride};
  params.saves = static_cast<SavedForBackward>(call->saves);
  params.saved = call->saved;
  params.x = matrix(call->x, call->x_stride);
  params.weight = call->weight;
  params.weight_step = call->weight_stride;
  params.dx = matrix(call->dx, call->dx_stride);
  params.dweight = call->dweight;
  params.dbias = call->dbias;
  DeviceTraits device;
  device.num_sms = call->num_sms;
  const OneOutputConfig config = choose_one_output_config(params, params.dtype, device);
  call->vectors = config.aligned;
  call->threads_along = config.threads_x;
  call->column_blocks = config.column_tiles;
  call->slices = static_cast<int>(config.blocks);
  call->workspace_bytes = config.workspace_bytes(params.dtype);
  if (call->only_choose) return;
  emulation::check(one_output_can_run(params), "the kernel for one output cannot run this");
  const emulation::Workspace workspace(call->workspace_bytes);
  emulation::check_launch(launch_one_output_bwd(params, config, workspace.data(), nullptr));
  workspace.check();
}

void pad(const Call& call) {
  PadRowsParams params;
  params.rows = call.m;
  params.columns = call.k;
  params.padded_columns = call.n;
  params.input = {call.input, call.input_stride};
  params.output = call.output;
  params.dependent = true;
  emulation::check_launch(launch_pad_rows(params, nullptr));
}

// x is `a`, with its k inner if that of b is; the residual is `input`.
void dot(const Call& call) {
  DotRowsParams params;
  params.dtype = static_cast<DType>(call.dtype);
  params.m = call.m;
  params.k = call.k;
  params.x = {call.a, call.a_stride, call.b_k_is_inner != 0};
  params.weight = call.b;
  params.weight_step = call.b_stride;
  params.bias = call.bias;
  params.residual = {call.input, call.input_stride};
  params.output = {call.output, call.output_stride};
  params.dependent = true;
  emulation::check_launch(launch_dot_rows(params, nullptr));
}

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    if (call->kind == kProduct) {
      product(call);
    } else if (call->kind == kNarrow) {
      narrow(call);
    } else if (call->kind == kOneOutputBwd) {
      one_output_bwd(call);
    } else if (call->kind == kGradient) {
      gradient(call);
    } else if (call->kind == kPad) {
      pad(*call);
    } else if (call->kind == kDot) {
      dot(*call);
    } else if (call->kind == kColumnSums) {
      column_sums(call);
    } else {
      emulation::check_launch(launch_act_rows(rows_of(*call), nullptr));
    }
  });
}
