// A gated MLP of few rows in one launch for torch: checks, allocation, counters, launch.
#pragma once

#include <cstdio>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels/gated_mlp.h"
#include "../kernels/gated_mlp_decode.h"
#include "../kernels/gated_mlp_decode_config.h"
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

class GatedMlpDecode {
 public:
  GatedMlpDecode(const Tensor& x, const Tensor& w_gate, const Tensor& w_up, const Tensor& w_down,
                 int64_t activation)
      : x_(x) {
    const View gate(w_gate), up(w_up), down(w_down);
    if (x_.dim != 2) fail(kOp, ": x must be a matrix (M, K); got shape ", shape_of(x_));
    if (activation < 0 || activation >= kNumActivations)
      fail(kOp, ": activation must be a code from 0 to ", kNumActivations - 1, "; got ",
           activation);
    const std::optional<DType> dtype = dtype_of(x_);
    if (!dtype) fail(kOp, ": x must be a float64, float32, float16 or bfloat16 tensor");
    if (gate.dim != 2) fail(kOp, ": w_gate must be a matrix (F, K); got shape ", shape_of(gate));
    if (down.dim != 2) fail(kOp, ": w_down must be a matrix (N, F); got shape ", shape_of(down));
    const int64_t m = x_.sizes[0], k = x_.sizes[1], f = gate.sizes[0], n = down.sizes[0];
    params_.dtype = *dtype;
    params_.activation = static_cast<Activation>(activation);
    params_.x = matrix("x", x_, m, k);
    params_.w_gate = matrix("w_gate", gate, f, k);
    params_.w_up = matrix("w_up", up, f, k);
    params_.w_down = matrix("w_down", down, n, f);
    fits_ &= std::max({m, k, f, n}) <= std::numeric_limits<int>::max() / 2;
    if (!fits_) return;
    params_.m = static_cast<int>(m);
    params_.k = static_cast<int>(k);
    params_.f = static_cast<int>(f);
    params_.n = static_cast<int>(n);
  }

  bool has_kernel(const DeviceTraits& device) const {
    return fits_ && gated_mlp_decode_can_run(params_, device);
  }

  // [y], or [] where there is no kernel.
  std::vector<Tensor> run() {
    const DeviceScope scope(x_.device_index);
    const DeviceTraits& device = device_traits<gated_mlp_device_traits>(x_.device_index);
    if (!has_kernel(device)) return {};
    const cudaStream_t stream = current_stream(x_.device_index);
    const Tensor h = allocate(params_.m, params_.f, x_.dtype);
    std::vector<Tensor> outputs = {allocate(params_.m, params_.n, x_.dtype)};
    params_.h = View(h).data;
    params_.y = View(outputs[0]).data;
    std::optional<Tensor> memory;
    const DecodeCounters counters = find_counters(stream, &memory);
    static const bool prints = environment_flag("FUSEDCUDA_PRINT_CONFIG");
    if (prints) std::fprintf(stderr, "fusedcuda: %s\n", plan(device).c_str());
    throw_on_error(launch_gated_mlp_decode(params_, choose_gated_mlp_decode_config(params_, device),
                                           counters, stream),
                   kOp);
    return outputs;
  }

  // What run() launches, as JSON.
  std::string plan(const DeviceTraits& device) const {
    const GatedMlpDecodeConfig config = choose_gated_mlp_decode_config(params_, device);
    return concat("{\"op\": \"", kOp, "\", \"m\": ", params_.m, ", \"k\": ", params_.k,
                  ", \"f\": ", params_.f, ", \"n\": ", params_.n,
                  ", \"kernel\": \"gated_mlp_decode_kernel_sm90\", \"threads\": ", kDecodeThreads,
                  ", \"blocks\": ", config.blocks,
                  ", \"rows\": ", config.column_tiles * kDecodeColumns,
                  ", \"rounds\": ", config.rounds, ", \"passes\": ", config.passes,
                  ", \"stages\": ", config.stages, ", \"under_way\": ", config.under_way,
                  ", \"shared_bytes\": ", config.shared_bytes, "}");
  }

 private:
  static constexpr const char* kOp = "gated_mlp_decode";

  static std::string shape_of(const View& view) { return shape_string(view.sizes, view.dim); }

  // That the elements of a row lie side by side is what the kernel wants, and no error where they
  // do not.
  GemmMatrix matrix(const char* name, const View& view, int64_t rows, int64_t columns) {
    if (view.device_type != x_.device_type || view.device_index != x_.device_index)
      fail(kOp, ": ", name, " is on another device than x");
    if (view.dtype != x_.dtype) fail(kOp, ": ", name, " must have the dtype of x");
    if (view.dim != 2 || view.sizes[0] != rows || view.sizes[1] != columns)
      fail(kOp, ": ", name, " must have shape (", rows, ", ", columns, "); got ", shape_of(view));
    // The next row of a single one is nobody's: it may be anywhere.
    const int64_t stride = rows > 1 ? view.strides[0] : ceil_div(columns, 8) * 8;
    fits_ &= (columns == 1 || view.strides[1] == 1) && stride >= columns;
    return {view.data, stride};
  }

  // Those of a slot, or in `memory` for the length of a call.
  DecodeCounters find_counters(cudaStream_t stream, std::optional<Tensor>* memory) const {
    if (const auto slot = decode_slots().find(x_.device_index, stream)) return {*slot};
    constexpr size_t kBytes = kDecodeCounters * sizeof(unsigned);
    memory->emplace(allocate(1, kDecodeCounters, aoti_torch_dtype_int32()));
    auto* const counters = static_cast<unsigned*>(View(**memory).data);
    throw_on_error(cudaMemsetAsync(counters, 0, kBytes, stream), kOp);
    return {0, counters};
  }

  Tensor allocate(int64_t rows, int64_t columns, int32_t dtype) const {
    const int64_t sizes[2] = {rows, columns};
    return empty_contiguous(sizes, 2, dtype, x_.device_type, x_.device_index);
  }

  View x_;
  GatedMlpDecodeParams params_;
  bool fits_ = true;
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
