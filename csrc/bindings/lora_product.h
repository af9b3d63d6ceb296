// A linear layer of many rows with its adapter in one launch for torch. Schemas and references are
// in fusedcuda/ops/lora.py.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../kernels/lora_product_config.h"
#include "lora_adapted.h"

namespace fusedcuda {

class LoraProduct : AdaptedLinear {
 public:
  explicit LoraProduct(const AdaptedArguments& a) : AdaptedLinear("lora_product", a) {}

  bool has_kernel(const DeviceTraits& device) const {
    return rows_can_be_read() && lora_product_can_run(params_, device);
  }

  // [y, t], or nothing where there is no kernel.
  std::vector<Tensor> run() {
    const DeviceScope scope(device_index());
    const DeviceTraits& device = device_traits<lora_product_device_traits>(device_index());
    if (!has_kernel(device)) return {};
    const std::vector<Tensor> outputs = allocate_outputs();
    const int64_t bytes =
        lora_product_counters(params_.linear.m) * static_cast<int64_t>(sizeof(unsigned));
    const Tensor counters = allocate_bytes(bytes);
    params_.counters = static_cast<unsigned*>(View(counters).data);
    const cudaStream_t stream = current_stream(device_index());
    throw_on_error(cudaMemsetAsync(params_.counters, 0, static_cast<size_t>(bytes), stream), op_);
    const GemmConfig config = choose_lora_product_config(params_, device);
    const Tensor parts =
        allocate_bytes(lora_product_parts(config.blocks) * static_cast<int64_t>(sizeof(float)));
    params_.parts = static_cast<float*>(View(parts).data);
    print_config([&] { return plan(device); });
    throw_on_error(launch_lora_product(params_, config, stream), op_);
    return outputs;
  }

  // What run() launches, as JSON.
  std::string plan(const DeviceTraits& device) const {
    const GemmConfig config = choose_lora_product_config(params_, device);
    return concat("{", json_members("lora_product_kernel_sm90"),
                  ", \"tile_rows\": ", config.tile_rows,
                  ", \"tile_columns\": ", config.tile_columns, ", \"cluster\": ", config.cluster,
                  ", \"group\": ", config.group, ", \"blocks\": ", config.blocks, "}");
  }
};

inline std::vector<Tensor> lora_product(const Tensor& x, const Tensor& weight,
                                        std::optional<Tensor> bias, const Tensor& down,
                                        const Tensor& up, double scale) {
  return LoraProduct({x, weight, bias, down, up, scale}).run();
}

// What lora_product would launch, or "" where there is no kernel. The operands may be CPU tensors,
// which stand for CUDA tensors of that layout.
inline std::string lora_product_plan(const Tensor& x, const Tensor& weight,
                                     std::optional<Tensor> bias, const Tensor& down,
                                     const Tensor& up, double scale, int64_t num_sms) {
  const LoraProduct product({x, weight, bias, down, up, scale});
  const DeviceTraits device = planned_device<lora_product_device_traits>(num_sms);
  return product.has_kernel(device) ? product.plan(device) : "";
}

}  // namespace fusedcuda
