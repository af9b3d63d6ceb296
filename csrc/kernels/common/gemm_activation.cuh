// The activations in the epilogue of a matrix product.
#pragma once

#include "activation.cuh"

namespace fusedcuda {

// Values and derivatives of an activation; one type for each piece of code that there is.
template <Activation kActivation>
struct FixedActivation {
  static constexpr bool kIsLinear = kActivation == Activation::kNone;
  static constexpr bool kIsRelu = kActivation == Activation::kRelu;
  // Short enough for every chunk of an epilogue to have code of its own (gemm_epilogue.cuh).
  static constexpr bool kIsUnrolled = kIsLinear || kIsRelu;

  template <int kCount>
  __device__ __forceinline__ void operator()(const float (&z)[kCount], float (&y)[kCount],
                                             float (&derivative)[kCount]) const {
    float ones[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) ones[i] = 1.0f;
    activate<true>(kActivation, z, ones, y, derivative);
  }
};

// In the time of an epilogue every instruction counts, other than in a kernel that waits for
// memory. So the constants of activation.cuh's formula are multiplied together, and two values
// share a reciprocal, 1 / a = b / (a b): an instruction of the special functions takes a warp eight
// cycles, those three products three. What is below kLeast is taken as that, where the result is
// -1e-18: so the products stay below 2^126, and a NaN, which fmaxf takes for kLeast, stays with the
// value that it belongs to.
struct GeluTanhActivation {
  static constexpr bool kIsLinear = false, kIsRelu = false, kIsUnrolled = true;

  template <int kCount>
  __device__ __forceinline__ void operator()(const float (&z)[kCount], float (&y)[kCount],
                                             float (&derivative)[kCount]) const {
    static_assert(kCount % 2 == 0);
    constexpr float kScale = static_cast<float>(2 * kGeluAlpha);
    constexpr float kSlope = static_cast<float>(6 * kGeluAlpha * kGeluBeta);
    constexpr float kExponent = static_cast<float>(-2 * kGeluAlpha * 1.44269504088896340736);
    constexpr float kCubic =
        static_cast<float>(-2 * kGeluAlpha * 1.44269504088896340736 * kGeluBeta);
    constexpr float kLeast = -7.6f;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      float square[2], a[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x = fmaxf(z[i + j], kLeast);
        square[j] = x * x;
        a[j] = 1.0f + approximate_exp2(x * (kExponent + kCubic * square[j]));
      }
      const float both = approximate_reciprocal(a[0] * a[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float s = both * a[1 - j];
        y[i + j] = max_or_nan(z[i + j], kLeast) * s;
        // (1 - s is 0 where the square would be too large.)
        const float slope = kScale + kSlope * fminf(square[j], kLeast * kLeast);
        derivative[i + j] = s + y[i + j] * (1.0f - s) * slope;
      }
    }
  }
};

struct SigmoidActivation {
  static constexpr bool kIsLinear = false, kIsRelu = false, kIsUnrolled = false;
  Activation activation;

  template <int kCount>
  __device__ __forceinline__ void operator()(const float (&z)[kCount], float (&y)[kCount],
                                             float (&derivative)[kCount]) const {
    float ones[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) ones[i] = 1.0f;
    activate_by_sigmoid<true>(activation, z, ones, y, derivative);
  }
};

template <typename F>
__device__ __forceinline__ void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kNone:
      return f(FixedActivation<Activation::kNone>());
    case Activation::kRelu:
      return f(FixedActivation<Activation::kRelu>());
    case Activation::kReluSquared:
      return f(FixedActivation<Activation::kReluSquared>());
    case Activation::kTanh:
      return f(FixedActivation<Activation::kTanh>());
    case Activation::kGelu:
      return f(FixedActivation<Activation::kGelu>());
    case Activation::kGeluTanh:
      return f(GeluTanhActivation());
    case Activation::kSigmoid:
    case Activation::kSilu:
      return f(SigmoidActivation{activation});
  }
}

}  // namespace fusedcuda
