// What kernels call, for the thread that runs.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "threads.h"

namespace emulation {

void complain(const char* what) {
  if (current == nullptr) throw std::runtime_error(std::string("the host code") + what);
  Fiber::give_up(what);
}

void assertion_fails(const char* condition, int line) {
  static char assertion[200];
  std::snprintf(assertion, sizeof(assertion), " fails an assertion in line %d: %s", line,
                condition);
  complain(assertion);
}

void barrier(int line) { suspend(Wait::kBarrier, line); }

void wait_for_previous_kernel() {
  if (previous_kernel_runs) suspend(Wait::kPreviousKernel, 0);
}

int lane() { return static_cast<int>(current->number % kLanes); }

const uint64_t* exchange(int line, unsigned participants, uint64_t value) {
  if (participants != kAllLanes) complain(" leaves lanes out of a warp's operation");
  current->value = value;
  suspend(Wait::kWarp, line);
  return current->block->exchanged[current->number / kLanes].data();
}

void* dynamic_shared() { return current->block->shared->data(); }

void copy_async(void* shared, const void* global, size_t size) {
  auto is_aligned = [=](const void* p) { return reinterpret_cast<uintptr_t>(p) % size == 0; };
  if (!is_aligned(shared) || !is_aligned(global))
    complain(" copies from or to an address that is not a multiple of the size");
  if (!current->block->shared->contains(shared) && !StaticShared::contains(shared))
    complain(" copies asynchronously to what is not shared memory");
  const Copy copy = {static_cast<std::byte*>(shared), static_cast<const std::byte*>(global), size,
                     current->groups};
  *static_cast<const volatile char*>(global);  // is an error here and not where it is waited for
  if (reversed) std::memcpy(shared, global, size);
  current->copies.push_back(copy);
}

void copy_async_commit() { ++current->groups; }

void copy_async_wait(unsigned pending) {
  std::vector<Copy>& copies = current->copies;
  const auto arrives = [&](const Copy& copy) { return copy.group + pending < current->groups; };
  const auto end = std::find_if_not(copies.begin(), copies.end(), arrives);
  for (auto copy = copies.begin(); copy != end && !reversed; ++copy)
    std::memcpy(copy->shared, copy->global, copy->size);
  copies.erase(copies.begin(), end);
}

unsigned poll(const unsigned* address) {
  const unsigned before = *address;
  suspend(Wait::kPoll, current->line);
  if (*address != before) polls_in_vain = 0;
  return *address;
}

unsigned cluster_rank() { return current->block->rank; }

unsigned cluster_size() { return static_cast<unsigned>(cluster.blocks.size()); }

// Threads run ahead to their cluster_wait(). The last one to arrive instead stays behind while the
// others pass theirs: nobody may rely on what it does before its own.
void cluster_arrive() {
  if (current->arrivals != current->waits)
    complain(" calls cluster_arrive() twice without cluster_wait() in between");
  ++current->arrivals;
  if (++cluster.arrived < cluster.blocks.size() * cluster.blocks[0]->threads.size()) return;
  cluster.arrived = 0;
  ++cluster.completed;
  release(Wait::kCluster);
  suspend(Wait::kTurn, current->line);
}

void cluster_wait() {
  if (current->arrivals == current->waits)
    complain(" calls cluster_wait() without cluster_arrive()");
  if (cluster.completed < current->arrivals) suspend(Wait::kCluster, current->line);
  ++current->waits;
}

void* map_to_cluster(void* shared, unsigned rank) {
  const Block& own = *current->block;
  if (rank >= cluster.blocks.size()) complain(" stores to a block that its cluster does not have");
  if (!own.shared->contains(shared))
    complain(" stores to the cluster by an address outside of its dynamic shared memory");
  Block& other = *cluster.blocks[rank];
  if (rank != own.rank) {
    if (current->waits == 0) complain(" stores to a block that may not have started");
    other.waits_needed = std::max(other.waits_needed, current->arrivals + 1);
  }
  return other.shared->data() + (static_cast<std::byte*>(shared) - own.shared->data());
}

}  // namespace emulation
