// Threads of a block are fibers: each runs until its next barrier or shuffle. Between barriers the
// order is as unkind as it can be: a thread is through with all its work before the next one
// starts.
#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks
#include "execution.h"

#include <cuda_runtime.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {
namespace {

constexpr size_t kStackSize = 128 << 10;
constexpr unsigned kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffff;

enum class Wait { kNothing, kBarrier, kShuffle, kPreviousKernel, kEnd };

struct Fiber {
  ucontext_t start;
  jmp_buf position;
  bool started = false;
  std::unique_ptr<char[]> stack{new char[kStackSize]};
  Wait wait = Wait::kNothing;
  int line = 0;
  // Of a shuffle:
  int lane_mask = 0;
  size_t size = 0;
  unsigned char value[8];
};

bool reversed = false;
bool previous_kernel_runs = false;
std::set<GuardedMemory*> memories;
jmp_buf scheduler;
const std::function<void()>* thread_function = nullptr;
std::vector<std::unique_ptr<Fiber>> fibers;
Fiber* current = nullptr;
volatile sig_atomic_t fault = 0;

std::string text(const char* name, const uint3& at) {
  return std::string(name) + " (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
         std::to_string(at.z) + ")";
}

uint3 index_of(unsigned thread) {
  return {thread % blockDim.x, thread / blockDim.x % blockDim.y,
          thread / (blockDim.x * blockDim.y)};
}

const char* describe(Wait wait) {
  switch (wait) {
    case Wait::kBarrier:
      return "waits at the barrier in line ";
    case Wait::kShuffle:
      return "waits at the shuffle in line ";
    default:
      return "has ended, after line ";
  }
}

[[noreturn]] void fail(const std::string& what) {
  fibers.clear();  // some are in the middle of a kernel
  throw std::runtime_error(what + " in " + text("block", blockIdx) + " of " +
                           text("grid", gridDim) + ", " + text("blockDim", blockDim));
}

[[noreturn]] void fail_diverged(unsigned a, unsigned b) {
  auto state = [](unsigned thread) {
    const Fiber& fiber = *fibers[thread];
    return text("thread", index_of(thread)) + " " + describe(fiber.wait) +
           std::to_string(fiber.line);
  };
  fail("threads do not meet: " + state(a) + ", " + state(b));
}

// Back to the scheduler, until it resumes this fiber. (swapcontext would be two system calls.)
void suspend() {
  if (_setjmp(current->position) == 0) _longjmp(scheduler, 1);
}

void run_fiber() {
  for (;;) {
    (*thread_function)();
    current->wait = Wait::kEnd;
    suspend();
  }
}

void wait_for_others(Wait wait, int line) {
  current->wait = wait;
  current->line = line;
  suspend();
}

// The kernel cannot go on: back to the scheduler, which gives the fibers up.
void on_fault(int signal) {
  fault = signal;
  _longjmp(scheduler, 1);
}

class FaultHandlers {
 public:
  FaultHandlers() {
    struct sigaction action = {};
    action.sa_handler = on_fault;
    action.sa_flags = SA_NODEFER;
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &before_[i]);
  }
  ~FaultHandlers() {
    for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }

 private:
  static constexpr int kCount = 4;
  // The sanitizer's trap is an illegal instruction, or SIGTRAP on some processors.
  static constexpr int kSignals[kCount] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
  struct sigaction before_[kCount];
};

void previous_kernel_ends() {
  previous_kernel_runs = false;
  for (GuardedMemory* memory : memories) memory->allow_access(true);
}

void resume(unsigned thread) {
  current = fibers[thread].get();
  threadIdx = index_of(thread);
  if (_setjmp(scheduler) == 0) {
    if (current->started) _longjmp(current->position, 1);
    current->started = true;
    setcontext(&current->start);
  }
  if (fault == 0) return;
  const bool is_access = fault == SIGSEGV || fault == SIGBUS;
  fault = 0;
  const char* what = " has undefined behaviour: a misaligned access, an index outside of an array";
  if (is_access) what = " touches memory outside of every tensor";
  if (is_access && previous_kernel_runs) what = " touches memory before the previous kernel ends";
  previous_kernel_ends();
  fail(text("thread", threadIdx) + what);
}

bool wait_for_the_same(const Fiber& a, const Fiber& b) {
  return a.wait == b.wait && (a.wait == Wait::kEnd || a.line == b.line);
}

// Whether all threads in [first, last) wait for the same, and for that.
bool all_wait_for(Wait wait, unsigned first, unsigned last) {
  for (unsigned thread = first; thread < last; ++thread) {
    const Fiber& fiber = *fibers[thread];
    if (fiber.wait != wait || !wait_for_the_same(fiber, *fibers[first])) return false;
  }
  return true;
}

void release(Wait wait, unsigned first, unsigned last) {
  for (unsigned thread = first; thread < last; ++thread) {
    if (fibers[thread]->wait == wait) fibers[thread]->wait = Wait::kNothing;
  }
}

void exchange(unsigned first) {
  unsigned char values[kWarpSize][sizeof(Fiber::value)];
  for (unsigned lane = 0; lane < kWarpSize; ++lane)
    std::memcpy(values[lane], fibers[first + lane]->value, sizeof(values[lane]));
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    Fiber& fiber = *fibers[first + lane];
    std::memcpy(fiber.value, values[lane ^ fiber.lane_mask], fiber.size);
  }
}

