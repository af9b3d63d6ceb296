// What a caller of the emulation controls and sees; the kernels see include/cuda_runtime.h.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>

#include "guarded_memory.h"

namespace emulation {

// Blocks, and the threads between two barriers, run one after another: from the first to the last,
// or the other way round. Asynchronous copies and what is sent to mailboxes arrive when they are
// waited for, or, the other way round, at once. A result that depends on it is a race.
void set_reversed(bool reversed);

struct Grid {
  dim3 size;
  dim3 block;
  unsigned cluster = 1;     // blocks along x that run together
  size_t shared_bytes = 0;  // dynamic
  bool dependent = false;
};

// Runs `thread` for every thread of the grid. Throws std::runtime_error, with the thread and the
// block, for
// - accesses outside of guarded memory, undefined behaviour, traps and failed assertions;
// - threads that do not meet at the same barrier or shuffle;
// - with `dependent`, a thread of the first blocks that touches global memory before it has waited
//   for the previous kernel;
// - asynchronous copies that are not aligned, not to shared memory or not waited for;
// - stores to a block of the cluster that may not have started, or may have ended;
// - threads that poll memory which nobody writes any more;
// - mailboxes that are used before all blocks of the cluster know them, that get other bytes than
//   they expect or those of the next round too early, or that not every thread waits for.
void run_grid(const Grid& grid, const std::function<void()>& thread);

// Every kernel starts again with what cudaFuncSetAttribute has not changed.
void forget_allowances();

}  // namespace emulation
