// A gated MLP of few rows in two launches for torch. Schemas and references are in
// fusedcuda/ops/gated_mlp.py.
#pragma once

#include <string>
#include <vector>

#include "../kernels/gated_mlp.h"
#include "../kernels/gated_mlp_few_config.h"
#include "few_rows_plan.h"
#include "gated_mlp_operands.h"

namespace fusedcuda {

class GatedMlpFew : GatedMlpOperands {
 public:
  GatedMlpFew(const Tensor& x, const Tensor& w_gate, const Tensor& w_up, const Tensor& w_down,
              int64_t activation)
      : GatedMlpOperands("gated_mlp_few", x, w_gate, w_up, w_down, activation) {}

  bool has_kernel(const DeviceTraits& device) const {
    return fits() && gated_mlp_few_can_run(params_, device);
  }

  // [y], or [] where there is no kernel.
  std::vector<Tensor> run() {
    const DeviceScope scope(device_index());
    const DeviceTraits& device = device_traits<gated_mlp_device_traits>(device_index());
    if (!has_kernel(device)) return {};
    Tensor h;
    std::vector<Tensor> outputs = allocate_outputs(&h);
    print_config([&] { return plan(device); });
    throw_on_error(launch_gated_mlp_few(params_, choose_gated_mlp_few_config(params_, device),
                                        current_stream(device_index())),
                   op_);
    return outputs;
  }

  // What run() launches, as JSON: of the launch for h, and, in "output", of the other one.
  std::string plan(const DeviceTraits& device) const {
    const GatedMlpFewConfig config = choose_gated_mlp_few_config(params_, device);
    return concat("{", json_members(), ", \"kernel\": \"gated_few_kernel\"",
                  few_rows_members(config.hidden),
                  ", \"output\": {\"kernel\": ", "\"linear_few_kernel\"",
                  few_rows_members(config.output), "}}");
  }
};

inline std::vector<Tensor> gated_mlp_few(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                                         const Tensor& w_down, int64_t activation) {
  return GatedMlpFew(x, w_gate, w_up, w_down, activation).run();
}

// What gated_mlp_few would launch, or "" where there is no kernel; see gated_mlp_decode_plan.
inline std::string gated_mlp_few_plan(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                                      const Tensor& w_down, int64_t activation, int64_t num_sms) {
  const GatedMlpFew call(x, w_gate, w_up, w_down, activation);
  const DeviceTraits device = planned_device<gated_mlp_device_traits>(num_sms);
  return call.has_kernel(device) ? call.plan(device) : "";
}

}  // namespace fusedcuda