// The i-th of `count` in the order of this run.
unsigned in_order(unsigned i, unsigned count) { return reversed ? count - 1 - i : i; }

// Until the warp's threads have ended or wait for those of other warps.
void run_warp(unsigned first, unsigned size) {
  for (;;) {
    for (unsigned i = 0; i < size; ++i) {
      const unsigned thread = first + in_order(i, size);
      if (fibers[thread]->wait == Wait::kNothing) resume(thread);
    }
    if (size < kWarpSize || !all_wait_for(Wait::kShuffle, first, first + size)) return;
    exchange(first);
    release(Wait::kShuffle, first, first + size);
  }
}

void run_block() {
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  const unsigned warps = (count + kWarpSize - 1) / kWarpSize;
  for (unsigned i = 0; i < count; ++i) fibers[i]->wait = Wait::kNothing;
  for (;;) {
    for (unsigned i = 0; i < warps; ++i) {
      const unsigned first = in_order(i, warps) * kWarpSize;
      run_warp(first, std::min(kWarpSize, count - first));
    }
    if (previous_kernel_runs) {
      previous_kernel_ends();
      release(Wait::kPreviousKernel, 0, count);
    } else if (all_wait_for(Wait::kBarrier, 0, count)) {
      release(Wait::kBarrier, 0, count);
    } else {
      break;
    }
  }
  if (all_wait_for(Wait::kEnd, 0, count)) return;
  for (bool within_a_warp : {true, false}) {
    for (unsigned thread = 1; thread < count; ++thread) {
      if (within_a_warp && thread % kWarpSize == 0) continue;
      if (!wait_for_the_same(*fibers[thread - 1], *fibers[thread]))
        fail_diverged(thread - 1, thread);
    }
  }
  fail_diverged(0, count - 1);  // a shuffle in a warp of fewer than 32 threads
}

}  // namespace

void set_reversed(bool value) { reversed = value; }

void barrier(int line) { wait_for_others(Wait::kBarrier, line); }

void wait_for_previous_kernel() {
  if (previous_kernel_runs) wait_for_others(Wait::kPreviousKernel, 0);
}

void shuffle_xor(unsigned participants, void* value, size_t size, int lane_mask, int line) {
  if (participants != kAllLanes || size > sizeof(Fiber::value) || lane_mask < 0 ||
      lane_mask >= static_cast<int>(kWarpSize)) {
    __builtin_trap();
  }
  current->size = size;
  current->lane_mask = lane_mask;
  std::memcpy(current->value, value, size);
  wait_for_others(Wait::kShuffle, line);
  std::memcpy(value, current->value, size);
}

void run_grid(dim3 grid, dim3 block, bool dependent, const std::function<void()>& thread) {
  const FaultHandlers handlers;
  if (dependent) {
    previous_kernel_runs = true;
    for (GuardedMemory* memory : memories) memory->allow_access(false);
  }
  gridDim = grid;
  blockDim = block;
  thread_function = &thread;
  while (fibers.size() < block.x * block.y * block.z) {
    auto fiber = std::make_unique<Fiber>();
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->stack.get();
    fiber->start.uc_stack.ss_size = kStackSize;
    fiber->start.uc_link = nullptr;
    makecontext(&fiber->start, run_fiber, 0);
    fibers.push_back(std::move(fiber));
  }
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  for (uint64_t i = 0; i < blocks; ++i) {
    const uint64_t index = reversed ? blocks - 1 - i : i;
    blockIdx.x = static_cast<unsigned>(index % grid.x);
    blockIdx.y = static_cast<unsigned>(index / grid.x % grid.y);
    blockIdx.z = static_cast<unsigned>(index / grid.x / grid.y);
    run_block();
  }
}

// On each side of a tensor: room for an offset that is off by rows, not only by elements.
static size_t guard_size() { return 64 * sysconf(_SC_PAGESIZE); }

GuardedMemory::GuardedMemory(size_t size) : size_(size) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t guard = guard_size();
  const size_t padded = (size + 15) / 16 * 16;
  mapped_ = (padded + page - 1) / page * page + 2 * guard;
  void* pages = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::runtime_error("no memory");
  pages_ = static_cast<std::byte*>(pages);
  std::fill(pages_ + guard, pages_ + mapped_ - guard, std::byte{0xff});
  mprotect(pages_, guard, PROT_NONE);
  mprotect(pages_ + mapped_ - guard, guard, PROT_NONE);
  data_ = pages_ + mapped_ - guard - padded;
  memories.insert(this);
}

GuardedMemory::~GuardedMemory() {
  memories.erase(this);
  munmap(pages_, mapped_);
}

void GuardedMemory::allow_access(bool allow) {
  const size_t guard = guard_size();
  mprotect(pages_ + guard, mapped_ - 2 * guard, allow ? PROT_READ | PROT_WRITE : PROT_NONE);
}

bool GuardedMemory::is_intact() const {
  const size_t guard = guard_size();
  auto untouched = [](std::byte byte) { return byte == std::byte{0xff}; };
  return std::all_of(pages_ + guard, data_, untouched) &&
         std::all_of(data_ + size_, pages_ + mapped_ - guard, untouched);
}

}  // namespace emulation
