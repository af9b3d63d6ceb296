// Threads are fibers: each runs until its next barrier or shuffle. Between barriers the order is as
// unkind as it can be: a thread is through with all its work before the next one starts. The blocks
// of a cluster, or of a cooperative launch, take turns when all their threads wait.
#include "execution.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

#include "threads.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {

bool reversed = false;
bool previous_kernel_runs = false;
Cluster cluster;
Thread* current = nullptr;
int polls_in_vain = 0;

namespace {

const std::function<void()>* thread_function = nullptr;
std::vector<std::unique_ptr<Thread>> spare_threads;

std::string text(const char* name, const uint3& at) {
  return std::string(name) + " (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
         std::to_string(at.z) + ")";
}

std::string state(const Thread& thread) {
  const std::string line = std::to_string(thread.line);
  const std::string after_line = thread.line == 0 ? "" : ", after line " + line;
  switch (thread.wait) {
    case Wait::kBarrier:
      return text("thread", thread.index) + " waits at the barrier in line " + line;
    case Wait::kWarp:
      return text("thread", thread.index) + " waits for its warp in line " + line;
    case Wait::kCluster:
      return text("thread", thread.index) + " waits at the cluster's barrier";
    case Wait::kBarrierObject:
      return text("thread", thread.index) + " waits for the barrier at byte " +
             std::to_string(thread.hopper.barrier) + " of shared memory";
    case Wait::kNamed:
      return text("thread", thread.index) + " waits at barrier " +
             std::to_string(thread.hopper.named);
    case Wait::kPoll:
      return text("thread", thread.index) + " polls memory that nobody writes any more";
    case Wait::kMailbox:
      return text("thread", thread.index) + " waits for " + describe_mail(thread) + after_line;
    default:
      return text("thread", thread.index) + " has ended" + after_line;
  }
}

[[noreturn]] void fail(const std::string& what) {
  cluster.blocks.clear();  // some threads are in the middle of a kernel
  if (previous_kernel_runs) GuardedMemory::allow_access(true);
  previous_kernel_runs = false;
  throw std::runtime_error(what + " in " + text("block", blockIdx) + " of " +
                           text("grid", gridDim) + ", " + text("blockDim", blockDim));
}

void run_thread() {
  for (;;) {
    (*thread_function)();
    if (!current->copies.empty()) complain(" ends with copies that nobody has waited for");
    if (const char* error = find_hopper_error(*current)) complain(error);
    if (current->arrivals != current->waits)
      complain(" ends without cluster_wait() behind its last cluster_arrive()");
    current->wait = Wait::kEnd;
    current->fiber.suspend();
  }
}

void resume(Thread& thread) {
  current = &thread;
  threadIdx = thread.index;
  const char* error = thread.fiber.resume();
  current = nullptr;
  if (error == nullptr) return;
  if (error == kBadAccess && previous_kernel_runs)
    error = " touches memory before the previous kernel ends";
  fail(text("thread", threadIdx) + error);
}

bool wait_for_the_same(const Thread& a, const Thread& b) {
  const bool line_matters = a.wait == Wait::kBarrier || a.wait == Wait::kWarp;
  if (a.wait == Wait::kMailbox && b.wait == a.wait) return a.mailbox == b.mailbox;
  if (a.wait == Wait::kBarrierObject && b.wait == a.wait)
    return a.hopper.barrier == b.hopper.barrier;
  return a.wait == b.wait && (!line_matters || a.line == b.line);
}

// Whether the block's threads in [first, last) all wait for the same, and for that.
bool all_wait_for(Wait wait, const Block& block, unsigned first, unsigned last) {
  for (unsigned i = first; i < last; ++i) {
    const Thread& thread = *block.threads[i];
    if (thread.wait != wait || !wait_for_the_same(thread, *block.threads[first])) return false;
  }
  return true;
}

// Lets the threads go on that wait for this; whether there are any.
bool release(Wait wait, Block& block) {
  bool any = false;
  for (const auto& thread : block.threads) {
    if (thread->wait != wait) continue;
    thread->wait = Wait::kNothing;
    any = true;
  }
  return any;
}

// The i-th of `count` in the order of this run.
unsigned in_order(unsigned i, unsigned count) { return reversed ? count - 1 - i : i; }

// Until the warp's threads have ended or wait for those of other warps.
void run_warp(Block& block, unsigned warp) {
  const unsigned first = warp * kLanes;
  const unsigned count = static_cast<unsigned>(block.threads.size());
  const unsigned size = std::min<unsigned>(kLanes, count - first);
  for (;;) {
    for (unsigned i = 0; i < size; ++i) {
      Thread& thread = *block.threads[first + in_order(i, size)];
      if (thread.wait == Wait::kNothing) resume(thread);
    }
    if (size < kLanes || !all_wait_for(Wait::kWarp, block, first, first + size)) return;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      Thread& thread = *block.threads[first + lane];
      block.exchanged[warp][lane] = thread.value;
      thread.wait = Wait::kNothing;
    }
  }
}

