// The product of a gated MLP as csrc/bindings/gated_mlp.cpp launches it, emulated.
#include "entry_gated_mlp.h"

#include "entry.h"
#include "kernels/gated_mlp_config.h"

using namespace fusedcuda;

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    const GatedProductParams params = call->params();
    const DeviceTraits device = call->device();
    emulation::check(gated_product_can_run(params, device), "the Hopper kernel cannot run this");
    GemmConfig config = choose_gated_product_config(params, device);
    if (call->group > 0) config.group = call->group;
    emulation::check_launch(launch_gated_product(params, config, nullptr));
  });
}
