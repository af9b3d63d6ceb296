// What the pointwise operators compute on elements in registers.
#pragma once

#include "common/activation.cuh"
#include "common/convert.cuh"
#include "pointwise.h"

namespace fusedcuda {

// A formula is result(x, act(argument(x))). Operands that share a gradient share a slot.
struct ActivationLast {
  static constexpr bool kHasSums = true;  // gradients of broadcast operands
  template <typename C>
  static __device__ C result(const C*, C t) {
    return t;
  }
  template <typename C>
  static __device__ C upstream(const C*, C grad) {
    return grad;
  }
};

struct ActivationFirst {
  static constexpr bool kHasSums = true;
  template <typename C>
  static __device__ C argument(const C* x) {
    return x[0];
  }
  template <typename C>
  static __device__ C upstream(const C* x, C grad) {
    return grad * x[1];
  }
};

template <PointwiseOp kOp>
struct Formula;

template <>
struct Formula<PointwiseOp::kAddAct> : ActivationLast {
  static constexpr int kOperands = 2;
  static constexpr int kSlots = 1;
  static __host__ __device__ constexpr int slot_of(int) { return 0; }
  template <typename C>
  static __device__ C argument(const C* x) {
    return x[0] + x[1];
  }
  template <typename C>
  static __device__ void gradients(const C*, C, C, C dz, C* g) {
    g[0] = dz;
  }
};

template <>
struct Formula<PointwiseOp::kAddMulAct> : ActivationLast {
  static constexpr int kOperands = 3;
  static constexpr int kSlots = 2;
  static __host__ __device__ constexpr int slot_of(int operand) { return operand == 2; }
  template <typename C>
  static __device__ C argument(const C* x) {
    return (x[0] + x[1]) * x[2];
  }
  template <typename C>
  static __device__ void gradients(const C* x, C, C, C dz, C* g) {
    g[0] = dz * x[2];
    g[1] = dz * (x[0] + x[1]);
  }
};

template <>
struct Formula<PointwiseOp::kActScaleBias> : ActivationFirst {
  static constexpr int kOperands = 3;
  static constexpr int kSlots = 3;
  static __host__ __device__ constexpr int slot_of(int operand) { return operand; }
  template <typename C>
  static __device__ C result(const C* x, C t) {
    return t * x[1] + x[2];
  }
  template <typename C>
  static __device__ void gradients(const C*, C grad, C t, C dz, C* g) {
    g[0] = dz;
    g[1] = grad * t;
    g[2] = grad;
  }
};

template <>
struct Formula<PointwiseOp::kActMul> : ActivationFirst {
  static constexpr int kOperands = 2;
  static constexpr int kSlots = 2;
  static __host__ __device__ constexpr int slot_of(int operand) { return operand; }
  template <typename C>
  static __device__ C result(const C* x, C t) {
    return t * x[1];
  }
  template <typename C>
  static __device__ void gradients(const C*, C grad, C t, C dz, C* g) {
    g[0] = dz;
    g[1] = grad * t;
  }
};

// The third operand stands for the result, and has no value.
template <>
struct Formula<PointwiseOp::kActMulRecompute> : ActivationFirst {
  static constexpr bool kHasSums = false;
  static constexpr int kOperands = 3;
  static constexpr int kSlots = 3;
  static __host__ __device__ constexpr int slot_of(int operand) { return operand; }
  template <typename C>
  static __device__ void gradients(const C* x, C grad, C t, C dz, C* g) {
    Formula<PointwiseOp::kActMul>::gradients(x, grad, t, dz, g);
    g[2] = Formula<PointwiseOp::kActMul>::result(x, t);
  }
};

// 16-bit storage rounds away the last digits anyway, so it takes the fast exponential and
// reciprocal.
template <typename T>
constexpr bool kFastMath = sizeof(T) == 2;

// x[operand][element] -> y[element].
template <PointwiseOp kOp, typename T, int kVec, typename C>
__device__ __forceinline__ void evaluate(Activation activation,
                                         const C (&x)[Formula<kOp>::kOperands][kVec],
                                         C (&y)[kVec]) {
  using F = Formula<kOp>;
  C z[kVec], t[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    C column[F::kOperands];
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) column[k] = x[k][j];
    z[j] = F::argument(column);
  }
  activate<kFastMath<T>>(activation, z, t);
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    C column[F::kOperands];
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) column[k] = x[k][j];
    y[j] = F::result(column, t[j]);
  }
}

// x[operand][element], grad[element] -> g[slot][element].
template <PointwiseOp kOp, typename T, int kVec, typename C>
__device__ __forceinline__ void evaluate_gradients(Activation activation,
                                                   const C (&x)[Formula<kOp>::kOperands][kVec],
                                                   const C (&grad)[kVec],
                                                   C (&g)[Formula<kOp>::kSlots][kVec]) {
  using F = Formula<kOp>;
  C z[kVec], upstream[kVec], t[kVec], dz[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    C column[F::kOperands];
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) column[k] = x[k][j];
    z[j] = F::argument(column);
    upstream[j] = F::upstream(column, grad[j]);
  }
  activate<kFastMath<T>>(activation, z, upstream, t, dz);
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    C column[F::kOperands], slots[F::kSlots];
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) column[k] = x[k][j];
    F::gradients(column, grad[j], t[j], dz[j], slots);
#pragma unroll
    for (int s = 0; s < F::kSlots; ++s) g[s][j] = slots[s];
  }
}

}  // namespace fusedcuda
