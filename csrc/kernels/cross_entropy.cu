// Cross-entropy over the last dimension, with class weights, label smoothing, a penalty on lse^2
// (z-loss), soft-capped logits, and the gradient of the logits. The formulas are in
// cross_entropy_row.cuh.
//
// Bound by memory. A row stays in the registers of its threads, up to 262,144 classes of a 16-bit
// type in those of a cluster of 16 blocks, so that loss and gradient take one read and one write of
// the logits: 4 bytes a logit for 16-bit types. A separate backward takes another 4.
//
// - cross_entropy_kernel: a row in registers;
// - cross_entropy_stream_kernel: a block walks along its row twice or three times. For rows beyond
//   registers, GPUs without clusters, and float64;
// - cross_entropy_totals_kernel: sums over the rows, in a fixed order. Behind the others for a loss
//   that is reduced; also ahead of them where the gradient is divided by the normalizer;
// - cross_entropy_bwd_kernel: the gradient from a row's statistics, element by element.

#include <type_traits>

#include "common/launch.h"
#include "common/online_softmax.cuh"
#include "common/row.cuh"
#include "common/row_launch.cuh"
#include "common/shared.cuh"
#include "cross_entropy.h"
#include "cross_entropy_config.h"
#include "cross_entropy_row.cuh"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Kernels
// ------------------------------------------------------------------------------------------------

// `losses`: one value a row. Without kPlain a thread may have 128 registers, which few rows need:
// those of tanh would otherwise push some of the others out to memory.
template <typename T, int kItems, bool kAligned, bool kPlain>
__global__ void __launch_bounds__(kRowThreads, kPlain ? 2 : 1)
    cross_entropy_kernel(const __grid_constant__ CrossEntropyParams p, Compute<T>* losses) {
  using C = Compute<T>;
  using Row = CrossEntropyRow<T, kItems, kAligned, kPlain>;
  RowReduction<Pair<C>> reduction(dynamic_shared());
  const OwnRow own(p.rows);
  const T* logits = row_of<T>(p.logits, own.index);
  const typename Row::Slice slice(logits, p.columns, cluster_rank());

  wait_for_previous_kernel();
  typename Row::V v[kItems];
  slice.load_all(p.logits, logits, v);
  const Row row(p, slice, own.index);
  const bool is_first = threadIdx.x == 0 && cluster_rank() == 0;
  if (own.exists && is_first) row.keep_target_logit(losses, own.index);
  OnlineSum<T> sum(row.exp);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (slice.has(i)) row.add(i, v[i], &sum);
  }
  const Pair<C> total = sum.reduce(reduction);
  const uint32_t zero = total.b < C(0);
  Pair<C> weighted = {0, static_cast<C>(p.columns)};
  if (!kPlain && p.label_smoothing != 0) {
    weighted.b = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      v[i].forget_unpacked(zero);
      if (slice.has(i)) row.add_weighted(i, v[i], total.a, &weighted);
    }
    weighted = reduction.sum(weighted);
  }
  let_next_kernel_start();
  if (!own.exists) return;
  if (is_first) row.store_loss(losses, own.index, total, weighted);
  if (p.gradient.data == nullptr) return;

  T* gradient = row_of<T>(p.gradient, own.index);
  const GradientTerms<C> terms(p, row.target, C(1), weighted.b, total);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    v[i].forget_unpacked(zero);
    if (slice.has(i)) slice.store(gradient, i, row.gradient(i, v[i], terms));
  }
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    cross_entropy_stream_kernel(const __grid_constant__ CrossEntropyParams p, Compute<T>* losses) {
  using C = Compute<T>;
  using Row = CrossEntropyRow<T, 1, false, false>;
  RowReduction<Pair<C>> reduction(dynamic_shared());
  const int64_t index = blockIdx.x;
  const T* logits = row_of<T>(p.logits, index);
  const typename Row::Slice slice(logits, p.columns, 0);

  wait_for_previous_kernel();
  const Row row(p, slice, index);
  if (threadIdx.x == 0) row.keep_target_logit(losses, index);
  auto load = [&](int i) { return slice.load(p.logits, logits, i); };
  OnlineSum<T> sum(row.exp);
  for (int i = 0; slice.column(i) < p.columns; ++i) row.add(i, load(i), &sum);
  const Pair<C> total = sum.reduce(reduction);
  Pair<C> weighted = {0, static_cast<C>(p.columns)};
  if (p.label_smoothing != 0) {
    weighted.b = 0;
    for (int i = 0; slice.column(i) < p.columns; ++i)
      row.add_weighted(i, load(i), total.a, &weighted);
    weighted = reduction.sum(weighted);
  }
  if (threadIdx.x == 0) row.store_loss(losses, index, total, weighted);
  if (p.gradient.data == nullptr) return;

  T* gradient = row_of<T>(p.gradient, index);
  const GradientTerms<C> terms(p, row.target, C(1), weighted.b, total);
  for (int i = 0; slice.column(i) < p.columns; ++i)
    slice.store(gradient, i, row.gradient(i, load(i), terms));
}

