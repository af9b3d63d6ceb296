// One softmax call as csrc/bindings/softmax.cpp makes it, with the launch emulated.
#include "kernels/softmax.h"
#include "rows.h"

namespace {

using namespace fusedcuda;

// Call in softmax_emulator.py.
struct Call {
  emulation::Rows rows;
  emulation::Matrix x, dy, y, dx;  // x and y, or dy, y and dx
  double scale;
  int log, backward;
  emulation::Chosen chosen;
};

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    const DeviceTraits device = emulation::device_of(call->rows);
    auto matrix = [&](const emulation::Matrix& given) {
      return emulation::matrix_of(call->rows, given);
    };
    auto describe = [&](auto* params) {
      emulation::set_rows(call->rows, params);
      params->log = call->log;
      params->scale = call->scale;
      params->y = matrix(call->y);
    };
    RowConfig config;
    if (call->backward) {
      SoftmaxBwdParams params;
      describe(&params);
      params.dy = matrix(call->dy);
      params.dx = matrix(call->dx);
      config = choose_softmax_bwd_config(params, device);
      emulation::check_launch(launch_softmax_bwd(params, config, nullptr));
    } else {
      SoftmaxParams params;
      describe(&params);
      params.x = matrix(call->x);
      config = choose_softmax_config(params, device);
      emulation::check_launch(launch_softmax(params, config, nullptr));
    }
    call->chosen = emulation::chosen(config);
  });
}