// Until the block's threads have ended or wait for something outside of it.
void run_block(Block& block) {
  blockIdx = block.index;
  block.static_shared.enter();
  const unsigned count = static_cast<unsigned>(block.threads.size());
  const unsigned warps = static_cast<unsigned>(block.exchanged.size());
  do {
    for (unsigned i = 0; i < warps; ++i) run_warp(block, in_order(i, warps));
  } while (all_wait_for(Wait::kBarrier, block, 0, count) && release(Wait::kBarrier, block));
}

bool any_can_run() {
  for (const auto& block : cluster.blocks) {
    for (const auto& thread : block->threads) {
      if (thread->wait == Wait::kNothing) return true;
    }
  }
  return false;
}

// Lets threads look again that poll memory, unless they have so often seen nothing new while nobody
// did anything else.
bool look_again() {
  constexpr int kMostInVain = 100;
  return polls_in_vain++ < kMostInVain && release(Wait::kPoll);
}

// Whether some threads of the cluster can go on, now that every block waits for another.
bool next_turn() {
  if (previous_kernel_runs) {
    previous_kernel_runs = false;
    GuardedMemory::allow_access(true);
    release(Wait::kPreviousKernel);
    return true;
  }
  if (reversed && look_again()) return true;
  if (any_can_run() || release(Wait::kTurn) || deliver_mail() || deliver_boxes()) {
    polls_in_vain = 0;
    return true;
  }
  return look_again();
}

[[noreturn]] void fail_diverged(const Thread& a, const Thread& b) {
  blockIdx = a.block->index;
  std::string other = a.block == b.block ? "" : " in " + text("block", b.block->index);
  const char* what = a.wait == Wait::kMailbox && b.wait == a.wait ? "mail does not come: "
                                                                  : "threads do not meet: ";
  fail(what + state(a) + ", " + state(b) + other);
}

// Every thread must have ended. If not, two that wait for different things say why: neighbours in
// a warp, else in a block, else in two blocks.
void check_end() {
  bool ended = true;
  for (const auto& block : cluster.blocks)
    ended &= all_wait_for(Wait::kEnd, *block, 0, static_cast<unsigned>(block->threads.size()));
  if (ended) return;
  for (bool within_a_warp : {true, false}) {
    for (const auto& block : cluster.blocks) {
      for (unsigned i = 1; i < block->threads.size(); ++i) {
        if (within_a_warp && i % kLanes == 0) continue;
        const Thread &a = *block->threads[i - 1], &b = *block->threads[i];
        if (!wait_for_the_same(a, b)) fail_diverged(a, b);
      }
    }
  }
  for (const auto& block : cluster.blocks) {
    const Thread &a = *cluster.blocks[0]->threads[0], &b = *block->threads[0];
    if (!wait_for_the_same(a, b)) fail_diverged(a, b);
  }
  // All wait for their mailboxes, or they are warps of fewer than 32 threads.
  fail_diverged(*cluster.blocks[0]->threads[0], *cluster.blocks.back()->threads.back());
}

