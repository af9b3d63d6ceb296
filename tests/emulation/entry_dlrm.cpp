// One call of the dlrm family as csrc/bindings/dlrm.cpp makes it, with the launches emulated.
#include "entry.h"
#include "kernels/dlrm.h"
#include "kernels/dlrm_config.h"
#include "kernels/dlrm_gradient.h"
#include "kernels/dlrm_gradient_config.h"

namespace {

using namespace fusedcuda;

enum Op { kInteraction, kInteractionBwd, kTableGradient, kHead, kHeadBwd };

// Call in dlrm_emulator.py: the fields of the operator, null or 0 where it has none.
struct Call {
  int op, dtype, num_sms;
  int64_t shared_bytes_of_block;
  int64_t rows;  // samples, or rows of x
  int columns;
  // Interaction
  int vectors, width, upper;
  const void *dense, *embeddings, *grad;
  int64_t dense_stride, sample_stride, vector_stride, grad_stride;
  const void* indices;  // with these the embeddings are a table
  int index_is_int32;
  int64_t index_sample_stride, index_vector_stride, table_rows;
  void *output, *dense_grad, *embeddings_grad;
  // Gradient of a table, of so many indices
  int64_t items;
  void* table_grad;
  // Head
  void* x;
  int64_t x_stride;
  const void *weight, *bias, *target, *grad_loss;
  double pos_weight, scale;
  int reduced;
  void *loss, *logits, *dlogits, *dx, *dweight, *dbias;
  // Results: what was chosen.
  int path, aligned, aligned_row, tiles, stages, threads;
  int64_t blocks, column_tiles;
  int passes, digit_bits, levels;
  int64_t workspace_bytes;
};

DeviceTraits device_of(const Call& call) {
  DeviceTraits device;
  device.num_sms = call.num_sms;
  device.shared_bytes_of_block = call.shared_bytes_of_block;
  return device;
}

template <typename Params>
Params vectors_of(const Call& call) {
  Params p;
  p.dtype = static_cast<DType>(call.dtype);
  p.batch = call.rows;
  p.vectors = call.vectors;
  p.columns = call.columns;
  p.width = call.width;
  p.upper = call.upper;
  p.dense = call.dense;
  p.dense_stride = call.dense_stride;
  p.embeddings = call.embeddings;
  p.sample_stride = call.sample_stride;
  p.vector_stride = call.vector_stride;
  p.lookup = {call.indices, call.index_is_int32 != 0, call.index_sample_stride,
              call.index_vector_stride, call.table_rows};
  return p;
}

void remember(const DotConfig& config, Call* call) {
  call->path = static_cast<int>(config.path);
  call->aligned = config.aligned;
  call->aligned_row = config.aligned_row;
  call->tiles = config.tiles;
  call->stages = config.stages;
  call->threads = config.threads;
  call->blocks = config.blocks;
}

void interact(Call* call) {
  auto p = vectors_of<DotParams>(*call);
  p.output = call->output;
  const DotConfig config = choose_dot_interaction_config(p, device_of(*call));
  emulation::check_launch(launch_dot_interaction(p, config, nullptr));
  remember(config, call);
}

void interact_bwd(Call* call) {
  auto p = vectors_of<DotBwdParams>(*call);
  p.grad = call->grad;
  p.grad_stride = call->grad_stride;
  p.dense_grad = call->dense_grad;
  p.embeddings_grad = call->embeddings_grad;
  const DotConfig config = choose_dot_interaction_bwd_config(p, device_of(*call));
  emulation::check_launch(launch_dot_interaction_bwd(p, config, nullptr));
  remember(config, call);
}

void table_gradient(Call* call) {
  TableGradientParams p;
  p.dtype = static_cast<DType>(call->dtype);
  p.items = call->items;
  p.rows = call->table_rows;
  p.columns = call->columns;
  p.grad = call->grad;
  p.indices = call->indices;
  p.is_int32 = call->index_is_int32 != 0;
  p.table_grad = call->table_grad;
  const TableGradientConfig config = choose_table_gradient_config(p, device_of(*call));
  const emulation::Workspace workspace(config.workspace.bytes);
  emulation::check_launch(launch_table_gradient(p, config, workspace.data(), nullptr));
  workspace.check();
  call->path = static_cast<int>(config.path);
  call->aligned = config.aligned;
  call->column_tiles = config.column_tiles;
  call->passes = config.passes;
  call->digit_bits = config.digit_bits;
  call->levels = config.levels;
  call->workspace_bytes = config.workspace.bytes;
}

template <typename Params>
Params rows_of(const Call& call) {
  Params p;
  p.dtype = static_cast<DType>(call.dtype);
  p.rows = call.rows;
  p.columns = call.columns;
  p.x = RowMatrix::make(call.x, call.x_stride, call.rows, call.columns, size_of(p.dtype));
  p.weight = call.weight;
  p.dlogits = call.dlogits;
  p.reduced = call.reduced;
  p.scale = call.scale;
  return p;
}

template <typename Params, typename Config>
void launch(cudaError_t (*launcher)(const Params&, const Config&, void*, cudaStream_t),
            const Params& p, const Config& config, Call* call) {
  const emulation::Workspace workspace(config.workspace_size * compute_size_of(p.dtype));
  emulation::check_launch(launcher(p, config, workspace.data(), nullptr));
  workspace.check();
  call->aligned = config.aligned;
  call->blocks = config.blocks;
}

void head(Call* call) {
  auto p = rows_of<BceParams>(*call);
  p.bias = call->bias;
  p.target = call->target;
  p.pos_weight = call->pos_weight;
  p.loss = call->loss;
  p.logits = call->logits;
  launch(launch_linear_sigmoid_bce, p, choose_linear_sigmoid_bce_config(p, device_of(*call)), call);
}

void head_bwd(Call* call) {
  auto p = rows_of<BceBwdParams>(*call);
  p.grad_loss = call->grad_loss;
  if (call->dx != nullptr)
    p.dx = RowMatrix::make(call->dx, call->columns, call->rows, call->columns, size_of(p.dtype));
  p.dweight = call->dweight;
  p.dbias = call->dbias;
  const OneOutputConfig config = choose_linear_sigmoid_bce_bwd_config(p, device_of(*call));
  launch(launch_linear_sigmoid_bce_bwd, p, config, call);
  call->column_tiles = config.column_tiles;
}

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    switch (call->op) {
      case kInteraction:
        return interact(call);
      case kInteractionBwd:
        return interact_bwd(call);
      case kTableGradient:
        return table_gradient(call);
      case kHead:
        return head(call);
      default:
        return head_bwd(call);
    }
  });
}
