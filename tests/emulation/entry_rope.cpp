// One rope call as csrc/bindings/rope.cpp makes it, with the launch emulated.
#include "entry.h"
#include "kernels/rope.h"
#include "kernels/rope_config.h"

namespace {

using namespace fusedcuda;

// Call in rope_emulator.py.
struct Call {
  RopeLayout q, k, q_output, k_output;
  RopeTable cos, sin;
  int q_heads, k_heads;
  int64_t batch, length, head_dim;
  int dtype, table_dtype;
  int half_tables, interleaved, transposed;
  int num_sms;
  // Results:
  int vec, heads_inside, head_groups, heads_per_thread;
  int64_t column_tiles;
};

RopeParams params_of(const Call& call) {
  RopeParams params;
  params.q = {call.q_heads, call.q, call.q_output};
  params.k = {call.k_heads, call.k, call.k_output};
  params.cos = call.cos;
  params.sin = call.sin;
  params.batch = call.batch;
  params.length = call.length;
  params.head_dim = call.head_dim;
  params.dtype = static_cast<DType>(call.dtype);
  params.table_dtype = static_cast<DType>(call.table_dtype);
  params.half_tables = call.half_tables;
  params.interleaved = call.interleaved;
  params.transposed = call.transposed;
  return params;
}

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    const RopeParams params = params_of(*call);
    DeviceTraits device;
    device.num_sms = call->num_sms;
    const RopePlan plan = choose_rope_config(params, device);
    emulation::check_launch(launch_rope(params, plan, nullptr));
    call->vec = plan.vec;
    call->heads_inside = plan.heads_inside;
    call->head_groups = plan.head_groups;
    call->heads_per_thread = plan.blocks > 0 ? plan.heads_per_block / plan.tile_heads() : 0;
    call->column_tiles = plan.column_tiles;
  });
}
