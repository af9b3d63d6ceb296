// What Python calls in the library of every family, besides its emulate().
#include "entry.h"

#include "execution.h"

using emulation::GuardedMemory;

EXPORT void set_reversed(int reversed) { emulation::set_reversed(reversed != 0); }

EXPORT void* guarded_create(size_t size) { return new GuardedMemory(size); }
EXPORT void guarded_destroy(GuardedMemory* memory) { delete memory; }
EXPORT void* guarded_data(GuardedMemory* memory) { return memory->data(); }
EXPORT int guarded_is_intact(GuardedMemory* memory) { return memory->is_intact(); }
