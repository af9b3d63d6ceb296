#include "static_shared.h"

#include <link.h>

#include <algorithm>
#include <cstdint>

namespace emulation {
namespace {

struct Range {
  std::byte* first = nullptr;
  size_t size = 0;
};

// Where this library's thread-local variables are: the segment beside that of our own code.
int find_in(dl_phdr_info* library, size_t, void* result) {
  const auto here = reinterpret_cast<uintptr_t>(&find_in);
  bool is_ours = false;
  size_t size = 0;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const ElfW(Phdr) & segment = library->dlpi_phdr[i];
    const uintptr_t start = library->dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD && here >= start && here - start < segment.p_memsz)
      is_ours = true;
    if (segment.p_type == PT_TLS) size = segment.p_memsz;
  }
  if (is_ours)
    *static_cast<Range*>(result) = {static_cast<std::byte*>(library->dlpi_tls_data), size};
  return is_ours;
}

Range variables() {
  static thread_local volatile char marker;
  marker = 0;  // they exist from here on
  static Range range;
  if (range.first == nullptr) dl_iterate_phdr(find_in, &range);
  return range;
}

StaticShared* present = nullptr;

}  // namespace

StaticShared::~StaticShared() {
  if (present == this) present = nullptr;
}

void StaticShared::reset() {
  saved_.assign(variables().size, std::byte{0xff});
  if (present == this) present = nullptr;
}

void StaticShared::enter() {
  if (present == this) return;
  const Range range = variables();
  if (present != nullptr) std::copy_n(range.first, range.size, present->saved_.begin());
  std::copy_n(saved_.begin(), range.size, range.first);
  present = this;
}

bool StaticShared::contains(const void* address) {
  const Range range = variables();
  return address >= range.first && address < range.first + range.size;
}

}  // namespace emulation
