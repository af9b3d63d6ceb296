// Indices that name rows of a table.
#pragma once

#include <assert.h>

#include <cstdint>

namespace fusedcuda {

__device__ __forceinline__ int64_t load_index(const void* address, bool is_int32) {
  return is_int32 ? *static_cast<const int32_t*>(address) : *static_cast<const int64_t*>(address);
}

// Behind the assertion, which by its declaration might return, the trap says that no register has
// to outlive it.
__device__ __forceinline__ void assert_is_row(int64_t index, int64_t rows) {
  const bool exists = static_cast<uint64_t>(index) < static_cast<uint64_t>(rows);
  if (!exists) {
    assert(exists && "an index is no row of the table");
    __trap();
  }
}

}  // namespace fusedcuda
