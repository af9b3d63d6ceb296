// One row of cross-entropy: its target, its loss, and vectors of its gradient.
//
// With x' = softcap * tanh(x / softcap) (or x), p = softmax(x'), w the class weights (or ones), t
// the target, ls the label smoothing and V the number of classes, a valid row has
//
//   entropy = (1 - ls) * w[t] * (lse - x'[t]) + ls / V * sum over c of w[c] * (lse - x'[c])
//   penalty = z_loss * lse^2
//   d entropy / d x'[c] = ((1 - ls) * w[t] + ls / V * sum w) * p[c]
//                         - (1 - ls) * w[t] * (c == t) - ls / V * w[c]
//   d penalty / d x'[c] = 2 * z_loss * lse * p[c]
//
// where lse = m + log(s) and p[c] = exp(x'[c] - m) / s, of the row's maximum m and the sum s of all
// exp(x' - m). These two are what a row keeps: lse is rounded, and exp(x'[c] - lse) would turn the
// rounding, of a number as large as the logits, into an error of every p.
#pragma once

#include <assert.h>

#include "common/online_softmax.cuh"
#include "common/row.cuh"
#include "cross_entropy.h"

namespace fusedcuda {

// The target of a row: a class, or -1 where the row is ignored. Everything that follows indexes
// with it, so each thread that does has looked at it here.
__device__ __forceinline__ int class_of_target(const CrossEntropyParams& p, int64_t row) {
  const int64_t target = p.target_is_int32 ? static_cast<const int32_t*>(p.target)[row]
                                           : static_cast<const int64_t*>(p.target)[row];
  if (target == p.ignore_index) return -1;
  const int64_t num_classes = p.columns;
  assert(target >= 0 && target < num_classes);
  return static_cast<int>(target);
}

template <typename C>
__device__ __forceinline__ C class_weight(const CrossEntropyParams& p, int index) {
  return p.weight == nullptr ? C(1) : static_cast<const C*>(p.weight)[index];
}

// The normalizer's part k with "mean", else 1.
template <typename C>
__device__ __forceinline__ C divisor(const CrossEntropyParams& p, int k) {
  return p.reduction == Reduction::kMean ? static_cast<const C*>(p.normalizer)[k] : C(1);
}

template <typename C>
__device__ __forceinline__ void store_statistics(const CrossEntropyParams& p, int64_t row,
                                                 const Pair<C>& statistics) {
  store_vector<C, 2>(static_cast<C*>(p.statistics) + 2 * row, {statistics.a, statistics.b});
}

template <typename C>
__device__ __forceinline__ Pair<C> load_statistics(const CrossEntropyParams& p, int64_t row) {
  const auto both = load_vector<C, 2>(static_cast<const C*>(p.statistics) + 2 * row);
  return {both.values[0], both.values[1]};
}

template <typename C>
__device__ __forceinline__ C log_sum_exp(const Pair<C>& statistics) {
  return statistics.a + static_cast<C>(::log(statistics.b));
}

// x' and d x' / d x.
template <typename T, bool kPlain>
struct Softcap {
  using C = Compute<T>;
  C cap;
  C inverse;

  __device__ explicit Softcap(const CrossEntropyParams& p)
      : cap(static_cast<C>(p.softcap)), inverse(is_on() ? C(1) / cap : C(0)) {}

  __device__ bool is_on() const { return !kPlain && cap != C(0); }

  template <int kVec>
  __device__ void apply(C (&x)[kVec]) const {
    if (!is_on()) return;
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] = cap * Math<sizeof(T) == 2>::tanh(x[j] * inverse);
  }

  template <int kVec>
  __device__ void multiply_by_slope(const C (&capped)[kVec], C (&g)[kVec]) const {
    if (!is_on()) return;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const C tanh = capped[j] * inverse;
      g[j] *= C(1) - tanh * tanh;
    }
  }
};

// What makes up the gradient of a row.
template <typename C>
struct GradientTerms {
  C of_exp;        // times exp(x' - maximum)
  C maximum;       // of the row
  C of_target;     // subtracted at the target
  C of_smoothing;  // times w[c], subtracted everywhere

