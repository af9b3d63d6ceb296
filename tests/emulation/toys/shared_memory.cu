// Shared memory and asynchronous copies.
#include "kernels/common/async_copy.cuh"
#include "kernels/common/shared.cuh"
#include "toys.h"

namespace {

using namespace fusedcuda;

constexpr int kBytes = kThreads * sizeof(float);

__device__ float* floats() { return static_cast<float*>(dynamic_shared()); }

// Both blocks find NaN and leave numbers.
template <typename Shared>
__device__ void read_then_write(float* data, Shared shared) {
  cudaGridDependencySynchronize();
  data[threadIdx.x] = shared[threadIdx.x];
  shared[threadIdx.x] = 1;
}
__global__ void reads_static_first(float* data) {
  __shared__ float shared[kThreads];
  read_then_write(data, shared);
}
__global__ void reads_dynamic_first(float* data) { read_then_write(data, floats()); }
TOY(reads_static_first);
TOY(reads_dynamic_first, 1, kBytes);

template <int kPast>
__global__ void reverses(float* data) {
  cudaGridDependencySynchronize();
  if (blockIdx.x != 0) return;
  floats()[threadIdx.x + kPast] = data[threadIdx.x];
  __syncthreads();
  data[threadIdx.x] = floats()[kThreads - 1 - threadIdx.x];
}
constexpr auto dynamic = reverses<0>, much_dynamic = reverses<0>;
constexpr auto past_dynamic = reverses<1>, past_odd_dynamic = reverses<0>;
TOY(dynamic, 1, kBytes);
TOY(much_dynamic, 1, 227 << 10);
TOY(past_dynamic, 1, kBytes);
TOY(past_odd_dynamic, 1, kBytes - 2);

// ---- Asynchronous copies: a thread copies four floats
// --------------------------------------------

__device__ bool copies() { return blockIdx.x == 0 && threadIdx.x < kThreads / 4; }

__device__ void copy(float* shared, const float* data) {
  copy_async_16(shared + 4 * threadIdx.x, data + 4 * threadIdx.x);
}

// Copies two times, the second over the numbers of the first, which it makes negative.
template <int kPendingFirst, int kPendingSecond>
__global__ void two_groups(float* data) {
  cudaGridDependencySynchronize();
  if (!copies()) return;
  float* first = floats();
  float* second = floats() + kThreads;
  copy(first, data);
  copy_async_commit();
  copy(second, data);
  copy_async_commit();
  float sum[4];
  copy_async_wait<kPendingFirst>();
  for (int i = 0; i < 4; ++i) sum[i] = first[4 * threadIdx.x + i];
  copy_async_wait<kPendingSecond>();
  for (int i = 0; i < 4; ++i) sum[i] += 100 * second[4 * threadIdx.x + i];
  for (int i = 0; i < 4; ++i) data[4 * threadIdx.x + i] = sum[i];
  copy_async_wait<0>();
}
constexpr auto copies_in_groups = two_groups<1, 0>;
constexpr auto reads_the_first_too_early = two_groups<2, 0>;
constexpr auto reads_the_second_too_early = two_groups<1, 1>;
TOY(copies_in_groups, 1, 2 * kBytes);
TOY(reads_the_first_too_early, 1, 2 * kBytes);
TOY(reads_the_second_too_early, 1, 2 * kBytes);

// The copy may arrive before another thread has read what it overwrites.
template <bool kBarrier>
__global__ void overwrites(float* data) {
  cudaGridDependencySynchronize();
  if (blockIdx.x != 0) return;
  floats()[threadIdx.x] = 1;
  __syncthreads();
  const float other = floats()[kThreads - 1 - threadIdx.x];
  if (kBarrier) __syncthreads();
  if (copies()) copy(floats(), data);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  data[threadIdx.x] = floats()[threadIdx.x] + 100 * other;
}
constexpr auto overwrites_what_was_read = overwrites<true>,
               overwrites_too_early = overwrites<false>;
TOY(overwrites_what_was_read, 1, kBytes);
TOY(overwrites_too_early, 1, kBytes);

__global__ void does_not_wait_for_copies(float* data) {
  cudaGridDependencySynchronize();
  if (copies()) copy(floats(), data);
  copy_async_commit();
}
TOY(does_not_wait_for_copies, 1, kBytes);

__global__ void does_not_commit(float* data) {
  cudaGridDependencySynchronize();
  if (copies()) copy(floats(), data);
  copy_async_wait<0>();
}
TOY(does_not_commit, 1, kBytes);

__global__ void copies_from_misaligned(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x == 3) copy_async_16(floats(), data + 2);
}
TOY(copies_from_misaligned, 1, kBytes);

__global__ void copies_to_misaligned(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x == 3) copy_async_16(floats() + 1, data);
}
TOY(copies_to_misaligned, 1, kBytes);

__global__ void copies_to_global(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x == 3) copy_async_16(data, data + 4);
}
TOY(copies_to_global, 1, kBytes);

__global__ void copies_past_the_end(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x == 3) copy_async_16(floats(), data + kThreads);
}
TOY(copies_past_the_end, 1, kBytes);

__global__ void copies_without_waiting(float* data) {
  if (threadIdx.x == 3) copy_async_16(floats(), data);
}
TOY(copies_without_waiting, 1, kBytes);

}  // namespace
