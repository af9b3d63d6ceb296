// Softmax over the last dimension, with a factor on the logits:
//
//   y = exp(scale * (x - max)) / sum(exp(scale * (x - max)))        or its logarithm
//   dx = scale * y * (dy - sum(dy * y))
//   dx = scale * (dy - exp(y) * sum(dy))                            of the logarithm
//
// Bound by memory: the forward reads x once and writes y once, the backward reads dy and y and
// writes dx; 4 and 6 bytes an element for 16-bit types. A row stays in the registers of its threads
// as the raw 16-byte vectors that were loaded or, where there are few, as their exponentials, above
// 16,384 columns in the registers of a cluster of blocks. One barrier a row: maximum and sum travel
// together.
//
// - softmax_kernel, softmax_bwd_kernel: a row in registers;
// - softmax_stream_kernel, softmax_bwd_stream_kernel: a block walks along its row twice. For rows
//   beyond registers, GPUs without clusters, and float64.

#include <type_traits>

#include "common/launch.h"
#include "common/online_softmax.cuh"
#include "common/row.cuh"
#include "common/row_launch.cuh"
#include "common/shared.cuh"
#include "softmax.h"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Kernels
// ------------------------------------------------------------------------------------------------

// scale = magnitude * sign: softmax looks for the largest sign * x.
template <typename C>
struct Scale {
  C magnitude;
  C sign;  // 0 with a scale of 0, so that infinite elements become NaN

  __device__ explicit Scale(double scale_) {
    const C scale = static_cast<C>(scale_);
    magnitude = scale == C(0) ? C(1) : static_cast<C>(::fabs(scale));
    sign = scale > C(0) ? C(1) : scale < C(0) ? C(-1) : scale;
  }
};

// What a thread does with its vectors, the same for all kernels. Slice: which ones those are.
template <typename T, typename Slice>
struct SoftmaxRow {
  using C = Compute<T>;
  static constexpr int kVec = Slice::kVec;
  using V = Packed<T>;
  using MaxAndSum = typename OnlineSum<T>::MaxAndSum;

  const Slice& slice;
  Scale<C> scale;
  Exponential<T> exp;
  bool log;

  __device__ SoftmaxRow(const Slice& slice_, const SoftmaxParams& p)
      : slice(slice_), scale(p.scale), exp(scale.magnitude), log(p.log) {}

  // sign * x
  __device__ void values(const V& v, C (&x)[kVec]) const {
    unpack(v, x);
    if (scale.sign == C(1)) return;
#pragma unroll
    for (int j = 0; j < kVec; ++j) x[j] *= scale.sign;
  }

  // The same, and -inf outside of the row.
  __device__ void masked_values(int i, const V& v, C (&x)[kVec]) const {
    values(v, x);
    mask_with_infinity(slice, i, x);
  }

  __device__ void add(int i, const V& v, OnlineSum<T>* sum) const {
    C x[kVec];
    masked_values(i, v, x);
    sum->add(x);
  }

  // What each result is divided by, or the logarithm of it.
  __device__ C normalizer(const MaxAndSum& total) const {
    return log ? static_cast<C>(::log(total.b)) : C(1) / total.b;
  }

  __device__ V result(int i, const V& v, C maximum, C normalizer) const {
    C x[kVec];
    values(v, x);
    if (log) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[j] = (x[j] - maximum) * scale.magnitude - normalizer;
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[j] = exp(x[j] - maximum) * normalizer;
    }
    return pack<T, kVec>(x);
  }
};

template <typename T, int kItems, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, 2)
    softmax_kernel(const __grid_constant__ SoftmaxParams p) {
  using Slice = RowSlice<T, kItems, kAligned>;
  using Row = SoftmaxRow<T, Slice>;
  // Few enough to stay in registers, so that they are not computed twice: half of the instructions.
  // (With the bounds of an unaligned row beside them, four items spill.)
  constexpr bool kKeepsExponentials = kAligned && kItems <= 4;
  RowReduction<typename Row::MaxAndSum> reduction(dynamic_shared());
  const OwnRow own(p.rows);
  const T* x = row_of<T>(p.x, own.index);
  const Slice slice(x, p.columns, cluster_rank());
  const Row row(slice, p);

  wait_for_previous_kernel();
  typename Row::V v[kItems];
  slice.load_all(p.x, x, v);
  T* y = row_of<T>(p.y, own.index);
  if constexpr (kKeepsExponentials) {
    if (!p.log) {
      typename Row::C e[kItems][Row::kVec];
#pragma unroll
      for (int i = 0; i < kItems; ++i) row.masked_values(i, v[i], e[i]);
      const OnlineSum<T> sum(row.exp, e);
      const auto total = sum.reduce(reduction);
      let_next_kernel_start();
      if (!own.exists) return;
      const auto factor = row.exp(sum.maximum() - total.a) / total.b;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
#pragma unroll
        for (auto& value : e[i]) value *= factor;
        if (slice.has(i)) slice.store(y, i, pack<T, Row::kVec>(e[i]));
      }
      return;
    }
  }
  OnlineSum<T> sum(row.exp);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (slice.has(i)) row.add(i, v[i], &sum);
  }
  const auto total = sum.reduce(reduction);
  const uint32_t zero = total.b < 0;
  let_next_kernel_start();
  if (!own.exists) return;
  const auto normalizer = row.normalizer(total);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    v[i].forget_unpacked(zero);
    if (slice.has(i)) slice.store(y, i, row.result(i, v[i], total.a, normalizer));
  }
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    softmax_stream_kernel(const __grid_constant__ SoftmaxParams p) {
  using Slice = RowSlice<T, 1, false>;
  using Row = SoftmaxRow<T, Slice>;
  RowReduction<typename Row::MaxAndSum> reduction(dynamic_shared());
  const T* x = row_of<T>(p.x, blockIdx.x);
  const Slice slice(x, p.columns, 0);
  const Row row(slice, p);

  wait_for_previous_kernel();
  OnlineSum<T> sum(row.exp);
  for (int i = 0; slice.column(i) < p.columns; ++i) row.add(i, slice.load(p.x, x, i), &sum);
  const auto total = sum.reduce(reduction);
  const auto normalizer = row.normalizer(total);
  T* y = row_of<T>(p.y, blockIdx.x);
  for (int i = 0; slice.column(i) < p.columns; ++i) {
    slice.store(y, i, row.result(i, slice.load(p.x, x, i), total.a, normalizer));
  }
}