// Each block takes tiles of rows, most of them one. Elements are read and written by one thread, so
// the gradient may take the place of the logits. `weight_sum`: of all class weights; null where
// nobody asks for it.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kCrossEntropyBwdThreads, kAligned ? 4 : 3)
    cross_entropy_bwd_kernel(const __grid_constant__ CrossEntropyBwdParams p, Divider tiles,
                             int64_t num_tiles, const Compute<T>* weight_sum) {
  constexpr int kItems = kCrossEntropyBwdItems;
  using C = Compute<T>;
  using Row = CrossEntropyRow<T, kItems, kAligned, false>;
  wait_for_previous_kernel();
  const C* grad_loss = static_cast<const C*>(p.grad_loss);
  if (p.unless_one && *grad_loss == C(1)) return;
  for (int64_t position = blockIdx.x; position < num_tiles; position += gridDim.x) {
    int64_t tile;
    const int64_t index = tiles.divide(position, &tile) * blockDim.y + threadIdx.y;
    if (index >= p.rows) continue;
    const T* logits = row_of<T>(p.logits, index);
    const typename Row::Slice slice(logits, p.columns, static_cast<unsigned>(tile));
    typename Row::V v[kItems];
    slice.load_all(p.logits, logits, v);
    const Row row(p, slice, index);
    const C classes = static_cast<C>(p.columns);
    const C grad = grad_loss[index * p.grad_stride];
    const GradientTerms<C> terms(p, row.target, grad, weight_sum == nullptr ? classes : *weight_sum,
                                 load_statistics<C>(p, index));
    let_next_kernel_start();
    T* gradient = row_of<T>(p.gradient, index);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (slice.has(i)) slice.store(gradient, i, row.gradient(i, v[i], terms));
    }
  }
}

// Sums over all rows by one cluster: the normalizer and, given `losses`, the loss.
template <typename C>
__global__ void __launch_bounds__(kRowThreads)
    cross_entropy_totals_kernel(const __grid_constant__ CrossEntropyParams p, const C* losses) {
  RowReduction<Pair<C>> reduction(dynamic_shared());
  const int64_t step = int64_t{cluster_size()} * blockDim.x;
  Pair<C> valid = {0, 0}, parts = {0, 0};
  wait_for_previous_kernel();
#pragma unroll 4
  for (int64_t row = cluster_rank() * blockDim.x + threadIdx.x; row < p.rows; row += step) {
    const int index = class_of_target(p, row);
    if (index < 0) continue;
    valid.a += class_weight<C>(p, index);
    valid.b += C(1);
    if (losses == nullptr) continue;
    parts.a += losses[row];
    if (p.z_loss != 0) {
      const C lse = log_sum_exp(load_statistics<C>(p, row));
      parts.b += static_cast<C>(p.z_loss) * lse * lse;
    }
  }
  valid = reduction.sum(valid);
  if (losses != nullptr) parts = reduction.sum(parts);
  let_next_kernel_start();
  if (threadIdx.x != 0 || cluster_rank() != 0) return;
  C* normalizer = static_cast<C*>(p.normalizer);
  normalizer[0] = valid.a;
  normalizer[1] = valid.b;
  if (losses == nullptr) return;
  if (p.reduction == Reduction::kMean) {
    parts.a /= valid.a;  // 0 / 0 where every row is ignored: NaN, as in torch
    parts.b /= valid.b;
  }
  *static_cast<C*>(p.loss) = p.z_loss != 0 ? parts.a + parts.b : parts.a;
}

// The sum of all class weights, by one block.
template <typename C>
__global__ void __launch_bounds__(kRowThreads)
    cross_entropy_weight_sum_kernel(const C* weight, int classes, C* weight_sum) {
  RowReduction<C> reduction(dynamic_shared());
  C sum = 0;
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < classes; i += blockDim.x) sum += weight[i];
  sum = reduction.sum(sum);
  let_next_kernel_start();
  if (threadIdx.x == 0) *weight_sum = sum;
}

