// Where the steps of a call are planned for and run: a device with torch's settings, or none.
#pragma once

#include <atomic>
#include <string>

#include "linear_act_call.h"
#include "linear_act_runner.h"

namespace fusedcuda {

// Both are never destroyed: other threads may be in a call when the process ends.
inline PlanCache& plan_cache() {
  static auto* const cache = new PlanCache;
  return *cache;
}

inline EpilogueSupport& epilogue_support() {
  static auto* const support = new EpilogueSupport;
  return *support;
}

// What linear_act_use() has chosen.
inline std::atomic<LinearBackend>& linear_backend() {
  static std::atomic<LinearBackend> backend{LinearBackend::kMeasured};
  return backend;
}

// NVIDIA's recommendation.
inline size_t workspace_limit(const DeviceTraits& device) {
  return device.clusters ? 32 << 20 : 4 << 20;
}

// The current device as a source of plans.
inline PlanSource current_plan_source(int32_t device_index) {
  PlanSource source;
  source.backend = linear_backend();
  source.cache = &plan_cache();
  source.support = &epilogue_support();
  source.device = device_traits<linear_act_device_traits>(device_index);
  source.context.handle = cublaslt_handle(device_index);
  source.context.workspace_limit = workspace_limit(source.device);
  return source;
}

// The device of CUDA tensors, current for as long as this lives. CPU tensors, of which only plans
// are made, stand for ones on the current device, or on an H200 that nobody has to ask.
class Target {
 public:
  explicit Target(const View& view) {
    if (!view.on_cpu()) {
      index_ = view.device_index;
    } else if (int count; cudaGetDeviceCount(&count) == cudaSuccess && count > 0) {
      check_shim(aoti_torch_get_current_device_index(&index_), "the current device");
    } else {
      cudaGetLastError();  // that there is no device is no error
      source_.backend = linear_backend();
      source_.support = &epilogue_support();
      return;
    }
    scope_.emplace(index_);
    source_ = current_plan_source(index_);
  }

  // The settings of a call for its layer.
  LinearLayer settle(LinearLayer layer, bool low_precision) const {
    layer.low_precision_reduction = low_precision;
    layer.device = index_;
    layer.allows_tf32 =
        source_.cache != nullptr && layer.dtype == DType::kFloat32 && torch_allows_tf32();
    return layer;
  }

  const PlanSource& source() const { return source_; }

  template <typename Plan>
  void run(const char* op, const LinearLayer& layer, const Copies& copies, const Plan& plan) const {
    TorchRunner runner(op, layer.dtype, source_, index_);
    const Steps steps = run_planned(plan, source_, runner);
    print_config([&] { return report(op, layer, copies, steps); });
  }

  // The steps of a call as JSON.
  static std::string report(const char* op, const LinearLayer& layer, const Copies& copies,
                            const Steps& steps) {
    return concat("{\"op\": \"", op, "\", \"m\": ", layer.m, ", \"n\": ", layer.n,
                  ", \"k\": ", layer.k, ", \"batch\": ", layer.batch,
                  ", \"steps\": ", describe(steps), ", \"copies\": [", copies.names(), "]}");
  }

 private:
  std::optional<DeviceScope> scope_;
  int32_t index_ = 0;
  PlanSource source_;
};

}  // namespace fusedcuda
