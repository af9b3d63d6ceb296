#include <map>
#include <string>

#include "entry.h"
#include "execution.h"
#include "toys.h"

namespace {

std::map<std::string, Toy*>& toys() {
  static std::map<std::string, Toy*> all;
  return all;
}

__global__ void nothing() {}

}  // namespace

Toy::Toy(const char* name, Function function, fusedcuda::LaunchOptions options)
    : function(function), options(options) {
  toys()[name] = this;
}

// Runs a toy on `data`.
EXPORT int run_toy(const char* name, float* data, char* error, size_t error_size) {
  const emulation::Workspace memory(kThreads * sizeof(float));
  float* values = static_cast<float*>(memory.data());
  for (int i = 0; i < kThreads; ++i) values[i] = static_cast<float>(i);
  return emulation::report_errors(error, error_size, [&] {
    const Toy& toy = *toys().at(name);
    emulation::check_launch(
        fusedcuda::launch(toy.function, 2, kThreads, toy.options, nullptr, values));
    std::copy_n(values, kThreads, data);
  });
}

EXPORT void forget_allowances() { emulation::forget_allowances(); }

// What the runtime says to a launch of `blocks` blocks that fusedcuda::launch() does not prepare.
EXPORT int launch_unprepared(int blocks, int cluster, size_t shared_bytes) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, nothing);
}

// The same, prepared.
EXPORT int launch_prepared(int blocks, int cluster, size_t shared_bytes) {
  return fusedcuda::launch(nothing, blocks, kThreads, {false, cluster, shared_bytes}, nullptr);
}
