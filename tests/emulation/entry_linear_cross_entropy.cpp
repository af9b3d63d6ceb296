// One call of the linear_cross_entropy family as its binding makes it, with the launches emulated.
#include "entry.h"
#include "kernels/linear_cross_entropy.h"

namespace {

using namespace fusedcuda;

// Call in linear_cross_entropy_emulator.py.
struct Call {
  int dtype, num_sms;
  int64_t count;
  void* gradient;
  const void* factor;
  // Results: what was chosen.
  int vec;
  int64_t blocks;
};

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    DeviceTraits device;
    device.num_sms = call->num_sms;
    ScaleGradientParams params;
    params.dtype = static_cast<DType>(call->dtype);
    params.count = call->count;
    params.gradient = call->gradient;
    params.factor = call->factor;
    const ScaleGradientConfig config = choose_scale_gradient_config(params, device);
    emulation::check_launch(launch_scale_gradient(params, config, nullptr));
    call->vec = config.vec;
    call->blocks = config.blocks;
  });
}
