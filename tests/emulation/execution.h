// What a caller of the emulation controls and sees; the kernels see include/cuda_runtime.h.
#pragma once

#include <cstddef>

namespace emulation {

// Blocks, and the threads between two barriers, run one after another: from the first to the last,
// or the other way round. A result that depends on it is a race.
void set_reversed(bool reversed);

// Memory whose bytes are all 0xff (a NaN in every floating type), 16-byte aligned, between pages
// that must not be touched. It ends at the second of them, but for what the alignment takes.
class GuardedMemory {
 public:
  explicit GuardedMemory(size_t size);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;

  std::byte* data() const { return data_; }
  // Whether what lies around the data, up to the pages, is still 0xff.
  bool is_intact() const;
  void allow_access(bool allow);

 private:
  size_t size_;
  size_t mapped_;
  std::byte* pages_;
  std::byte* data_;
};

}  // namespace emulation
