// Small kernels, right and wrong ones, to test the emulator with. Each is run by two blocks of 64
// threads on 64 floats, which are 0, 1, ..., 63 at first.
#pragma once

#include "kernels/common/launch.h"

constexpr int kThreads = 64;

struct Toy {
  using Function = void (*)(float*);
  Toy(const char* name, Function function, fusedcuda::LaunchOptions options);

  Function function;
  fusedcuda::LaunchOptions options;
};

// TOY(kernel, cluster, shared_bytes, cooperative = false): all of them are dependent launches.
#define TOY(name, ...) const Toy name##_toy(#name, name, {true, __VA_ARGS__})