void check_shared_memory(const Block& block) {
  blockIdx = block.index;
  if (!block.shared->is_intact()) fail("the threads wrote behind their dynamic shared memory");
  if (const char* error = find_mail_error(block)) fail(error);
  if (const char* error = find_hopper_error(block)) fail(error);
  for (const auto& thread : block.threads) {
    if (thread->waits >= block.waits_needed) return;
  }
  fail("other blocks may store into shared memory after the last thread has ended");
}

void start(Block& block) {
  for (const auto& thread : block.threads) {
    thread->wait = Wait::kNothing;
    thread->arrivals = thread->waits = thread->groups = 0;
    thread->line = 0;
    thread->hopper = {};
  }
  block.shared->fill();
  block.static_shared.reset();
  block.mailboxes = {};
  block.hopper = {};
  block.waits_needed = 0;
}

// Runs the blocks behind `first` along x.
void run_cluster(uint3 first) {
  const unsigned size = static_cast<unsigned>(cluster.blocks.size());
  for (const auto& block : cluster.blocks) {
    block->index = {first.x + block->rank, first.y, first.z};
    start(*block);
  }
  cluster.arrived = cluster.completed = 0;
  polls_in_vain = 0;
  cluster.loads.clear();
  do {
    for (unsigned i = 0; i < size; ++i) run_block(*cluster.blocks[in_order(i, size)]);
  } while (next_turn());
  check_end();
  for (const auto& block : cluster.blocks) check_shared_memory(*block);
}

// A thread that has ended, or a new one.
std::unique_ptr<Thread> take_thread() {
  if (spare_threads.empty()) return std::make_unique<Thread>(run_thread);
  auto thread = std::move(spare_threads.back());
  spare_threads.pop_back();
  return thread;
}

// Makes `cluster` fit, of what it has already as far as possible.
void allocate(const Grid& grid) {
  for (const auto& block : cluster.blocks) {
    std::move(block->threads.begin(), block->threads.end(), std::back_inserter(spare_threads));
    block->threads.clear();
  }
  const unsigned count = grid.block.x * grid.block.y * grid.block.z;
  cluster.blocks.resize(grid.cluster);
  for (unsigned rank = 0; rank < grid.cluster; ++rank) {
    if (cluster.blocks[rank] == nullptr) cluster.blocks[rank] = std::make_unique<Block>();
    Block& block = *cluster.blocks[rank];
    block.rank = rank;
    for (unsigned i = 0; i < count; ++i) {
      block.threads.push_back(take_thread());
      Thread& thread = *block.threads.back();
      thread.block = &block;
      thread.number = i;
      thread.index = {i % grid.block.x, i / grid.block.x % grid.block.y,
                      i / (grid.block.x * grid.block.y)};
    }
    block.exchanged.resize((count + kLanes - 1) / kLanes);
    if (block.shared == nullptr || block.shared->size() != grid.shared_bytes)
      block.shared = std::make_unique<GuardedMemory>(grid.shared_bytes, GuardedMemory::kShared);
  }
}

}  // namespace

void set_reversed(bool value) { reversed = value; }

void suspend(Wait wait, int line) {
  current->wait = wait;
  current->line = line;
  current->fiber.suspend();
}

bool release(Wait wait) {
  bool any = false;
  for (const auto& block : cluster.blocks) any |= release(wait, *block);
  return any;
}

void run_grid(const Grid& grid, const std::function<void()>& thread) {
  const FaultHandlers handlers;
  gridDim = grid.size;
  blockDim = grid.block;
  thread_function = &thread;
  allocate(grid);
  previous_kernel_runs = grid.dependent;
  if (grid.dependent) GuardedMemory::allow_access(false);
  const uint64_t clusters_x = grid.size.x / grid.cluster;
  const uint64_t clusters = clusters_x * grid.size.y * grid.size.z;
  for (uint64_t i = 0; i < clusters; ++i) {
    const uint64_t index = reversed ? clusters - 1 - i : i;
    run_cluster({static_cast<unsigned>(index % clusters_x) * grid.cluster,
                 static_cast<unsigned>(index / clusters_x % grid.size.y),
                 static_cast<unsigned>(index / clusters_x / grid.size.y)});
  }
}

}  // namespace emulation
