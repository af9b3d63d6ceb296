// One cross-entropy call as csrc/bindings/cross_entropy.cpp makes it, with the launches emulated.
#include "kernels/cross_entropy.h"
#include "kernels/cross_entropy_config.h"
#include "rows.h"

namespace {

using namespace fusedcuda;

// Call in cross_entropy_emulator.py.
struct Call {
  emulation::Rows rows;
  emulation::Matrix logits, gradient;
  const void *target, *weight, *grad_loss;
  void *loss, *statistics, *normalizer;
  int target_is_int32;
  int64_t ignore_index, grad_stride;
  double label_smoothing, z_loss, softcap;
  int reduction, is_part, unless_one, backward;
  emulation::Chosen chosen;
  int totals_cluster, tiles;
};

template <typename Config, typename Params>
Config launch(cudaError_t (*launcher)(const Params&, const Config&, void*, cudaStream_t),
              const Params& params, const Config& config, Call* call) {
  const size_t itemsize = compute_size_of(params.dtype);
  const emulation::Workspace workspace(config.workspace_size * itemsize);
  emulation::check_launch(launcher(params, config, workspace.data(), nullptr));
  workspace.check();
  call->chosen = emulation::chosen(config.row);
  return config;
}

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    const DeviceTraits device = emulation::device_of(call->rows);
    CrossEntropyBwdParams params;
    emulation::set_rows(call->rows, &params);
    params.logits = emulation::matrix_of(call->rows, call->logits);
    params.gradient = emulation::matrix_of(call->rows, call->gradient);
    params.target = call->target;
    params.target_is_int32 = call->target_is_int32;
    params.weight = call->weight;
    params.ignore_index = call->ignore_index;
    params.label_smoothing = call->label_smoothing;
    params.z_loss = call->z_loss;
    params.softcap = call->softcap;
    params.reduction = static_cast<Reduction>(call->reduction);
    params.is_part = call->is_part;
    params.loss = call->loss;
    params.statistics = call->statistics;
    params.normalizer = call->normalizer;
    params.grad_loss = call->grad_loss;
    params.grad_stride = call->grad_stride;
    params.unless_one = call->unless_one;
    if (call->backward) {
      const auto config = choose_cross_entropy_bwd_config(params, device);
      call->tiles = launch(launch_cross_entropy_bwd, params, config, call).tiles;
    } else {
      const CrossEntropyParams& forward = params;
      const auto config = choose_cross_entropy_config(forward, device);
      call->totals_cluster = launch(launch_cross_entropy, forward, config, call).totals_cluster;
    }
  });
}
