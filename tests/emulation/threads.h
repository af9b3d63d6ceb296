// The threads that run, as execution.cpp schedules them and device.cpp acts for them.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <memory>
#include <vector>

#include "fiber.h"
#include "guarded_memory.h"
#include "hopper.h"
#include "mailbox.h"
#include "static_shared.h"

namespace emulation {

enum class Wait {
  kNothing,
  kBarrier,
  kWarp,
  kPreviousKernel,
  kCluster,
  kMailbox,
  kBarrierObject,  // an Mbarrier
  kNamed,          // a named barrier
  kPoll,           // memory that another block may write
  kTurn,  // the last thread to arrive at the cluster's barrier lets the others pass it first
  kEnd,
};

struct Copy {
  std::byte* shared;
  const std::byte* global;
  size_t size;
  unsigned group;
};

struct Block;

struct Thread {
  explicit Thread(void (*run)()) : fiber(run) {}

  Fiber fiber;
  Block* block = nullptr;
  unsigned number = 0;  // in the block
  uint3 index = {};
  Wait wait = Wait::kNothing;
  int line = 0;              // of the last barrier or shuffle
  uint64_t value = 0;        // for the warp
  std::vector<Copy> copies;  // under way
  unsigned groups = 0;       // of copies, committed
  unsigned arrivals = 0;     // at the cluster's barrier
  unsigned waits = 0;        // that are over, there
  size_t mailbox = 0;        // that it waits for; its offset in dynamic shared memory
  HopperThread hopper;
};

struct Block {
  uint3 index = {};
  unsigned rank = 0;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::array<uint64_t, kLanes>> exchanged;  // a warp's values
  std::unique_ptr<GuardedMemory> shared;                // dynamic
  StaticShared static_shared;
  Mailboxes mailboxes;
  HopperBlock hopper;
  unsigned waits_needed = 0;  // at the cluster's barrier, before the block may end
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned arrived = 0;     // threads, at its barrier
  unsigned completed = 0;   // times that all have
  std::vector<Load> loads;  // under way
};

extern bool reversed;
extern bool previous_kernel_runs;
extern Cluster cluster;    // the one that runs
extern Thread* current;    // null on the host
extern int polls_in_vain;  // since anything else happened

// Back to the scheduler, until the thread's wait is over.
void suspend(Wait wait, int line);

// Ends the waits of this kind, in all blocks; whether there were any.
bool release(Wait wait);

}  // namespace emulation