  // `grad` flows into the row's loss; `weight_sum` is the sum of all class weights.
  __device__ GradientTerms(const CrossEntropyParams& p, int target, C grad, C weight_sum,
                           const Pair<C>& statistics)
      : maximum(statistics.a) {
    const C smoothing = static_cast<C>(p.label_smoothing);
    const C entropy = grad / divisor<C>(p, 0);
    of_target = entropy * (C(1) - smoothing) * class_weight<C>(p, max(target, 0));
    of_smoothing = entropy * (smoothing / static_cast<C>(p.columns));
    C of_p = of_target + of_smoothing * weight_sum;
    if (p.z_loss != 0) {
      const C penalty = grad / divisor<C>(p, 1) * C(2) * static_cast<C>(p.z_loss);
      of_p += penalty * log_sum_exp(statistics);
    }
    of_exp = of_p / statistics.b;
  }
};

// With kPlain there is neither a softcap nor label smoothing.
template <typename T, int kItems, bool kAligned, bool kPlain>
struct CrossEntropyRow {
  using C = Compute<T>;
  using Slice = RowSlice<T, kItems, kAligned>;
  static constexpr int kVec = Slice::kVec;
  using V = Packed<T>;

  const CrossEntropyParams& p;
  const Slice& slice;
  int target;  // see class_of_target
  Exponential<T> exp;
  Softcap<T, kPlain> softcap;

  __device__ CrossEntropyRow(const CrossEntropyParams& p_, const Slice& slice_, int64_t row)
      : p(p_), slice(slice_), target(class_of_target(p_, row)), exp(C(1)), softcap(p_) {}

  __device__ void add(int i, const V& v, OnlineSum<T>* sum) const {
    C x[kVec];
    unpack(v, x);
    softcap.apply(x);
    mask_with_infinity(slice, i, x);
    sum->add(x);
  }

  __device__ void load_weights(int i, C (&w)[kVec]) const {
    slice.load_parameter(p.weight, sizeof(C) == sizeof(float), i, C(1), w);
  }

  // Adds w * (x' - maximum) and w over vector i.
  __device__ void add_weighted(int i, const V& v, C maximum, Pair<C>* sums) const {
    C x[kVec], w[kVec];
    unpack(v, x);
    softcap.apply(x);
    load_weights(i, w);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (!slice.has(i, j)) continue;
      sums->a += w[j] * (x[j] - maximum);
      sums->b += w[j];
    }
  }

  // The target's logit waits where the loss will be, which takes no register: once the sums are
  // known, another thread may write the gradient over it.
  __device__ void keep_target_logit(C* losses, int64_t index) const {
    if (target >= 0) losses[index] = to_compute(row_of<T>(p.logits, index)[target]);
  }

  // The row's statistics and loss, given the sums of `add` and add_weighted, by the thread that
  // has kept the target's logit. Where the losses are added up, the penalty is added to them there.
  __device__ void store_loss(C* losses, int64_t index, const Pair<C>& total,
                             const Pair<C>& weighted) const {
    store_statistics(p, index, total);
    const C log_sum = ::log(total.b);
    C loss = 0;
    if (target >= 0) {
      C x[1] = {losses[index]};
      softcap.apply(x);
      // lse - x' from small differences, not from two large numbers.
      const C smoothing = static_cast<C>(p.label_smoothing);
      loss = (C(1) - smoothing) * class_weight<C>(p, target) * (total.a - x[0] + log_sum);
      if (!kPlain && smoothing != C(0))
        loss += smoothing / static_cast<C>(p.columns) * (weighted.b * log_sum - weighted.a);
      if (!p.adds_up() && p.z_loss != 0) {
        const C lse = total.a + log_sum;
        loss += static_cast<C>(p.z_loss) * lse * lse;
      }
    }
    losses[index] = loss;
  }

  // Vector i of the gradient: zeros in an ignored row, also where its logits are not finite.
  __device__ V gradient(int i, const V& v, const GradientTerms<C>& terms) const {
    C x[kVec], g[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) g[j] = 0;
    if (target < 0) return pack<T, kVec>(g);
    unpack(v, x);
    softcap.apply(x);
#pragma unroll
    for (int j = 0; j < kVec; ++j) g[j] = terms.of_exp * exp(x[j] - terms.maximum);
    if (!kPlain && terms.of_smoothing != C(0)) {
      C w[kVec];
      load_weights(i, w);
#pragma unroll
      for (int j = 0; j < kVec; ++j) g[j] -= terms.of_smoothing * w[j];
    }
    const int at = target - slice.column(i);
    if (static_cast<unsigned>(at) < static_cast<unsigned>(kVec)) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (j == at) g[j] -= terms.of_target;
      }
    }
    softcap.multiply_by_slope(x, g);
    return pack<T, kVec>(g);
  }
};

}  // namespace fusedcuda
