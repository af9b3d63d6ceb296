// How the threads of an elementwise kernel reach tensors of different strides.
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
};

// Adds to `offsets` what coordinate `index` of dimensions [first, last) contributes to each
// tensor's offset.
template <int kTensors>
__device__ __forceinline__ void add_offsets(const Table<kTensors>& table, int first, int last,
                                            int64_t index, int64_t (&offsets)[kTensors]) {
#pragma unroll 1
  for (int d = last - 1; d > first; --d) {
    int64_t coordinate;
    index = table.dividers[d].divide(index, &coordinate);
#pragma unroll
    for (int k = 0; k < kTensors; ++k) offsets[k] += coordinate * table.strides[k][d];
  }
  if (last > first) {
#pragma unroll
    for (int k = 0; k < kTensors; ++k) offsets[k] += index * table.strides[k][first];
  }
}

// Offset of (row, column) in each tensor.
template <int kTensors>
__device__ __forceinline__ void locate_offsets(const Table<kTensors>& table, int64_t row,
                                               int64_t column, int64_t (&offsets)[kTensors]) {
  if (table.simple) {
    const uint64_t r = static_cast<uint32_t>(row);
    const uint64_t c = static_cast<uint32_t>(column);
#pragma unroll
    for (int k = 0; k < kTensors; ++k)
      offsets[k] = r * table.row_strides[k] + c * table.column_strides[k];
    return;
  }
#pragma unroll
  for (int k = 0; k < kTensors; ++k) offsets[k] = 0;
  add_offsets(table, 0, table.split, row, offsets);
  add_offsets(table, table.split, table.num_dims, column, offsets);
}

// A thread's kUnroll vectors of one row, blockDim.x apart. The grid covers the table: blockIdx.x
// the columns, y and z the rows.
template <int kVec, int kUnroll, int kTensors>
class Place {
 public:
  __device__ explicit Place(const Table<kTensors>& table) : table_(table) {
    row_ = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
    column_ = (static_cast<int64_t>(blockIdx.x) * kUnroll * blockDim.x + threadIdx.x) * kVec;
  }

  __device__ bool exists(int u = 0) const {
    return row_ < table_.rows && column_of(u) < table_.columns;
  }

  // Offsets of vector u, or of the first where it does not exist: loads need no branch.
  __device__ void locate(int u, int64_t (&offsets)[kTensors]) const {
    locate_offsets(table_, row_, u == 0 || exists(u) ? column_of(u) : column_, offsets);
  }

 private:
  __device__ int64_t column_of(int u) const { return column_ + u * blockDim.x * kVec; }

  const Table<kTensors>& table_;
  int64_t row_;
  int64_t column_;
};

// A walk, for threads that keep a sum: down a column of vectors (table.down) or along a row; the
// other coordinate stays fixed. blockIdx.x tells where a block is on the fixed side, blockIdx.y
// which slice of the walked side it takes.
template <int kVec, int kTensors>
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
  __device__ int64_t fixed() const { return fixed_; }
  __device__ const int64_t (&offsets() const)[kTensors] { return offsets_; }

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
      offsets_[k] += step32 * (table_.down ? table_.row_strides[k] : table_.column_strides[k]);
    }
  }

 private:
  // Launch constants, recomputed where they are used: the sums need the registers.
  __device__ int spacing() const { return table_.down ? blockDim.y : blockDim.x * kVec; }
  __device__ int64_t end() const { return table_.down ? table_.rows : table_.columns; }

  __device__ void locate() {
    locate_offsets(table_, table_.down ? position_ : fixed_, table_.down ? fixed_ : position_,
                   offsets_);
  }

  const Table<kTensors>& table_;
  int64_t fixed_;
  int64_t position_;
  int64_t offsets_[kTensors];
};

// What was loaded of a tensor: a vector, or the one element that stands for it. Unpacking it later
// keeps every load of a thread in flight at once.
template <typename T, int kVec>
struct Loaded {
  Vector<T, kVec> vector;
  T element;
};

template <typename T, int kVec, int kTensors>
__device__ __forceinline__ void load(const Table<kTensors>& table, int k, int64_t offset,
                                     Loaded<T, kVec>* loaded) {
  const T* data = static_cast<const T*>(table.data[k]) + offset;
  if (table.access[k] >= Access::kVector) loaded->vector = load_vector<T, kVec>(data);
  if (kVec > 1 && table.access[k] == Access::kSplat) loaded->element = *data;
}

template <typename T, int kVec, int kTensors>
__device__ __forceinline__ void values_of(const Table<kTensors>& table, int k,
                                          const Loaded<T, kVec>& loaded, Compute<T> (&x)[kVec]) {
  if (table.access[k] >= Access::kVector) {
    unpack<T, kVec>(loaded.vector, x);
    return;
  }
  const bool splat = kVec > 1 && table.access[k] == Access::kSplat;
  const Compute<T> value =
      splat ? to_compute(loaded.element) : static_cast<Compute<T>>(table.number[k]);
#pragma unroll
  for (int j = 0; j < kVec; ++j) x[j] = value;
}

template <typename T, int kVec, int kTensors>
__device__ __forceinline__ void store(const Table<kTensors>& table, int k, int64_t offset,
                                      const Compute<T> (&x)[kVec]) {
  if (table.access[k] == Access::kAbsent) return;
  store_vector<T, kVec>(static_cast<T*>(table.data[k]) + offset, pack<T, kVec>(x));
}

}  // namespace fusedcuda
