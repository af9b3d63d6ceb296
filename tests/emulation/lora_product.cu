// A linear layer with its adapter in one launch, as csrc/bindings/lora_product.h makes it.
#include <algorithm>

#include "entry.h"
#include "kernels/lora_one_launch.cu"

namespace {

using namespace fusedcuda;

// Call in test_lora_product_on_cpu.py.
struct Call {
  int dtype, num_sms, rank, k_is_inner;
  int64_t m, n, k;
  void *x, *weight, *bias, *down, *up, *t, *output;
  float scale;
};

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    DeviceTraits device;
    device.num_sms = call->num_sms;
    const bool inner = call->k_is_inner;
    LoraProductParams params;
    LinearActParams& linear = params.linear;
    linear.dtype = static_cast<DType>(call->dtype);
    linear.m = call->m;
    linear.n = call->n;
    linear.k = call->k;
    linear.extra_k = lora_pitch(call->rank);
    linear.a = {call->x, call->k, true};
    linear.b = {call->weight, inner ? call->k : call->n, inner};
    linear.extra_a = {call->t, linear.extra_k, true};
    linear.extra_b = {call->up, inner ? linear.extra_k : call->n, inner};
    linear.bias = call->bias;
    linear.output = {call->output, call->n};
    params.rank = call->rank;
    params.down = {call->down, call->k, true};
    params.scale = call->scale;
    const emulation::Workspace counters(lora_product_counters(call->m) * sizeof(unsigned));
    params.counters = static_cast<unsigned*>(counters.data());
    std::fill_n(params.counters, lora_product_counters(call->m), 0u);
    const GemmConfig config = choose_lora_product_config(params, device);
    const emulation::Workspace parts(lora_product_parts(config.blocks) * sizeof(float));
    params.parts = static_cast<float*>(parts.data());
    emulation::check_launch(launch_lora_product(params, config, nullptr));
    counters.check();
    parts.check();
  });
}