template <typename T>
struct SoftmaxGradient {
  using C = Compute<T>;
  static constexpr int kVec = kVectorWidth<T>;
  using V = Packed<T>;

  C scale;
  Exponential<T> exp;
  bool log;

  __device__ explicit SoftmaxGradient(const SoftmaxBwdParams& p)
      : scale(static_cast<C>(p.scale)), exp(C(1)), log(p.log) {}

  // Outside of the row, dy and y are 0.
  __device__ C sum(const V& dy_, const V& y_) const {
    C dy[kVec], y[kVec], sum = 0;
    unpack(dy_, dy);
    unpack(y_, y);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += dy[j] * (log ? C(1) : y[j]);
    return sum;
  }

  __device__ V result(const V& dy_, const V& y_, C sum) const {
    C dy[kVec], y[kVec];
    unpack(dy_, dy);
    unpack(y_, y);
    if (log) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) y[j] = exp(y[j]);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      y[j] = scale * (log ? dy[j] - y[j] * sum : y[j] * (dy[j] - sum));
    }
    return pack<T, kVec>(y);
  }
};

template <typename T, int kItems, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, 2)
    softmax_bwd_kernel(const __grid_constant__ SoftmaxBwdParams p) {
  using C = Compute<T>;
  using Slice = RowSlice<T, kItems, kAligned>;
  RowReduction<C> reduction(dynamic_shared());
  const OwnRow own(p.rows);
  const T* dy = row_of<T>(p.dy, own.index);
  const T* y = row_of<T>(p.y, own.index);
  const Slice slice(y, p.columns, cluster_rank());
  const SoftmaxGradient<T> gradient(p);

  wait_for_previous_kernel();
  Packed<T> g[kItems], v[kItems];
  slice.load_all(p.dy, dy, g);
  slice.load_all(p.y, y, v);
  C sum = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    sum += gradient.sum(g[i], v[i]);
    g[i].forget_unpacked();
    v[i].forget_unpacked();
  }
  sum = reduction.sum(sum);
  let_next_kernel_start();
  if (!own.exists) return;
  T* dx = row_of<T>(p.dx, own.index);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (slice.has(i)) slice.store(dx, i, gradient.result(g[i], v[i], sum));
  }
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    softmax_bwd_stream_kernel(const __grid_constant__ SoftmaxBwdParams p) {
  using C = Compute<T>;
  RowReduction<C> reduction(dynamic_shared());
  const T* dy = row_of<T>(p.dy, blockIdx.x);
  const T* y = row_of<T>(p.y, blockIdx.x);
  const RowSlice<T, 1, false> slice(y, p.columns, 0);
  const SoftmaxGradient<T> gradient(p);

  wait_for_previous_kernel();
  C sum = 0;
  for (int i = 0; slice.column(i) < p.columns; ++i) {
    sum += gradient.sum(slice.load(p.dy, dy, i), slice.load(p.y, y, i));
  }
  sum = reduction.sum(sum);
  T* dx = row_of<T>(p.dx, blockIdx.x);
  for (int i = 0; slice.column(i) < p.columns; ++i) {
    slice.store(dx, i, gradient.result(slice.load(p.dy, dy, i), slice.load(p.y, y, i), sum));
  }
}

// ------------------------------------------------------------------------------------------------
// Launchers
// ------------------------------------------------------------------------------------------------

cudaError_t softmax_device_traits(DeviceTraits* traits) {
  return describe_device(softmax_stream_kernel<float>, traits);
}

cudaError_t launch_softmax(const SoftmaxParams& params, const RowConfig& config,
                           cudaStream_t stream) {
  if (config.path == RowPath::kEmpty) return cudaSuccess;
  return with_type(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Value = typename OnlineSum<T>::MaxAndSum;
    if constexpr (!std::is_same_v<T, double>) {
      if (config.path == RowPath::kRegister) {
        return with_slice<8>(config, [&](auto items, auto aligned) {
          return launch_rows<Value>(softmax_kernel<T, items(), aligned()>, config, stream, params);
        });
      }
    }
    return launch_rows<Value>(softmax_stream_kernel<T>, config, stream, params);
  });
}

cudaError_t launch_softmax_bwd(const SoftmaxBwdParams& params, const RowConfig& config,
                               cudaStream_t stream) {
  if (config.path == RowPath::kEmpty) return cudaSuccess;
  return with_type(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using Value = Compute<T>;
    if constexpr (!std::is_same_v<T, double>) {
      if (config.path == RowPath::kRegister) {
        return with_slice<4>(config, [&](auto items, auto aligned) {
          return launch_rows<Value>(softmax_bwd_kernel<T, items(), aligned()>, config, stream,
                                    params);
        });
      }
    }
    return launch_rows<Value>(softmax_bwd_stream_kernel<T>, config, stream, params);
  });
}

}  // namespace fusedcuda
