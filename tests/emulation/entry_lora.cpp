// One call of the lora family as csrc/bindings/lora.cpp makes it, with the launches emulated.
#include "entry.h"
#include "kernels/lora.h"
#include "kernels/lora_config.h"

namespace {

using namespace fusedcuda;

enum Op { kDown, kUp, kDropout, kBranch };

// Call in lora_emulator.py: the fields of the operator, null or 0 where it has none.
struct Call {
  int op, dtype, other_dtype, num_sms;
  int64_t shared_bytes_of_block, shared_bytes_of_sm;
  int64_t rows;
  int columns, rank;
  void* x;
  int64_t x_stride;
  const void* factor;
  int64_t factor_stride;
  int rank_is_inner, transposed;
  double scale;
  const int64_t* seed;
  int64_t threshold;
  const void* t;
  void* output;
  // Results: what was chosen.
  int aligned_x, aligned_factor, rows_of_stage, columns_of_stage, chunks, splits;
  int64_t tiles;
};

DeviceTraits device_of(const Call& call) {
  DeviceTraits device;
  device.num_sms = call.num_sms;
  device.shared_bytes_of_block = call.shared_bytes_of_block;
  device.shared_bytes_of_sm = call.shared_bytes_of_sm;
  return device;
}

template <typename Params>
Params params_of(const Call& call) {
  Params p;
  p.dtype = static_cast<DType>(call.dtype);
  p.rows = call.rows;
  p.columns = call.columns;
  p.x = RowMatrix::make(call.x, call.x_stride, call.rows, call.columns, size_of(p.dtype));
  p.scale = call.scale;
  p.dropout = {call.seed, static_cast<uint32_t>(call.threshold)};
  return p;
}

template <typename Params>
void launch(cudaError_t (*launcher)(const Params&, const LoraConfig&, void*, cudaStream_t),
            const Params& p, const LoraConfig& config, Call* call) {
  const emulation::Workspace workspace(config.workspace_size * sizeof(float));
  emulation::check_launch(launcher(p, config, workspace.data(), nullptr));
  workspace.check();
  call->aligned_x = config.aligned_x;
  call->aligned_factor = config.aligned_factor;
  call->rows_of_stage = config.rows_of_stage;
  call->columns_of_stage = config.columns_of_stage;
  call->chunks = config.chunks;
  call->splits = config.splits;
  call->tiles = config.tiles;
}

void down(Call* call) {
  auto p = params_of<LoraDownParams>(*call);
  p.factor_dtype = static_cast<DType>(call->other_dtype);
  p.rank = call->rank;
  p.factor = call->factor;
  p.factor_stride = call->factor_stride;
  p.rank_is_inner = call->rank_is_inner;
  p.t = call->output;
  launch(launch_lora_down, p, choose_lora_down_config(p, device_of(*call)), call);
}

void up(Call* call) {
  auto p = params_of<LoraUpParams>(*call);
  p.output_dtype = static_cast<DType>(call->other_dtype);
  p.rank = call->rank;
  p.t = call->t;
  p.transposed = call->transposed;
  p.output = call->output;
  launch(launch_lora_up, p, choose_lora_up_config(p, device_of(*call)), call);
}

void dropout(Call* call) {
  auto p = params_of<LoraDropoutParams>(*call);
  p.output = call->output;
  emulation::check_launch(launch_lora_dropout(p, device_of(*call), nullptr));
}

// x is t, factor has the columns of the output.
void branch(Call* call) {
  const auto given = params_of<LoraDropoutParams>(*call);
  LoraBranchParams p;
  p.dtype = given.dtype;
  p.scale = static_cast<float>(given.scale);
  p.dropout = given.dropout;
  p.rows.m = given.rows;
  p.rows.n = call->rank;
  p.rows.k = given.columns;
  p.rows.a = given.x.data;
  p.rows.b = {call->factor, call->factor_stride, false};
  p.rows.output = {call->output, p.rows.n};
  emulation::check(narrow_can_run(p.rows, p.dtype), "the kernel for the branch cannot run this");
  p.rows.config = choose_narrow_config(p.rows.m, p.rows.n, call->num_sms, kLoraBranchBlocksOfSm);
  emulation::check_launch(launch_lora_branch(p, false, nullptr));
}

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    switch (call->op) {
      case kDown:
        return down(call);
      case kUp:
        return up(call);
      case kBranch:
        return branch(call);
      default:
        return dropout(call);
    }
  });
}
