// Weight and bias of a norm, for threads that keep their columns over many rows.
#pragma once

#include "common/convert.cuh"
#include "common/vec.cuh"
#include "norm.h"

namespace fusedcuda {

// parameter[column] + offset; `absent` without a parameter.
template <typename T>
__device__ __forceinline__ Compute<T> load_parameter(const NormParameter& parameter, int column,
                                                     Compute<T> offset, Compute<T> absent) {
  using C = Compute<T>;
  if (parameter.data == nullptr) return absent;
  const C value = parameter.is_float32
                      ? static_cast<C>(static_cast<const float*>(parameter.data)[column])
                      : to_compute(static_cast<const T*>(parameter.data)[column]);
  return value + offset;
}

// A parameter in shared memory, in the compute type: read for every row, it would otherwise come
// from the L2, since shared memory leaves the L1 little room. Rows of the block share it.
template <typename T, int kItems>
class RowParameter {
 public:
  using C = Compute<T>;
  static constexpr int kVec = kVectorWidth<T>;

  __device__ static int bytes() { return kItems * kVec * static_cast<int>(sizeof(C) * blockDim.x); }

  __device__ explicit RowParameter(void* memory)
      : quads_(static_cast<Quad*>(memory) + threadIdx.x) {}

  // To be followed by a barrier. `rows`: the pipeline whose columns count.
  template <typename Pipeline>
  __device__ void fill(const NormParameter& parameter, const Pipeline& rows, C offset,
                       C absent) const {
    if (threadIdx.y > 0) return;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const int column = rows.first() + rows.column(i, j);
        quad(i, j).values[j % kWidth] =
            rows.has(i, j) ? load_parameter<T>(parameter, column, offset, absent) : absent;
      }
    }
  }

  __device__ void load(int i, C (&x)[kVec]) const {
#pragma unroll
    for (int j = 0; j < kVec; j += kWidth) {
      const Quad q = quad(i, j);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x[j + k] = q.values[k];
    }
  }

 private:
  static constexpr int kWidth = 4;
  using Quad = Vector<C, kWidth>;

  __device__ Quad& quad(int i, int j) const {
    return quads_[(i * kVec + j) / kWidth * static_cast<int>(blockDim.x)];
  }

  Quad* quads_;
};

}  // namespace fusedcuda
