#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks
#include "fiber.h"

namespace emulation {

const char* const kBadAccess = " touches memory outside of every tensor and of its shared memory";
const char* const kUndefinedBehaviour =
    " has undefined behaviour: a misaligned access, an index outside of an array";

namespace {

constexpr size_t kStackSize = 128 << 10;

jmp_buf resumer;
const char* error = nullptr;

void on_fault(int signal) {
  Fiber::give_up(signal == SIGSEGV || signal == SIGBUS ? kBadAccess : kUndefinedBehaviour);
}

}  // namespace

Fiber::Fiber(void (*body)()) : stack_(new char[kStackSize]) {
  getcontext(&start_);
  start_.uc_stack.ss_sp = stack_.get();
  start_.uc_stack.ss_size = kStackSize;
  start_.uc_link = nullptr;
  makecontext(&start_, body, 0);
}

// (swapcontext would be two system calls.)
const char* Fiber::resume() {
  error = nullptr;
  if (_setjmp(resumer) == 0) {
    if (started_) _longjmp(position_, 1);
    started_ = true;
    setcontext(&start_);
  }
  return error;
}

void Fiber::suspend() {
  if (_setjmp(position_) == 0) _longjmp(resumer, 1);
}

void Fiber::give_up(const char* what) {
  error = what;
  _longjmp(resumer, 1);
}

FaultHandlers::FaultHandlers() {
  struct sigaction action = {};
  action.sa_handler = on_fault;
  action.sa_flags = SA_NODEFER;
  for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &before_[i]);
}

FaultHandlers::~FaultHandlers() {
  for (int i = 0; i < kCount; ++i) sigaction(kSignals[i], &before_[i], nullptr);
}

}  // namespace emulation
