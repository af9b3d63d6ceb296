// The activations in the epilogue of a matrix product.
#pragma once

#include "activation.cuh"

namespace fusedcuda {

// Values and derivatives of an activation; one type for each piece of code that there is.
template <Activation kActivation>
struct FixedActivation {
  static constexpr bool kIsLinear = kActivation == Activation::kNone;
  static constexpr bool kIsRelu = kActivation == Activation::kRelu;

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
// memory: the constants of activation.cuh's formula are multiplied together.
struct GeluTanhActivation {
  static constexpr bool kIsLinear = false, kIsRelu = false;

  template <int kCount>
  __device__ __forceinline__ void operator()(const float (&z)[kCount], float (&y)[kCount],
                                             float (&derivative)[kCount]) const {
    constexpr float kScale = static_cast<float>(2 * kGeluAlpha);
    constexpr float kSlope = static_cast<float>(6 * kGeluAlpha * kGeluBeta);
    constexpr float kExponent = static_cast<float>(-2 * kGeluAlpha * 1.44269504088896340736);
    constexpr float kCubic =
        static_cast<float>(-2 * kGeluAlpha * 1.44269504088896340736 * kGeluBeta);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float square = z[i] * z[i];
      const float q = approximate_exp2(z[i] * (kExponent + kCubic * square));
      const float s = approximate_reciprocal(1.0f + q);
      y[i] = z[i] * s;
      derivative[i] = s + y[i] * (1.0f - s) * (kScale + kSlope * square);
    }
  }
};

struct SigmoidActivation {
  static constexpr bool kIsLinear = false, kIsRelu = false;
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
