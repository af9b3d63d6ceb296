// What an entry_<family>.cpp needs to be called from Python (emulator.py).
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <stdexcept>

#include "guarded_memory.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulation {

inline void check(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(message);
}

inline void check_launch(cudaError_t status) {
  if (status == cudaSuccess) return;
  throw std::runtime_error("a launch was refused with error " + std::to_string(status) +
                           ": grid, block, cluster, parameters or shared memory too large");
}

// Memory that a launcher needs besides tensors; starts as NaN.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : memory_(bytes) {}
  void* data() const { return memory_.data(); }
  void check() const {
    emulation::check(memory_.is_intact(), "the kernels wrote beside the workspace");
  }

 private:
  GuardedMemory memory_;
};

// Calls function(): 0, or -1 with what went wrong in `error`.
template <typename Function>
int report_errors(char* error, size_t error_size, Function&& function) {
  try {
    function();
    return 0;
  } catch (const std::exception& exception) {
    std::snprintf(error, error_size, "%s", exception.what());
    return -1;
  }
}

}  // namespace emulation
