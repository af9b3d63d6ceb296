// A gated MLP of few rows as csrc/bindings/gated_mlp_decode.h launches it, emulated.
#include <algorithm>

#include "entry.h"
#include "kernels/gated_mlp_decode.cuh"

namespace {

using namespace fusedcuda;

// Call in gated_mlp_decode_emulator.py.
struct Call {
  int dtype, activation, num_sms, slot;
  int m, k, f, n;
  void *x, *w_gate, *w_up, *w_down, *h, *y;
  int64_t x_stride, w_gate_stride, w_up_stride, w_down_stride;
  unsigned* counters;
  int stages, under_way;  // at most; 0: what is chosen
  // Results: what was chosen.
  int can_run, rounds, rounds_counted, passes, down_tiles;

  GatedMlpDecodeParams params() const {
    GatedMlpDecodeParams p;
    p.dtype = static_cast<DType>(dtype);
    p.activation = static_cast<Activation>(activation);
    p.m = m;
    p.k = k;
    p.f = f;
    p.n = n;
    p.x = {x, x_stride};
    p.w_gate = {w_gate, w_gate_stride};
    p.w_up = {w_up, w_up_stride};
    p.w_down = {w_down, w_down_stride};
    p.h = h;
    p.y = y;
    return p;
  }
};

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    const GatedMlpDecodeParams params = call->params();
    DeviceTraits device;
    device.num_sms = call->num_sms;
    call->can_run = gated_mlp_decode_can_run(params, device);
    if (!call->can_run) return;
    GatedMlpDecodeConfig config = choose_gated_mlp_decode_config(params, device);
    for (size_t less = 0; call->stages > 0 && config.stages > call->stages; less += 1 << 10)
      decode::lay_out(kDecodeSteps, device.shared_bytes_of_block - less, &config);
    if (call->under_way > 0) config.under_way = std::min(config.under_way, call->under_way);
    call->rounds = config.rounds;
    call->rounds_counted = config.rounds_counted;
    call->passes = config.passes;
    call->down_tiles = config.down_tiles;
    emulation::check_launch(
        launch_gated_mlp_decode(params, config, {call->slot, call->counters}, nullptr));
    const unsigned* const counters =
        call->counters != nullptr ? call->counters : decode_counters[call->slot];
    for (int i = 0; i < kDecodeCounters; ++i)
      emulation::check(counters[i] == 0, "the counters are not what they were");
  });
}
