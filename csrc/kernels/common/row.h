// How a row reduction spreads rows over threads: the configuration, chosen on the host. The
// device side is row.cuh.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dtype.h"
#include "iteration.h"
#include "launch.h"

namespace fusedcuda {

// A matrix of rows x columns whose columns are neighbours in memory.
struct RowMatrix {
  void* data = nullptr;  // null: absent
  int64_t stride = 0;    // from row to row, in elements; 0 where a row is repeated
  void* end = nullptr;   // behind the last element

  static RowMatrix make(void* data, int64_t stride, int64_t rows, int64_t columns, int itemsize) {
    const int64_t elements = rows > 0 ? (rows - 1) * stride + columns : 0;
    return {data, stride, static_cast<char*>(data) + elements * itemsize};
  }
};

// Threads of a block that hold a row: with 64 registers each, two such blocks fill an SM. Twice as
// many where a row is too long for a cluster of 16 blocks of these.
constexpr int kRowThreads = 512;
constexpr int kWideRowThreads = 1024;
// A block's threads where a row needs fewer.
constexpr int kRowBlockThreads = 128;
constexpr int kMaxCluster = 16;

// Of a reduction: two barriers, and two sets of slots that take turns. Rounded to 128 bytes for
// what lies behind: asynchronous copies of whole lines to anything else take 15 % longer.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int row_scratch_bytes(int slots, int value_size) {
  return (16 + 2 * slots * value_size + 127) / 128 * 128;
}

enum class RowPath {
  kEmpty,     // no elements
  kRegister,  // a row stays in the registers of its threads, in up to 16 blocks: read once
  kPipeline,  // the same by persistent blocks, the next rows on their way to shared memory
  kStream,    // a block walks along its row, once for each reduction and once more for the result
};

struct RowConfig {
  RowPath path = RowPath::kEmpty;
  bool aligned = false;     // every vector of every tensor is whole and 16-byte aligned
  int vec = 1;              // elements of a vector
  int items = 1;            // vectors of a row that a thread holds
  int threads_per_row = 1;  // in each block of the cluster
  int rows_per_block = 1;
  int cluster = 1;  // blocks that share a row
  int64_t blocks = 0;
  bool dependent_launch = false;

  int warps_per_block() const {
    return static_cast<int>(ceil_div(threads_per_row * rows_per_block, kWarpSize));
  }
  // Slots of a reduction, see RowReduction in row.cuh.
  size_t scratch_bytes(int value_size) const {
    return row_scratch_bytes(warps_per_block() * cluster, value_size);
  }
};

inline const char* name_of(RowPath path) {
  switch (path) {
    case RowPath::kEmpty:
      return "empty";
    case RowPath::kRegister:
      return "register";
    case RowPath::kPipeline:
      return "pipeline";
    default:
      return "stream";
  }
}

// Whether rows of all these matrices consist of whole, aligned vectors.
inline bool rows_are_aligned(const RowMatrix* matrices, int count, int64_t columns, int itemsize) {
  const int64_t vec = kVectorBytes / itemsize;
  if (columns % vec != 0) return false;
  for (int i = 0; i < count; ++i) {
    if (matrices[i].data == nullptr) continue;
    if (reinterpret_cast<uintptr_t>(matrices[i].data) % kVectorBytes != 0) return false;
    if (matrices[i].stride % vec != 0) return false;
  }
  return true;
}

inline bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

// Of 32, 16 and 8 the most threads along a row that leave the fewest without a part of it; for
// shorter rows fewer. A warp reads at least 128 bytes of a row in vectors.
inline int threads_along_row(int64_t vectors_of_row) {
  constexpr int kMost = 32, kFewest = 8;
  if (vectors_of_row < kFewest) return static_cast<int>(next_power_of_two(vectors_of_row));
  int best = kMost;
  auto padded = [&](int threads) { return ceil_div(vectors_of_row, threads) * threads; };
  for (int threads = kMost; threads >= kFewest; threads /= 2) {
    if (padded(threads) < padded(best)) best = threads;
  }
  return best;
}

// `most_items`: the largest number of vectors a thread may hold. `most_threads`: kRowThreads or
// kWideRowThreads. `usual_threads`: from there on more blocks share a row, up to 16. float64 is
// streamed: it is there for gradcheck, not for speed.
inline RowConfig choose_row_config(int64_t rows, int64_t columns, DType dtype, bool aligned,
                                   int most_items, const DeviceTraits& device,
                                   int most_threads = kRowThreads,
                                   int usual_threads = kRowThreads / 2) {
  RowConfig config;
  if (rows == 0 || columns == 0) return config;
  config.aligned = aligned;
  config.dependent_launch = device.dependent_launch;
  config.vec = vector_width(dtype);
  // An unaligned row may begin inside its first vector and end inside its last.
  const int64_t vectors = ceil_div(columns + (aligned ? 0 : config.vec - 1), config.vec);
  const int max_cluster = device.clusters ? kMaxCluster : 1;
  if (dtype == DType::kFloat64 || vectors > int64_t{most_threads} * most_items * max_cluster) {
    config.path = RowPath::kStream;
    config.threads_per_row = kRowThreads;
    config.blocks = rows;
    return config;
  }
  config.path = RowPath::kRegister;
  // Few rows leave SMs without work: the more threads on a row, the sooner it is done.
  const bool few_rows = rows <= device.num_sms;
  const bool one_item = vectors <= (few_rows ? kRowThreads : kWarpSize);
  config.items = one_item ? 1 : most_items > 4 && vectors <= kRowThreads / 2 * 4 ? 4 : most_items;
  const int64_t usual_vectors = int64_t{usual_threads} * config.items;
  if (!one_item && vectors > usual_vectors && device.clusters) {
    const int64_t blocks = next_power_of_two(ceil_div(vectors, usual_vectors));
    config.cluster = static_cast<int>(std::min<int64_t>(blocks, kMaxCluster));
  }
  const int64_t threads = ceil_div(vectors, int64_t{config.items} * config.cluster);
  const bool in_a_warp = threads <= kWarpSize && config.cluster == 1;
  config.threads_per_row = static_cast<int>(in_a_warp ? next_power_of_two(threads)
                                                      : ceil_div(threads, kWarpSize) * kWarpSize);
  config.rows_per_block = std::max(1, kRowBlockThreads / config.threads_per_row);
  config.blocks = ceil_div(rows, config.rows_per_block) * config.cluster;
  return config;
}

}  // namespace fusedcuda
