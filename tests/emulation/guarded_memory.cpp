#include "guarded_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <stdexcept>

namespace emulation {
namespace {

std::set<GuardedMemory*> global_memories;

// More than a kernel has that does not use the copy engine for whole tiles.
constexpr size_t kLargeShared = 128 << 10;

// On each side of the data: room for an offset that is off by rows, not only by elements.
size_t guard_size() { return 64 * sysconf(_SC_PAGESIZE); }

}  // namespace

GuardedMemory::GuardedMemory(size_t size, Kind kind) : size_(size) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t guard = guard_size();
  const size_t alignment = kind == kShared && size > kLargeShared ? 1024 : 16;
  const size_t padded = (size + alignment - 1) / alignment * alignment;
  mapped_ = (padded + page - 1) / page * page + 2 * guard;
  void* pages = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::runtime_error("no memory");
  pages_ = static_cast<std::byte*>(pages);
  std::fill(pages_ + guard, pages_ + mapped_ - guard, std::byte{0xff});
  mprotect(pages_, guard, PROT_NONE);
  mprotect(pages_ + mapped_ - guard, guard, PROT_NONE);
  data_ = pages_ + mapped_ - guard - padded;
  if (kind == kGlobal) global_memories.insert(this);
}

GuardedMemory::~GuardedMemory() {
  global_memories.erase(this);
  munmap(pages_, mapped_);
}

void GuardedMemory::fill() { std::fill_n(data_, size_, std::byte{0xff}); }

bool GuardedMemory::is_intact() const {
  const size_t guard = guard_size();
  auto untouched = [](std::byte byte) { return byte == std::byte{0xff}; };
  return std::all_of(pages_ + guard, data_, untouched) &&
         std::all_of(data_ + size_, pages_ + mapped_ - guard, untouched);
}

void GuardedMemory::allow_access(bool allow) {
  const size_t guard = guard_size();
  const int protection = allow ? PROT_READ | PROT_WRITE : PROT_NONE;
  for (GuardedMemory* memory : global_memories)
    mprotect(memory->pages_ + guard, memory->mapped_ - 2 * guard, protection);
}

}  // namespace emulation
