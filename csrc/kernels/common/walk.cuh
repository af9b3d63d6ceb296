// How the threads of an elementwise kernel reach tensors of different strides, where all of them
// have whole aligned vectors; gather.cuh has the same for the others.
//
// The iteration space is a table of rows and columns; each may stand for several dimensions. Index
// arithmetic matters here: at 8 bf16 elements a thread and 18 bytes a clock and SM, some 200
// instructions a warp are all there is.
#pragma once

#include <cstdint>

#include "access.h"
#include "iteration.h"
#include "vec.cuh"

namespace fusedcuda {

template <int kTensors>
struct Table {
  int64_t rows;
  int64_t columns;
  bool down;     // the walk: down the rows, or along the columns
  int num_dims;  // dimensions [0, split) make up the rows
  int split;
  Divider dividers[kMaxDims];
  void* data[kTensors];
  double number[kTensors];
  Access access[kTensors];
  int64_t strides[kTensors][kMaxDims];
  // Where rows and columns are one dimension each and everything fits 32 bits, which is nearly
  // always: the strides again, so that an offset is two multiply-adds.
  bool simple;
  uint32_t row_strides[kTensors];
  uint32_t column_strides[kTensors];
  // For gather.cuh.
  bool flat;     // threads go on from the end of a row to the next row
  int64_t line;  // columns of the innermost dimension, and a tensor's stride there
  int64_t steps[kTensors];
  Divider stretches;  // by the number of a block's stretches in a line
  int64_t num_stretches;
};

// Where a thread's elements begin in each tensor.
template <int kTensors>
struct Offsets {
  int64_t of[kTensors];
};

// Adds to `offsets` what coordinate `index` of dimensions [first, last) contributes to each
// tensor's offset.
template <int kTensors>
__device__ __forceinline__ void add_offsets(const Table<kTensors>& table, int first, int last,
                                            int64_t index, Offsets<kTensors>* offsets) {
#pragma unroll 1
  for (int d = last - 1; d > first; --d) {
    int64_t coordinate;
    index = table.dividers[d].divide(index, &coordinate);
#pragma unroll
    for (int k = 0; k < kTensors; ++k) offsets->of[k] += coordinate * table.strides[k][d];
  }
  if (last > first) {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) offsets->of[k] += index * table.strides[k][first];
  }
}

// Offset of (row, column) in each tensor.
template <int kTensors>
__device__ __forceinline__ Offsets<kTensors> locate_offsets(const Table<kTensors>& table,
                                                            int64_t row, int64_t column) {
  Offsets<kTensors> offsets;
  if (table.simple) {
    const uint64_t r = static_cast<uint32_t>(row);
    const uint64_t c = static_cast<uint32_t>(column);
#pragma unroll
    for (int k = 0; k < kTensors; ++k)
      offsets.of[k] = r * table.row_strides[k] + c * table.column_strides[k];
    return offsets;
  }
#pragma unroll
  for (int k = 0; k < kTensors; ++k) offsets.of[k] = 0;
  add_offsets(table, 0, table.split, row, &offsets);
  add_offsets(table, table.split, table.num_dims, column, &offsets);
  return offsets;
}

// A thread's vector of a row. The grid covers the table: blockIdx.x the columns, y and z the rows.
template <typename T, int kVec, int kTensors>
class Place {
 public:
  __device__ explicit Place(const Table<kTensors>& table) : table_(table) {
    row_ = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
    column_ = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVec;
  }

  __device__ bool exists() const { return row_ < table_.rows && column_ < table_.columns; }
  __device__ Offsets<kTensors> locate() const { return locate_offsets(table_, row_, column_); }

 private:
  const Table<kTensors>& table_;
  int64_t row_;
  int64_t column_;
};