// ------------------------------------------------------------------------------------------------
// Launchers
// ------------------------------------------------------------------------------------------------

namespace cross_entropy {

template <typename C>
cudaError_t sum_over_rows(const CrossEntropyParams& p, const CrossEntropyConfig& config,
                          const C* losses, cudaStream_t stream) {
  RowConfig sums;
  sums.threads_per_row = kRowThreads;
  sums.cluster = config.totals_cluster;
  sums.blocks = config.totals_cluster;
  sums.dependent_launch = config.row.dependent_launch;
  return launch_rows<Pair<C>>(cross_entropy_totals_kernel<C>, sums, stream, p, losses);
}

template <typename T>
cudaError_t forward(const CrossEntropyParams& p, const CrossEntropyConfig& config, void* workspace,
                    cudaStream_t stream) {
  using C = Compute<T>;
  C* losses = static_cast<C*>(p.adds_up() ? workspace : p.loss);
  cudaError_t status = cudaSuccess;
  if (config.totals_first) status = sum_over_rows<C>(p, config, nullptr, stream);
  if (status == cudaSuccess && config.row.path != RowPath::kEmpty) {
    auto start = [&](auto kernel) {
      return launch_rows<Pair<C>>(kernel, config.row, stream, p, losses);
    };
    if (config.row.path == RowPath::kStream) {
      status = start(cross_entropy_stream_kernel<T>);
    } else if constexpr (!std::is_same_v<T, double>) {
      if (is_plain(p)) {
        status = with_slice<sizeof(T) == 2 ? 8 : 4>(config.row, [&](auto items, auto aligned) {
          return start(cross_entropy_kernel<T, items(), aligned(), true>);
        });
      } else {  // where a thread holds one vector, the places of three remain empty
        status = start(config.row.aligned ? cross_entropy_kernel<T, 4, true, false>
                                          : cross_entropy_kernel<T, 4, false, false>);
      }
    }
  }
  if (status != cudaSuccess || !p.adds_up()) return status;
  return sum_over_rows<C>(p, config, losses, stream);
}

template <typename T>
cudaError_t backward(const CrossEntropyBwdParams& p, const CrossEntropyBwdConfig& config,
                     void* workspace, cudaStream_t stream) {
  using C = Compute<T>;
  C* weight_sum = nullptr;
  if (config.workspace_size > 0) {
    weight_sum = static_cast<C*>(workspace);
    RowConfig sums;
    sums.threads_per_row = kRowThreads;
    sums.blocks = 1;
    sums.dependent_launch = config.row.dependent_launch;
    const cudaError_t status =
        launch_rows<C>(cross_entropy_weight_sum_kernel<C>, sums, stream,
                       static_cast<const C*>(p.weight), p.columns, weight_sum);
    if (status != cudaSuccess) return status;
  }
  const int64_t num_tiles = ceil_div(p.rows, config.row.rows_per_block) * config.tiles;
  const auto kernel =
      config.row.aligned ? cross_entropy_bwd_kernel<T, true> : cross_entropy_bwd_kernel<T, false>;
  return launch_rows<C>(kernel, config.row, stream, p, Divider::make(config.tiles), num_tiles,
                        weight_sum);
}

}  // namespace cross_entropy

cudaError_t cross_entropy_device_traits(DeviceTraits* traits) {
  return describe_device(cross_entropy_totals_kernel<float>, traits);
}

cudaError_t launch_cross_entropy(const CrossEntropyParams& params, const CrossEntropyConfig& config,
                                 void* workspace, cudaStream_t stream) {
  return with_type(params.dtype, [&](auto type) {
    return cross_entropy::forward<typename decltype(type)::type>(params, config, workspace, stream);
  });
}

cudaError_t launch_cross_entropy_bwd(const CrossEntropyBwdParams& params,
                                     const CrossEntropyBwdConfig& config, void* workspace,
                                     cudaStream_t stream) {
  if (config.row.path == RowPath::kEmpty) return cudaSuccess;
  return with_type(params.dtype, [&](auto type) {
    return cross_entropy::backward<typename decltype(type)::type>(params, config, workspace,
                                                                  stream);
  });
}

}  // namespace fusedcuda
