// Barriers in shared memory, the copy engine and the tensor cores of Hopper: what mbarrier.cuh,
// tma.cuh and wgmma.cuh stand for.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace emulation {

struct Block;
struct Thread;

// An Mbarrier of a block.
struct Barrier {
  unsigned arrivals = 0;      // that end a round
  unsigned arrived = 0;       // in this round
  int64_t bytes_missing = 0;  // that were announced in this round and have not come, or vice versa
  unsigned rounds = 0;        // that are over
};

// A box, or neighbouring bytes, on the way to shared memory.
struct Load {
  Block* block;
  size_t to, barrier;  // offsets in its dynamic shared memory
  std::vector<std::byte> rows;
};

// A box on its way from shared memory, or a product that is being computed; nobody may rely on
// when it happens until it has been waited for.
struct Pending {
  std::function<void()> happen;
  unsigned group;
};

struct PendingList {
  std::vector<Pending> items;
  unsigned groups = 0;  // committed

  void add(std::function<void()> happen);
  void wait(unsigned pending);
};

struct HopperBlock {
  std::map<size_t, Barrier> barriers;  // the keys are offsets in dynamic shared memory
  std::map<int, unsigned> arrived;     // at each named barrier
};

struct HopperThread {
  size_t barrier = 0;  // that it waits for, and with which parity
  unsigned parity = 0;
  int named = 0;
  PendingList products, stores;
  bool has_unfenced_stores = false;  // to shared memory, that the copy engine may not see
};

// Lets the boxes arrive that are on their way; whether there were any.
bool deliver_boxes();

// What is wrong with a thread, or a block, that has ended, or null.
const char* find_hopper_error(const Thread& thread);
const char* find_hopper_error(const Block& block);

}  // namespace emulation
