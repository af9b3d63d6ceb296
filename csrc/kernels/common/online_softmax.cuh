// The maximum of a row and the sum of its exponentials in one pass (online softmax, Milakov &
// Gimelshein, arXiv:1805.02867): a sum is kept relative to the maximum so far, and scaled when a
// larger value comes. What softmax and cross-entropy share.
#pragma once

#include <cfloat>
#include <cmath>

#include "activation.cuh"
#include "row.cuh"

namespace fusedcuda {

// exp(scale * x) in the compute type of T. The argument is a difference of two elements, so that
// neither the scale nor log2(e) makes a finite element overflow: masks are often -3.39e38, the
// lowest bfloat16.
template <typename T>
class Exponential {
 public:
  using C = Compute<T>;

  __device__ explicit Exponential(C scale)
      : factor_(kBase2 ? scale * static_cast<C>(kLog2E) : scale) {}

  __device__ C operator()(C x) const {
    if constexpr (kBase2) {
      return approximate_exp2(x * factor_);
    } else {
      return Math<false>::exp(x * factor_);
    }
  }

 private:
  static constexpr bool kBase2 = sizeof(T) == 2;  // see activation.cuh on accuracy
  static constexpr double kLog2E = 1.44269504088896340736;

  C factor_;
};

// A maximum that begins at -inf would need a test for rows, or parts of rows, that are all -inf:
// -inf - -inf is NaN. Beginning at the lowest finite number it does not, and gives them the sum 0.
// Those rows come out as NaN all the same, as in torch: 0 / 0, or -inf - log(0).
template <typename C>
constexpr C kLowest = -FLT_MAX;
template <>
constexpr double kLowest<double> = -DBL_MAX;

__device__ __forceinline__ float larger(float x, float y) { return ::fmaxf(x, y); }
__device__ __forceinline__ double larger(double x, double y) { return ::fmax(x, y); }

// NaN is no maximum, but makes the sum NaN, and so does +inf.
template <typename T>
class OnlineSum {
 public:
  using C = Compute<T>;
  using MaxAndSum = Pair<C>;  // a: the maximum, b: the sum of exp(scale * (x - a))

  __device__ explicit OnlineSum(const Exponential<T>& exp) : exp_(exp) {}

  // With all of a thread's elements at once, which become their exponentials, relative to the
  // maximum of the thread.
  template <int kVec, int kItems>
  __device__ OnlineSum(const Exponential<T>& exp, C (&x)[kItems][kVec]) : exp_(exp) {
    C maximum = part_.a;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) maximum = larger(maximum, x[i][j]);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        x[i][j] = exp_(x[i][j] - maximum);
        part_.b += x[i][j];
      }
    }
    part_.a = maximum;
  }

  // Of the elements so far.
  __device__ C maximum() const { return part_.a; }

  template <int kVec>
  __device__ void add(const C (&x)[kVec]) {
    C maximum = part_.a;
#pragma unroll
    for (int j = 0; j < kVec; ++j) maximum = larger(maximum, x[j]);
    part_.b *= exp_(part_.a - maximum);
#pragma unroll
    for (int j = 0; j < kVec; ++j) part_.b += exp_(x[j] - maximum);
    part_.a = maximum;
  }

  // The row's, from all its threads.
  __device__ MaxAndSum reduce(RowReduction<MaxAndSum>& reduction) const {
    auto combine = [exp = exp_](const MaxAndSum& x, const MaxAndSum& y) -> MaxAndSum {
      const bool ordered = x.a >= y.a;
      const C maximum = ordered ? x.a : y.a, lower = ordered ? y.a : x.a;
      const C sum = ordered ? x.b : y.b, to_scale = ordered ? y.b : x.b;
      return {maximum, sum + to_scale * exp(lower - maximum)};
    };
    return reduction(part_, {kLowest<C>, 0}, combine);
  }

 private:
  Exponential<T> exp_;
  MaxAndSum part_ = {kLowest<C>, 0};
};

// Elements of vector i that are not the row's become -inf.
template <typename Slice, typename C>
__device__ __forceinline__ void mask_with_infinity(const Slice& slice, int i, C (&x)[Slice::kVec]) {
  if (slice.has_all(i)) return;
#pragma unroll
  for (int j = 0; j < Slice::kVec; ++j) {
    if (!slice.has(i, j)) x[j] = -INFINITY;
  }
}

}  // namespace fusedcuda
