// A thread of a kernel: a function with a stack of its own, which runs until it suspends itself.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <memory>

namespace emulation {

class Fiber {
 public:
  // `body` never returns.
  explicit Fiber(void (*body)());

  // Runs it until it suspends; returns what it did wrong, in words that follow "thread (x, y, z)",
  // or null. After an error it cannot go on.
  const char* resume();
  // Back to who resumed it, until it is resumed again.
  void suspend();
  // Instead of suspending, inside of a fiber.
  [[noreturn]] static void give_up(const char* error);

 private:
  ucontext_t start_;
  jmp_buf position_;
  bool started_ = false;
  std::unique_ptr<char[]> stack_;
};

// The errors that FaultHandlers finds.
extern const char* const kBadAccess;
extern const char* const kUndefinedBehaviour;

// While one exists, bad accesses and the traps of the sanitizer are errors of the fiber that runs.
class FaultHandlers {
 public:
  FaultHandlers();
  ~FaultHandlers();

 private:
  static constexpr int kCount = 4;
  // The sanitizer's trap is an illegal instruction, or SIGTRAP on some processors.
  static constexpr int kSignals[kCount] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
  struct sigaction before_[kCount];
};

}  // namespace emulation
