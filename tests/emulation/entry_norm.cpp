// One norm call as csrc/bindings/norm.cpp makes it, with the launches emulated.
#include <algorithm>

#include "kernels/norm.h"
#include "kernels/norm_config.h"
#include "rows.h"

namespace {

using namespace fusedcuda;
using emulation::matrix_of;

// Call in norm_emulator.py.
struct Call {
  emulation::Rows rows;
  int backward, kind;
  int only_choose;                        // and launch nothing; there need be no tensors
  emulation::Matrix x, residual, sum, y;  // backward: x is h
  emulation::Matrix dy, dh, dx;
  NormParameter weight, bias, dweight, dbias;
  double weight_offset, eps;
  void *mean, *rstd;
  // More of the GPU; without SMs it is the one that norm_device_traits() finds.
  int resident_clusters;
  int64_t shared_bytes_of_sm, shared_bytes_of_block;
  // Results:
  emulation::Chosen chosen;
  int stages;
  int64_t partials;
};

DeviceTraits traits_of(const Call& call) {
  DeviceTraits device = emulation::device_of(call.rows);
  if (call.rows.num_sms == 0) {
    emulation::check_launch(norm_device_traits(&device));
    return device;
  }
  for (auto& counts : device.resident_clusters) std::fill_n(counts, 5, call.resident_clusters);
  device.shared_bytes_of_sm = call.shared_bytes_of_sm;
  device.shared_bytes_of_block = call.shared_bytes_of_block;
  return device;
}

template <typename Params>
Params common_params(const Call& call) {
  Params params;
  emulation::set_rows(call.rows, &params);
  params.kind = static_cast<NormKind>(call.kind);
  params.weight = call.weight;
  params.weight_offset = call.weight_offset;
  params.mean = call.mean;
  params.rstd = call.rstd;
  return params;
}

NormConfig forward(const Call& call) {
  NormParams params = common_params<NormParams>(call);
  params.x = matrix_of(call.rows, call.x);
  params.residual = matrix_of(call.rows, call.residual);
  params.sum = matrix_of(call.rows, call.sum);
  params.y = matrix_of(call.rows, call.y);
  params.bias = call.bias;
  params.eps = call.eps;
  const NormConfig config = choose_norm_config(params, traits_of(call));
  if (!call.only_choose) emulation::check_launch(launch_norm(params, config, nullptr));
  return config;
}

NormConfig backward(const Call& call) {
  NormBwdParams params = common_params<NormBwdParams>(call);
  params.h = matrix_of(call.rows, call.x);
  params.dy = matrix_of(call.rows, call.dy);
  params.dh = matrix_of(call.rows, call.dh);
  params.dx = matrix_of(call.rows, call.dx);
  params.dweight = call.dweight;
  params.dbias = call.dbias;
  const NormConfig config = choose_norm_bwd_config(params, traits_of(call));
  if (call.only_choose) return config;
  const size_t value_size = compute_size_of(params.dtype);
  const emulation::Workspace workspace(config.workspace_size * value_size);
  emulation::check_launch(launch_norm_bwd(params, config, workspace.data(), nullptr));
  workspace.check();
  return config;
}

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    const NormConfig config = call->backward ? backward(*call) : forward(*call);
    call->chosen = emulation::chosen(config.row);
    call->stages = config.stages;
    call->partials = config.partials;
  });
}
