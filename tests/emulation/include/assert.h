// In place of the C library's, whose assert would end the process.
#pragma once

namespace emulation {
[[noreturn]] void assertion_fails(const char* condition, int line);
}

#define assert(condition) \
  ((condition) ? static_cast<void>(0) : ::emulation::assertion_fails(#condition, __LINE__))
