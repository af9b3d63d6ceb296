// Values and derivatives of the activations on a few elements in registers.
//
// The activation is a run-time value: one uniform branch for kVec elements costs nothing beside the
// memory traffic, and a template parameter would compile every kernel eight times.
//
// kFast (16-bit storage) takes the special-function unit's exp2 and reciprocal, whose relative
// error is a few 1e-7, and 5e-6 where exp is near its limits: far below the rounding to the output.
// Subnormals are flushed, so that results below 1e-36 may become 0. float32 and float64 storage
// take the accurate functions.
#pragma once

#include <cuda_runtime.h>

#include "activation.h"

namespace fusedcuda {

// The special-function unit's exp2 and reciprocal; compiled for a CPU (tests/emulation), exact
// ones.
__device__ __forceinline__ float approximate_exp2(float x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return ::exp2f(x);
#endif
}

__device__ __forceinline__ float approximate_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / x;
#endif
}

// The larger one, or a NaN if there is one.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#else
  return a != a || b != b ? a + b : a > b ? a : b;
#endif
}

template <bool kFast>
struct Math {
  static __device__ __forceinline__ float exp(float x) {
    if constexpr (kFast) {
      constexpr float kLog2E = 1.44269504f;
      return approximate_exp2(x * kLog2E);
    } else {
      return ::expf(x);
    }
  }
  static __device__ __forceinline__ double exp(double x) { return ::exp(x); }

  static __device__ __forceinline__ float reciprocal(float x) {
    if constexpr (kFast) {
      return approximate_reciprocal(x);
    } else {
      return 1.0f / x;
    }
  }
  static __device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

  // s = sigmoid(x) and c = 1 - s. From exp(-|x|) both have full relative accuracy. Where neither is
  // small they must also add up to 1: then the error of one cancels that of the other in s * c, to
  // first order, as in torch's grad * (1 - s) * s (with two independent roundings it is twice as
  // large; below 1/3 the difference would lose the digits that the product has). For 16-bit storage
  // the cancellation in 1 - s stays below the rounding, and half the instructions are saved.
  template <typename C>
  static __device__ __forceinline__ void sigmoid(C x, C* s, C* c) {
    if constexpr (kFast) {
      *s = reciprocal(C(1) + exp(-x));
      *c = C(1) - *s;
    } else {
      const C q = exp(x < C(0) ? x : -x);
      const C larger = reciprocal(C(1) + q);
      const C smaller = q > C(0.5) ? C(1) - larger : q * larger;
      *s = x < C(0) ? smaller : larger;
      *c = x < C(0) ? larger : smaller;
    }
  }

  static __device__ __forceinline__ double tanh(double x) { return ::tanh(x); }
  static __device__ __forceinline__ float tanh(float x) {
    if constexpr (kFast) {
      // (1 - q) / (1 + q) cancels near 0, where the series takes over (relative error 2e-8 at
      // 0.02).
      const float q = exp(-2.0f * ::fabsf(x));
      const float large = ::copysignf((1.0f - q) * reciprocal(1.0f + q), x);
      return ::fabsf(x) < 0.02f ? x * (1.0f - x * x * (1.0f / 3.0f)) : large;
    } else {
      return ::tanhf(x);
    }
  }

  // The standard normal distribution function, given q = exp(-x^2 / 2), which the density needs as
  // well.
  static __device__ __forceinline__ double normal_cdf(double x, double) {
    return 0.5 * ::erfc(-x * 0.70710678118654752440);
  }
  static __device__ __forceinline__ float normal_cdf(float x, float q) {
    constexpr float kSqrtHalf = 0.70710678f;
    if constexpr (kFast) {
      // Abramowitz & Stegun 7.1.26. The tail's relative error is 3e-6 at |x| = 2 and 4e-4 at 4,
      // where 1 + erf, as eager torch has it, has lost as many digits; no branch, a third of the
      // instructions of erff.
      const float t = reciprocal(1.0f + 0.3275911f * kSqrtHalf * ::fabsf(x));
      const float poly =
          t * (0.254829592f +
               t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
      const float tail = 0.5f * poly * q;
      return x < 0.0f ? tail : 1.0f - tail;
    } else {
      return 0.5f * ::erfcf(-x * kSqrtHalf);
    }
  }
};

// gelu_tanh(z) = z * sigmoid(2 * kGeluAlpha * (z + kGeluBeta * z^3)): the tanh form of Hendrycks &
// Gimpel (arXiv:1606.08415) written with a sigmoid, which neither overflows nor cancels.
constexpr double kGeluAlpha = 0.79788456080286535588;  // sqrt(2 / pi)
constexpr double kGeluBeta = 0.044715;
constexpr double kInvSqrtTwoPi = 0.39894228040143267794;

// s(z), z * s(u(z)) and z * s(z): one piece of code for sigmoid, gelu_tanh and silu, which is much
// of a kernel's size.
template <bool kFast, int kVec, typename C>
__device__ __forceinline__ void activate_by_sigmoid(Activation activation, const C (&z)[kVec],
                                                    const C (&upstream)[kVec], C (&t)[kVec],
                                                    C (&dz)[kVec]) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    C u = z[j], slope = C(1), s, c;
    if (activation == Activation::kGeluTanh) {
      u = C(2 * kGeluAlpha) * (z[j] + C(kGeluBeta) * z[j] * z[j] * z[j]);
      slope = C(2 * kGeluAlpha) * (C(1) + C(3 * kGeluBeta) * z[j] * z[j]);
    }
    Math<kFast>::sigmoid(u, &s, &c);
    t[j] = activation == Activation::kSigmoid ? s : z[j] * s;
    dz[j] = upstream[j] * (activation == Activation::kSigmoid ? s * c : s + z[j] * s * c * slope);
  }
}

// t = act(z) and dz = upstream * act'(z). What the caller does not use is not computed. A ReLU
// selects instead of multiplying, so that an infinite gradient of a clipped element is 0 and not
// NaN, as in torch.
template <bool kFast, int kVec, typename C>
__device__ __forceinline__ void activate(Activation activation, const C (&z)[kVec],
                                         const C (&upstream)[kVec], C (&t)[kVec], C (&dz)[kVec]) {
  using M = Math<kFast>;
  // Ahead of the switch, which is a jump through a table: on a few megabytes its 0.1 us would show.
  if (activation == Activation::kRelu) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      t[j] = z[j] <= C(0) ? C(0) : z[j];  // a NaN is not <= 0 and passes, as in torch
      dz[j] = z[j] <= C(0) ? C(0) : upstream[j];
    }
    return;
  }
  switch (activation) {
    case Activation::kRelu:
      return;  // above
    case Activation::kNone:
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        t[j] = z[j];
        dz[j] = upstream[j];
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
        const C q = M::exp(C(-0.5) * z[j] * z[j]);
        const C cdf = M::normal_cdf(z[j], q);
        t[j] = z[j] * cdf;
        dz[j] = upstream[j] * (cdf + z[j] * (C(kInvSqrtTwoPi) * q));
      }
      return;
    case Activation::kSigmoid:
    case Activation::kGeluTanh:
    case Activation::kSilu:
      activate_by_sigmoid<kFast>(activation, z, upstream, t, dz);
      return;
  }
}

template <bool kFast, int kVec, typename C>
__device__ __forceinline__ void activate(Activation activation, const C (&z)[kVec], C (&t)[kVec]) {
  C unused[kVec];
  activate<kFast>(activation, z, z, t, unused);
}

}  // namespace fusedcuda
