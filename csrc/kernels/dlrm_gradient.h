// The gradient of a table from those of the rows that were looked up in it: parameters,
// configuration, launcher. Kernels: dlrm_sort.cuh, dlrm_gradient.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace fusedcuda {

struct TableGradientParams {
  DType dtype = DType::kFloat32;
  int64_t items = 0;  // indices
  int64_t rows = 0;   // of the table
  int64_t columns = 0;
  const void* grad = nullptr;     // [items, columns], contiguous
  const void* indices = nullptr;  // [items], contiguous
  bool is_int32 = false;          // instead of int64
  void* table_grad = nullptr;     // [rows, columns], contiguous, aligned to 16 bytes
};

// An index, and which one it is. Sorted by row; equal rows stay in the order of their positions.
struct alignas(8) IndexedRow {
  uint32_t row, position;
};

// What stands for an item without a row. No table has it: there are fewer rows.
constexpr uint32_t kNoRow = 0xffffffff;
constexpr int64_t kMostSortedItems = (int64_t{1} << 31) - 1;
constexpr int64_t kMostSortedRows = int64_t{1} << 31;

// --- Sort

// A pass reads the items twice and writes them once, so digits are as wide as shared memory lets
// them be: 18 bits of 260,000 rows are two passes of 9, where three of 6 would move 41 MB more of
// 1.7 million items and take three launches more. With 9 bits an item of a tile has 8 neighbours
// that go to the same place, 72 bytes in a row.
constexpr int kMostDigitBits = 9;
constexpr int kMostDigits = 1 << kMostDigitBits;
constexpr int kSortThreads = 256;
constexpr int kSortItems = 18;  // of a thread
constexpr int kSortTile = kSortThreads * kSortItems;
// Blocks on an SM: 47 KB of shared memory and 80 registers a thread. 65536 samples of 26 indices
// are 2.8 tiles an SM.
constexpr int kSortBlocksOfSm = 3;

// --- Sum

// Items that are added up one after the other: each piece of so many leaves two partial sums at
// most, so that a level has a 32nd of the items of the one before.
constexpr int kRunItems = 64;
constexpr int kRunThreads = 64;
constexpr int kRunBlocksOfSm = 8;  // 128 registers a thread; 64 KB in flight
constexpr int kMostSumLevels = 6;  // of 2^31 items: 2^26, 2^21, 2^16, 2^11, 2^6
constexpr int64_t kMostSumTiles = 65535;

enum class TableGradientPath {
  kEmpty,   // no elements
  kZeros,   // no indices
  kSorted,  // the indices are sorted, and the rows added up in that order
  kTorch,   // what is too large for 32 bits: torch's operator
};

// Where in the workspace each part starts, in bytes.
struct TableGradientWorkspace {
  int64_t sorted[2] = {};  // [items] of IndexedRow; passes write to one and the other in turn
  int64_t counts = 0;      // [digits, tiles]
  int64_t totals = 0;      // [digits]
  // What each level reads, the first one excepted: [items of the level], [items, columns].
  int64_t rows[kMostSumLevels] = {};
  int64_t values[kMostSumLevels] = {};
  int64_t bytes = 0;
};

struct TableGradientConfig {
  TableGradientPath path = TableGradientPath::kEmpty;
  // Sort
  int passes = 0;
  int digit_bits = 0;
  int64_t tiles = 0;         // a block each
  int64_t first_blocks = 0;  // of the first launch, which also fills the gradient with zeros
  // Sum
  bool aligned = false;  // rows consist of whole, aligned pieces of 16 bytes
  int vec = 1;
  int threads_x = 0;  // along a row
  int threads_y = 0;  // pieces
  int64_t column_tiles = 1;
  int levels = 0;
  int64_t level_items[kMostSumLevels] = {};
  TableGradientWorkspace workspace;
  bool dependent_launch = false;

  int launches() const {
    if (path == TableGradientPath::kZeros) return 1;
    return path == TableGradientPath::kSorted ? 3 * passes + levels : 0;
  }
};

cudaError_t launch_table_gradient(const TableGradientParams& params,
                                  const TableGradientConfig& config, void* workspace,
                                  cudaStream_t stream);

}  // namespace fusedcuda
