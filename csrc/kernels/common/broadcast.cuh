// How a thread reaches its vector of elements in tensors of any strides: what the host found out
// about each tensor (Access), the offsets, and loads and stores that stay 16 bytes wide wherever
// the addresses allow it.
#pragma once

#include "access.h"
#include "activation.h"
#include "iteration.h"
#include "vec.cuh"

namespace fusedcuda {

template <int kTensors>
struct GeneralParams {
  int64_t rows;     // product of the sizes before `split`
  int64_t columns;  // and of those after it
  Activation activation;
  bool needs_offsets;  // false where every tensor is kLinear or kNumber
  int num_dims;
  int split;
  int64_t sizes[kMaxDims];
  Divider dividers[kMaxDims];
  void* data[kTensors];
  double number[kTensors];
  Access access[kTensors];
  int64_t strides[kTensors][kMaxDims];
};

// Adds to `offsets` what the coordinates of `index` within dimensions [first, last) contribute;
// returns the innermost coordinate.
template <int kTensors>
__device__ __forceinline__ int64_t add_offsets(const GeneralParams<kTensors>& p, int first,
                                               int last, int64_t index,
                                               int64_t (&offsets)[kTensors]) {
  int64_t innermost = 0;
#pragma unroll 1
  for (int d = last - 1; d >= first; --d) {
    int64_t coordinate = index;
    if (d > first) index = p.dividers[d].divide(index, &coordinate);
    if (d == last - 1) innermost = coordinate;
#pragma unroll
    for (int k = 0; k < kTensors; ++k) offsets[k] += coordinate * p.strides[k][d];
  }
  return innermost;
}

// Where a thread's vector is in each tensor.
template <int kTensors>
struct Position {
  int64_t row;
  int64_t column;
  int64_t innermost;  // coordinate in the last dimension
  int64_t offset[kTensors];
  int valid;  // elements before the row ends
};

template <int kVec, int kTensors>
__device__ __forceinline__ Position<kTensors> locate(const GeneralParams<kTensors>& p, int64_t row,
                                                     int64_t column) {
  Position<kTensors> at;
  at.row = row;
  at.column = column;
  at.innermost = 0;
  at.valid = valid_elements(p.columns - column, kVec);
#pragma unroll
  for (int k = 0; k < kTensors; ++k) at.offset[k] = 0;
  if (p.needs_offsets) {
    add_offsets(p, 0, p.split, row, at.offset);
    at.innermost = add_offsets(p, p.split, p.num_dims, column, at.offset);
  }
  return at;
}

// Calls visit(j, element offset) for the valid elements of a kGather tensor. Not unrolled: the code
// is in every kernel and seldom runs. Neighbours differ by the innermost stride except where the
// innermost dimension wraps.
template <int kTensors, typename Visit>
__device__ __forceinline__ void walk(const GeneralParams<kTensors>& p, int k,
                                     const Position<kTensors>& at, Visit visit) {
  int64_t offset = at.offset[k];
  int64_t innermost = at.innermost;
#pragma unroll 1
  for (int j = 0; j < at.valid; ++j) {
    visit(j, offset);
    offset += p.strides[k][p.num_dims - 1];
    if (++innermost == p.sizes[p.num_dims - 1]) {
      innermost = 0;
      int64_t index = at.column + j + 1;
      offset = 0;
#pragma unroll 1
      for (int d = p.num_dims - 1; d >= 0; --d) {
        if (d == p.split - 1) index = at.row;
        int64_t coordinate;
        index = p.dividers[d].divide(index, &coordinate);
        offset += coordinate * p.strides[k][d];
      }
    }
  }
}

// v[j] for a run-time j, without moving v to local memory.
template <typename T, int kVec>
__device__ __forceinline__ void insert(Vector<T, kVec>& v, int j, T value) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) v.values[i] = i == j ? value : v.values[i];
}

template <typename T, int kVec>
__device__ __forceinline__ T extract(const Vector<T, kVec>& v, int j) {
  T value = v.values[0];
#pragma unroll
  for (int i = 1; i < kVec; ++i) value = i == j ? v.values[i] : value;
  return value;
}

template <typename T, int kVec, int kTensors>
__device__ __forceinline__ Vector<T, kVec> load_tensor(const GeneralParams<kTensors>& p, int k,
                                                       const Position<kTensors>& at) {
  const T* data = static_cast<const T*>(p.data[k]);
  Vector<T, kVec> v = {};
  switch (p.access[k]) {
    case Access::kLinear:
      return load_neighbours<T, kVec>(data + at.row * p.columns + at.column, at.valid);
    case Access::kInner:
      return load_neighbours<T, kVec>(data + at.offset[k], at.valid);
    case Access::kOuter: {
      const T value = data[at.offset[k]];
#pragma unroll
      for (int j = 0; j < kVec; ++j) v.values[j] = value;
      return v;
    }
    case Access::kGather:
      walk(p, k, at, [&](int j, int64_t offset) { insert(v, j, data[offset]); });
      return v;
    default:
      return v;
  }
}

// The loaded elements, or the number that stands in their place.
template <typename T, int kVec, int kTensors>
__device__ __forceinline__ void values_of(const GeneralParams<kTensors>& p, int k,
                                          const Vector<T, kVec>& v, Compute<T> (&x)[kVec]) {
  unpack<T, kVec>(v, x);
  if (p.access[k] == Access::kNumber) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] = static_cast<Compute<T>>(p.number[k]);
  }
}

template <typename T, int kVec, int kTensors>
__device__ __forceinline__ void store_tensor(const GeneralParams<kTensors>& p, int k,
                                             const Position<kTensors>& at,
                                             const Compute<T> (&x)[kVec]) {
  if (p.access[k] == Access::kAbsent) return;
  T* data = static_cast<T*>(p.data[k]);
  const Vector<T, kVec> v = pack<T, kVec>(x);
  if (p.access[k] == Access::kGather) {
    walk(p, k, at, [&](int j, int64_t offset) { data[offset] = extract(v, j); });
  } else {
    const bool linear = p.access[k] == Access::kLinear;
    store_neighbours<T, kVec>(data + (linear ? at.row * p.columns + at.column : at.offset[k]),
                              at.valid, v);
  }
}

}  // namespace fusedcuda
