// A linear layer of few rows with its adapter in one launch, as csrc/bindings/lora_decode.h makes
// it.
#include "entry.h"
#include "kernels/lora_one_launch.cu"

namespace {

using namespace fusedcuda;

// Call in test_lora_decode_on_cpu.py.
struct Call {
  int dtype, activation, num_sms, rank, cluster_log2;
  int64_t m, n, k, up_stride, shared_bytes;
  void *x, *weight, *bias, *down, *up, *t, *output;
  float scale;
  // Results: what was chosen.
  int chosen_cluster, clusters, tiles, own_tiles, steps;
};

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    DeviceTraits device;
    device.num_sms = call->num_sms;
    if (call->shared_bytes > 0) device.shared_bytes_of_block = call->shared_bytes;
    LoraProductParams params;
    LinearActParams& linear = params.linear;
    linear.dtype = static_cast<DType>(call->dtype);
    linear.activation = static_cast<Activation>(call->activation);
    linear.m = call->m;
    linear.n = call->n;
    linear.k = call->k;
    linear.extra_k = lora_pitch(call->rank);
    linear.a = {call->x, call->k, true};
    linear.b = {call->weight, call->k, true};
    linear.extra_a = {call->t, linear.extra_k, true};
    linear.extra_b = {call->up, call->up_stride, true};
    linear.bias = call->bias;
    linear.output = {call->output, call->n};
    params.rank = call->rank;
    params.down = {call->down, call->k, true};
    params.scale = call->scale;
    const FewRowsProblem problem = lora_decode_detail::problem_of(params);
    const FewRowsConfig config = call->cluster_log2 >= 0
                                     ? few_rows::choose(problem, call->cluster_log2, device)
                                     : choose_lora_decode_config(params, device);
    call->chosen_cluster = config.cluster();
    call->clusters = config.clusters;
    call->tiles = config.tiles;
    call->own_tiles = config.own_tiles;
    call->steps = config.steps;
    emulation::check_launch(launch_lora_decode(params, config, nullptr));
  });
}
