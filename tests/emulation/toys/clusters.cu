// Two blocks in a cluster. Threads 0 to 31 of each have 32 of the numbers.
#include "kernels/common/cluster.cuh"
#include "kernels/common/shared.cuh"
#include "toys.h"

namespace {

using namespace fusedcuda;

constexpr int kBytes = kThreads * sizeof(double);

template <typename T = float>
__device__ T* slots() {
  return static_cast<T*>(dynamic_shared());
}

__device__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}

__device__ bool has_number() { return threadIdx.x < 32; }
__device__ float& number(float* data) { return data[cluster_rank() * 32 + threadIdx.x]; }
__device__ unsigned other_rank() { return cluster_size() - 1 - cluster_rank(); }

template <typename T>
__device__ void send(T value) {
  if (has_number()) store_to_cluster(slots<T>() + threadIdx.x, other_rank(), value);
}

// The blocks exchange their numbers. Also in a launch without clusters, to itself.
template <typename T>
__global__ void exchange(float* data) {
  cudaGridDependencySynchronize();
  cluster_barrier();
  if (has_number()) send(static_cast<T>(number(data)));
  cluster_barrier();
  if (has_number()) number(data) = static_cast<float>(slots<T>()[threadIdx.x]);
}
constexpr auto exchange_floats = exchange<float>, exchange_doubles = exchange<double>;
constexpr auto exchange_without_cluster = exchange<float>;
TOY(exchange_floats, 2, kBytes);
TOY(exchange_doubles, 2, kBytes);
TOY(exchange_without_cluster, 1, kBytes);

__global__ void exchange_pairs(float* data) {
  cudaGridDependencySynchronize();
  cluster_barrier();
  if (has_number()) send(float2{number(data), 1});
  cluster_barrier();
  if (!has_number()) return;
  const float2 pair = slots<float2>()[threadIdx.x];
  number(data) = pair.x + pair.y;
}
TOY(exchange_pairs, 2, kBytes);

__global__ void shares_per_block(float* data) {
  __shared__ float shared[32];
  cudaGridDependencySynchronize();
  if (has_number()) shared[threadIdx.x] = slots()[threadIdx.x] = number(data);
  cluster_barrier();
  if (has_number()) number(data) = shared[31 - threadIdx.x] + 100 * slots()[31 - threadIdx.x];
}
TOY(shares_per_block, 2, kBytes);

// ---- What depends on the order
// -------------------------------------------------------------------

__global__ void reads_before_waiting(float* data) {
  cudaGridDependencySynchronize();
  cluster_barrier();
  if (has_number()) send(number(data));
  cluster_arrive();
  const float received = slots()[threadIdx.x];
  cluster_wait();
  if (has_number()) number(data) = received;
}
TOY(reads_before_waiting, 2, kBytes);

__global__ void sends_after_arriving(float* data) {
  cudaGridDependencySynchronize();
  cluster_barrier();
  cluster_arrive();
  if (has_number()) send(number(data));
  cluster_wait();
  if (has_number()) number(data) = slots()[threadIdx.x];
  cluster_barrier();
}
TOY(sends_after_arriving, 2, kBytes);

__global__ void sends_before_all_have_read(float* data) {
  cudaGridDependencySynchronize();
  cluster_barrier();
  for (int round = 0; round < 2; ++round) {
    if (has_number()) send(number(data));
    cluster_barrier();
    if (has_number()) number(data) = 2 * slots()[threadIdx.x];
  }
}
TOY(sends_before_all_have_read, 2, kBytes);

// ---- Errors
// --------------------------------------------------------------------------------------

__global__ void sends_to_unstarted(float* data) {
  cudaGridDependencySynchronize();
  send(data[threadIdx.x]);
  cluster_barrier();
}
TOY(sends_to_unstarted, 2, kBytes);

__global__ void sends_to_ended(float* data) {
  cudaGridDependencySynchronize();
  cluster_barrier();
  send(data[threadIdx.x]);
}
TOY(sends_to_ended, 2, kBytes);

__global__ void sends_past_the_last(float* data) {
  cudaGridDependencySynchronize();
  cluster_barrier();
  store_to_cluster(slots(), cluster_size(), data[0]);
}
TOY(sends_past_the_last, 2, kBytes);

__global__ void sends_to_static(float* data) {
  __shared__ float shared;
  cudaGridDependencySynchronize();
  cluster_barrier();
  store_to_cluster(&shared, other_rank(), data[0]);
}
TOY(sends_to_static, 2, kBytes);

__global__ void arrives_twice(float*) {
  cluster_arrive();
  cluster_arrive();
}
TOY(arrives_twice, 2);

__global__ void waits_without_arriving(float*) {
  if (threadIdx.x != 9) cluster_arrive();
  cluster_wait();
}
TOY(waits_without_arriving, 2);

__global__ void ends_without_waiting(float*) { cluster_arrive(); }
TOY(ends_without_waiting, 2);

__global__ void thread_does_not_arrive(float*) {
  if (threadIdx.x != 9) cluster_barrier();
}
TOY(thread_does_not_arrive, 2);

__global__ void block_does_not_arrive(float*) {
  if (cluster_rank() == 0) cluster_barrier();
}
TOY(block_does_not_arrive, 2);

}  // namespace
