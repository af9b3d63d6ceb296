#pragma once

#include <cstddef>

namespace emulation {

// Memory whose bytes are all 0xff (a NaN in every floating type), 16-byte aligned (shared memory
// for tiles, which is large: 1024), between pages that must not be touched. It ends at the second
// of them, but for what the alignment takes.
class GuardedMemory {
 public:
  enum Kind { kGlobal, kShared };  // global memory may belong to the previous kernel

  explicit GuardedMemory(size_t size, Kind kind = kGlobal);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  bool contains(const void* address) const { return address >= data_ && address < data_ + size_; }
  // Makes all bytes of the data 0xff again.
  void fill();
  // Whether what lies around the data, up to the pages, is still 0xff.
  bool is_intact() const;

  // Of all global memory there is.
  static void allow_access(bool allow);

 private:
  size_t size_;
  size_t mapped_;
  std::byte* pages_;
  std::byte* data_;
};

}  // namespace emulation
