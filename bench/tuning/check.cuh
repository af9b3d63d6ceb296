// What every tuning program does with a status: 0 goes on, anything else ends it.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

// Of CUDA and of cuBLASLt, whose codes have no text here.
#define CHECK(call)                                                       \
  do {                                                                    \
    const int status = static_cast<int>(call);                            \
    if (status != 0) {                                                    \
      std::fprintf(stderr, "%s: %d %s\n", #call, status,                  \
                   cudaGetErrorString(static_cast<cudaError_t>(status))); \
      std::exit(1);                                                       \
    }                                                                     \
  } while (0)
