// A gated MLP of few rows in one launch for torch: checks, allocation, counters, launch.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels/gated_mlp.h"
#include "../kernels/gated_mlp_decode.h"
#include "../kernels/gated_mlp_decode_config.h"
#include "gated_mlp_operands.h"
#include "shim.h"

namespace fusedcuda {

// Which launches share counters: those that cannot run at the same time. On one stream they follow
// each other. Those of a captured graph may be replayed on any stream at any time, but in it follow
// each other again where one stream has captured them. So there is a slot for each stream, and one
// for each stream of each graph, which keeps it for good: nobody says when a graph is destroyed.
class DecodeSlots {
 public:
  // None, where all are taken.
  std::optional<int> find(int32_t device, cudaStream_t stream) {
    cudaStreamCaptureStatus status;
    unsigned long long capture = 0;
    throw_on_error(cudaStreamGetCaptureInfo(stream, &status, &capture), "gated_mlp_decode");
    if (stream == cudaStreamPerThread) return std::nullopt;  // a stream of each thread
    if (status == cudaStreamCaptureStatusNone) capture = 0;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<Key, int>& slots = slots_[device];
    const auto found = slots.find({capture, stream});
    if (found != slots.end()) return found->second;
    const int next = static_cast<int>(slots.size());
    if (next == kDecodeSlots) return std::nullopt;
    slots[{capture, stream}] = next;
    return next;
  }

 private:
  using Key = std::tuple<unsigned long long, cudaStream_t>;

  std::mutex mutex_;
  std::map<int32_t, std::map<Key, int>> slots_;  // of each device
};

// Never destroyed: other threads may be in a call when the process ends.
inline DecodeSlots& decode_slots() {
  static auto* const slots = new DecodeSlots;
  return *slots;
}

class GatedMlpDecode : GatedMlpOperands {
 public:
  GatedMlpDecode(const Tensor& x, const Tensor& w_gate, const Tensor& w_up, const Tensor& w_down,
                 int64_t activation)
      : GatedMlpOperands("gated_mlp_decode", x, w_gate, w_up, w_down, activation) {}

  bool has_kernel(const DeviceTraits& device) const {
    return fits() && gated_mlp_decode_can_run(params_, device);
  }

  // [y], or [] where there is no kernel.
  std::vector<Tensor> run() {
    const DeviceScope scope(device_index());
    const DeviceTraits& device = device_traits<gated_mlp_device_traits>(device_index());
    if (!has_kernel(device)) return {};
    const cudaStream_t stream = current_stream(device_index());
    Tensor h;
    std::vector<Tensor> outputs = allocate_outputs(&h);
    std::optional<Tensor> memory;
    const DecodeCounters counters = find_counters(stream, &memory);
    print_config([&] { return plan(device); });
    throw_on_error(launch_gated_mlp_decode(params_, choose_gated_mlp_decode_config(params_, device),
                                           counters, stream),
                   op_);
    return outputs;
  }

  // What run() launches, as JSON.
  std::string plan(const DeviceTraits& device) const {
    const GatedMlpDecodeConfig config = choose_gated_mlp_decode_config(params_, device);
    return concat("{", json_members(),
                  ", \"kernel\": \"gated_mlp_decode_kernel_sm90\", \"threads\": ", kDecodeThreads,
                  ", \"blocks\": ", config.blocks,
                  ", \"rows\": ", config.column_tiles * kDecodeColumns,
                  ", \"rounds\": ", config.rounds, ", \"passes\": ", config.passes,
                  ", \"stages\": ", config.stages, ", \"under_way\": ", config.under_way,
                  ", \"shared_bytes\": ", config.shared_bytes, "}");
  }

 private:
  // Those of a slot, or in `memory` for the length of a call.
  DecodeCounters find_counters(cudaStream_t stream, std::optional<Tensor>* memory) const {
    if (const auto slot = decode_slots().find(device_index(), stream)) return {*slot};
    constexpr size_t kBytes = kDecodeCounters * sizeof(unsigned);
    memory->emplace(allocate(1, kDecodeCounters, aoti_torch_dtype_int32()));
    auto* const counters = static_cast<unsigned*>(View(**memory).data);
    throw_on_error(cudaMemsetAsync(counters, 0, kBytes, stream), op_);
    return {0, counters};
  }
};

inline std::vector<Tensor> gated_mlp_decode(const Tensor& x, const Tensor& w_gate,
                                            const Tensor& w_up, const Tensor& w_down,
                                            int64_t activation) {
  return GatedMlpDecode(x, w_gate, w_up, w_down, activation).run();
}

// What gated_mlp_decode would launch, or "" where there is no kernel. The operands may be CPU
// tensors, which stand for CUDA tensors of that layout.
inline std::string gated_mlp_decode_plan(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                                         const Tensor& w_down, int64_t activation,
                                         int64_t num_sms) {
  const GatedMlpDecode call(x, w_gate, w_up, w_down, activation);
  const DeviceTraits device = planned_device<gated_mlp_device_traits>(num_sms);
  return call.has_kernel(device) ? call.plan(device) : "";
}

}  // namespace fusedcuda
