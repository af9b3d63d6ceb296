// A linear layer of few rows with its adapter in one launch for torch. Schemas and references are
// in fusedcuda/ops/lora.py.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../kernels/lora_decode_config.h"
#include "few_rows_plan.h"
#include "linear_act_call.h"
#include "lora_adapted.h"

namespace fusedcuda {

class LoraDecode : AdaptedLinear {
 public:
  LoraDecode(const AdaptedArguments& a, int64_t activation) : AdaptedLinear("lora_decode", a) {
    params_.linear.activation = activation_of(op_, activation);
  }

  bool has_kernel(const DeviceTraits& device) const {
    return rows_can_be_read() && lora_decode_can_run(params_, device);
  }

  // [y, t], or nothing where there is no kernel.
  std::vector<Tensor> run() {
    const DeviceScope scope(device_index());
    const DeviceTraits& device = device_traits<lora_decode_device_traits>(device_index());
    if (!has_kernel(device)) return {};
    const std::vector<Tensor> outputs = allocate_outputs();
    print_config([&] { return plan(device); });
    throw_on_error(launch_lora_decode(params_, choose_lora_decode_config(params_, device),
                                      current_stream(device_index())),
                   op_);
    return outputs;
  }

  // What run() launches, as JSON.
  std::string plan(const DeviceTraits& device) const {
    return concat("{", json_members("lora_decode_kernel"),
                  few_rows_members(choose_lora_decode_config(params_, device)), "}");
  }
};

inline std::vector<Tensor> lora_decode(const Tensor& x, const Tensor& weight,
                                       std::optional<Tensor> bias, const Tensor& down,
                                       const Tensor& up, double scale, int64_t activation) {
  return LoraDecode({x, weight, bias, down, up, scale}, activation).run();
}

// What lora_decode would launch, or "" where there is no kernel; see lora_product_plan.
inline std::string lora_decode_plan(const Tensor& x, const Tensor& weight,
                                    std::optional<Tensor> bias, const Tensor& down,
                                    const Tensor& up, double scale, int64_t activation,
                                    int64_t num_sms) {
  const LoraDecode decode({x, weight, bias, down, up, scale}, activation);
  const DeviceTraits device = planned_device<lora_decode_device_traits>(num_sms);
  return decode.has_kernel(device) ? decode.plan(device) : "";
}

}  // namespace fusedcuda