// A walk, for threads that keep a sum: down a column of vectors (table.down) or along a row; the
// other coordinate stays fixed. blockIdx.x tells where a block is on the fixed side, blockIdx.y
// which slice of the walked side it takes.
template <typename T, int kVec, int kTensors>
class Walk {
 public:
  __device__ explicit Walk(const Table<kTensors>& table) : table_(table) {
    const bool down = table.down;
    fixed_ = down ? (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVec
                  : static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    position_ =
        static_cast<int64_t>(blockIdx.y) * spacing() + (down ? threadIdx.y : threadIdx.x * kVec);
    if (fixed_ >= (down ? table.columns : table.rows)) position_ = end();
    locate();
  }

  __device__ bool done() const { return position_ >= end(); }
  __device__ const Offsets<kTensors>& place() const { return offsets_; }

  __device__ void advance() {
    const int64_t step = static_cast<int64_t>(gridDim.y) * spacing();
    position_ += step;
    if (!table_.simple) {
      locate();
      return;
    }
    const uint64_t step32 = static_cast<uint32_t>(step);
#pragma unroll
    for (int k = 0; k < kTensors; ++k) {
      offsets_.of[k] += step32 * (table_.down ? table_.row_strides[k] : table_.column_strides[k]);
    }
  }

  // Whether element `j` of the vector exists.
  __device__ bool has(int) const { return true; }

  // The row of a walk along the columns.
  __device__ int64_t row() const { return fixed_; }

  // A block that walks down the rows: its column `c`, which thread x has as element j; at least
  // table.columns where there is none.
  __device__ static int64_t column_of(const Table<kTensors>&, int c, int* x, int* j) {
    *x = c / kVec;
    *j = c % kVec;
    return static_cast<int64_t>(blockIdx.x) * blockDim.x * kVec + c;
  }

 private:
  // Launch constants, recomputed where they are used: the sums need the registers.
  __device__ int spacing() const { return table_.down ? blockDim.y : blockDim.x * kVec; }
  __device__ int64_t end() const { return table_.down ? table_.rows : table_.columns; }

  __device__ void locate() {
    offsets_ =
        locate_offsets(table_, table_.down ? position_ : fixed_, table_.down ? fixed_ : position_);
  }

  const Table<kTensors>& table_;
  int64_t fixed_;
  int64_t position_;
  Offsets<kTensors> offsets_;
};

// What was loaded of a tensor: a vector, or the one element that stands for it. Unpacking it later
// keeps every load of a thread in flight at once.
template <typename T, int kVec>
struct Loaded {
  Vector<T, kVec> vector;
  T element;
};

// Loads of the first kInputs tensors.
template <typename T, int kVec, int kInputs, int kTensors>
__device__ __forceinline__ void load(const Table<kTensors>& table, const Offsets<kTensors>& at,
                                     Loaded<T, kVec> (&loaded)[kInputs]) {
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    const T* data = static_cast<const T*>(table.data[k]) + at.of[k];
    if (table.access[k] == Access::kVector) loaded[k].vector = load_vector<T, kVec>(data);
    if (table.access[k] == Access::kSplat) loaded[k].element = *data;
  }
}

template <typename T, int kVec, int kTensors>
__device__ __forceinline__ void values_of(const Table<kTensors>& table, int k,
                                          const Offsets<kTensors>&, const Loaded<T, kVec>& loaded,
                                          Compute<T> (&x)[kVec]) {
  if (table.access[k] == Access::kVector) {
    unpack<T, kVec>(loaded.vector, x);
    return;
  }
  const Compute<T> value = table.access[k] == Access::kSplat
                               ? to_compute(loaded.element)
                               : static_cast<Compute<T>>(table.number[k]);
#pragma unroll
  for (int j = 0; j < kVec; ++j) x[j] = value;
}

template <typename T, int kVec, int kTensors>
__device__ __forceinline__ void store(const Table<kTensors>& table, int k,
                                      const Offsets<kTensors>& at, const Compute<T> (&x)[kVec]) {
  if (table.access[k] == Access::kAbsent) return;
  store_vector<T, kVec>(static_cast<T*>(table.data[k]) + at.of[k], pack<T, kVec>(x));
}

}  // namespace fusedcuda
