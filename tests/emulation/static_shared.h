#pragma once

#include <cstddef>
#include <vector>

namespace emulation {

// The __shared__ variables of a block. They are the thread-local variables of this library (see
// cuda_runtime.h), which has no others; the blocks of a cluster take turns in having theirs there.
class StaticShared {
 public:
  ~StaticShared();

  // As they are when a block starts: bytes of 0xff, where a GPU has what the last block left.
  void reset();
  // Brings them to where the kernels find them, and saves those that were there.
  void enter();

  static bool contains(const void* address);

 private:
  std::vector<std::byte> saved_;
};

}  // namespace emulation
