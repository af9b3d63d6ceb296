// A gated MLP of few rows as csrc/bindings/gated_mlp_few.h launches it, emulated.
#include "entry.h"
#include "kernels/gated_mlp_few.cuh"

namespace {

using namespace fusedcuda;

// Call in test_gated_mlp_few_on_cpu.py.
struct Call {
  int dtype, activation, num_sms, m, k, f, n;
  void *x, *w_gate, *w_up, *w_down, *h, *y;
};

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    DeviceTraits device;
    device.num_sms = call->num_sms;
    GatedMlpDecodeParams p;
    p.dtype = static_cast<DType>(call->dtype);
    p.activation = static_cast<Activation>(call->activation);
    p.m = call->m;
    p.k = call->k;
    p.f = call->f;
    p.n = call->n;
    p.x = {call->x, call->k};
    p.w_gate = {call->w_gate, call->k};
    p.w_up = {call->w_up, call->k};
    p.w_down = {call->w_down, call->f};
    p.h = call->h;
    p.y = call->y;
    emulation::check(gated_mlp_few_can_run(p, device), "there is no kernel for this");
    const GatedMlpFewConfig config = choose_gated_mlp_few_config(p, device);
    using gated_mlp_few_detail::run;
    emulation::check_launch(p.dtype == DType::kFloat16 ? run<__half>(p, config, nullptr)
                                                       : run<__nv_bfloat16>(p, config, nullptr));
  });
}
