// Values and derivatives of the activations on a few elements in registers.
//
// The activation is a run-time value: one uniform branch for kVec elements costs nothing beside the
// memory traffic, and a template parameter would compile every kernel eight times.
//
// kFast (16-bit storage) takes the special-function unit's exp2 and reciprocal, whose error of 2
// ulp in float32 is 1/100 of the rounding to the output; float32 and float64 storage take the
// accurate functions.
#pragma once

#include <cuda_runtime.h>

#include "activation.h"

namespace fusedcuda {

template <bool kFast>
struct Math {
  static __device__ __forceinline__ float exp(float x) { return kFast ? __expf(x) : ::expf(x); }
  static __device__ __forceinline__ double exp(double x) { return ::exp(x); }

  // x / y. The approximate reciprocal keeps subnormal results, unlike __fdividef.
  static __device__ __forceinline__ float divide(float x, float y) {
    if constexpr (kFast) {
      float r;
      asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(y));
      return x * r;
    } else {
      return x / y;
    }
  }
  static __device__ __forceinline__ double divide(double x, double y) { return x / y; }

  // s = sigmoid(x) and c = 1 - s, both to full relative accuracy: exp(-|x|) neither overflows nor
  // cancels.
  template <typename C>
  static __device__ __forceinline__ void sigmoid(C x, C* s, C* c) {
    const C q = exp(x < C(0) ? x : -x);
    const C larger = divide(C(1), C(1) + q);
    const C smaller = q * larger;
    *s = x < C(0) ? smaller : larger;
    *c = x < C(0) ? larger : smaller;
  }

  static __device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }
  static __device__ __forceinline__ double tanh(double x) { return ::tanh(x); }

  // Standard normal distribution function. 1 + erf loses digits for negative x, as eager torch
  // does; in 16 bits that is below the rounding wherever the result matters, elsewhere erfc keeps
  // them.
  static __device__ __forceinline__ float normal_cdf(float x) {
    constexpr float kSqrtHalf = 0.70710678f;
    return kFast ? 0.5f + 0.5f * ::erff(x * kSqrtHalf) : 0.5f * ::erfcf(-x * kSqrtHalf);
  }
  static __device__ __forceinline__ double normal_cdf(double x) {
    return 0.5 * ::erfc(-x * 0.70710678118654752440);
  }
};

// gelu_tanh(z) = z * sigmoid(2 * kGeluAlpha * (z + kGeluBeta * z^3)): the tanh form of Hendrycks &
// Gimpel (arXiv:1606.08415) written with a sigmoid, which neither overflows nor cancels.
constexpr double kGeluAlpha = 0.79788456080286535588;  // sqrt(2 / pi)
constexpr double kGeluBeta = 0.044715;
constexpr double kInvSqrtTwoPi = 0.39894228040143267794;

// t = act(z) and dz = upstream * act'(z). What the caller does not use is not computed. A ReLU
// selects instead of multiplying, so that an infinite gradient of a clipped element is 0 and not
// NaN, as in torch.
template <bool kFast, int kVec, typename C>
__device__ __forceinline__ void activate(Activation activation, const C (&z)[kVec],
                                         const C (&upstream)[kVec], C (&t)[kVec], C (&dz)[kVec]) {
  using M = Math<kFast>;
  switch (activation) {
    case Activation::kNone:
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        t[j] = z[j];
        dz[j] = upstream[j];
      }
      return;
    case Activation::kRelu:
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        t[j] = z[j] <= C(0) ? C(0) : z[j];  // a NaN is not <= 0 and passes, as in torch
        dz[j] = z[j] <= C(0) ? C(0) : upstream[j];
      }
      return;
    case Activation::kReluSquared:
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        t[j] = z[j] <= C(0) ? C(0) : z[j] * z[j];
        dz[j] = z[j] <= C(0) ? C(0) : C(2) * z[j] * upstream[j];
      }
      return;
    case Activation::kTanh:
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        t[j] = M::tanh(z[j]);
        dz[j] = upstream[j] * (C(1) - t[j] * t[j]);
      }
      return;
    case Activation::kGelu:
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const C cdf = M::normal_cdf(z[j]);
        t[j] = z[j] * cdf;
        dz[j] = upstream[j] * (cdf + z[j] * (C(kInvSqrtTwoPi) * M::exp(C(-0.5) * z[j] * z[j])));
      }
      return;
    case Activation::kSigmoid:
    case Activation::kGeluTanh:
    case Activation::kSilu:
      // s(z), z * s(u(z)) and z * s(z): one piece of code for the three, which is much of a
      // kernel's size.
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        C u = z[j], slope = C(1), s, c;
        if (activation == Activation::kGeluTanh) {
          u = C(2 * kGeluAlpha) * (z[j] + C(kGeluBeta) * z[j] * z[j] * z[j]);
          slope = C(2 * kGeluAlpha) * (C(1) + C(3 * kGeluBeta) * z[j] * z[j]);
        }
        M::sigmoid(u, &s, &c);
        t[j] = activation == Activation::kSigmoid ? s : z[j] * s;
        dz[j] =
            upstream[j] * (activation == Activation::kSigmoid ? s * c : s + z[j] * s * c * slope);
      }
      return;
  }
}

template <bool kFast, int kVec, typename C>
__device__ __forceinline__ void activate(Activation activation, const C (&z)[kVec], C (&t)[kVec]) {
  C unused[kVec];
  activate<kFast>(activation, z, z, t, unused);
}

}  // namespace fusedcuda
