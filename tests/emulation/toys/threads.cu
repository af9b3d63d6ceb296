// Memory, barriers and warps.
#include "toys.h"

namespace {

constexpr unsigned kAll = 0xffffffff;

// data[i] becomes data[63 - i]; the sum of each warp is added to it.
__global__ void correct(float* data) {
  __shared__ float shared[kThreads];
  cudaGridDependencySynchronize();
  shared[threadIdx.x] = data[threadIdx.x];
  float sum = data[threadIdx.x];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAll, sum, offset);
  __syncthreads();
  data[threadIdx.x] = shared[kThreads - 1 - threadIdx.x] + sum;
}
TOY(correct);

__global__ void reads_past_the_end(float* data) {
  cudaGridDependencySynchronize();
  data[threadIdx.x] = data[threadIdx.x + 1];
}
TOY(reads_past_the_end);

__global__ void writes_before_the_start(float* data) {
  cudaGridDependencySynchronize();
  data[static_cast<int>(threadIdx.x) - 2000] = 0;
}
TOY(writes_before_the_start);

__global__ void misaligned_vector(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x == 2) *reinterpret_cast<float4*>(data + 2) = float4();
}
TOY(misaligned_vector);

__global__ void index_past_an_array(float* data) {
  cudaGridDependencySynchronize();
  float local[2] = {};
  data[threadIdx.x] = local[threadIdx.x / 30];
}
TOY(index_past_an_array);

__global__ void traps(float*) {
  if (threadIdx.x == 7) __trap();
}
TOY(traps);

__global__ void failed_assertion(float* data) {
  cudaGridDependencySynchronize();
  assert(data[threadIdx.x] < 50);
}
TOY(failed_assertion);

__global__ void barrier_in_a_branch(float* data) {
  cudaGridDependencySynchronize();
  if (data[threadIdx.x] > 5) __syncthreads();
}
TOY(barrier_in_a_branch);

__global__ void two_barriers(float*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
TOY(two_barriers);

__global__ void missing_barrier(float* data) {
  __shared__ float shared[kThreads];
  cudaGridDependencySynchronize();
  if (blockIdx.x != 0) return;
  shared[threadIdx.x] = data[threadIdx.x];
  data[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}
TOY(missing_barrier);

__global__ void last_block_wins(float* data) {
  cudaGridDependencySynchronize();
  data[threadIdx.x] = static_cast<float>(blockIdx.x);
}
TOY(last_block_wins);

__global__ void does_not_wait(float* data) { data[threadIdx.x] += 1; }
TOY(does_not_wait);

__global__ void barrier_before_waiting(float* data) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  cudaGridDependencySynchronize();
  data[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}
TOY(barrier_before_waiting);

// ---- Warps
// ---------------------------------------------------------------------------------------

template <typename T>
__global__ void shuffles(float* data) {
  cudaGridDependencySynchronize();
  if (blockIdx.x != 0) return;
  const T value = data[threadIdx.x];
  const T same = __shfl_sync(kAll, value, 5);
  const T up = __shfl_up_sync(kAll, value, 3);
  const T down = __shfl_down_sync(kAll, value, 4, 16);
  data[threadIdx.x] = static_cast<float>(same + 64 * up + 64 * 64 * down);
}
constexpr auto float_shuffles = shuffles<float>, double_shuffles = shuffles<double>;
TOY(float_shuffles);
TOY(double_shuffles);

__global__ void votes(float* data) {
  cudaGridDependencySynchronize();
  if (blockIdx.x != 0) return;
  const float value = data[threadIdx.x];
  const unsigned multiples_of_10 = __ballot_sync(kAll, static_cast<int>(value) % 10 == 0);
  const int any = __any_sync(kAll, value > 62), all = __all_sync(kAll, value < 32);
  data[threadIdx.x] =
      static_cast<float>(multiples_of_10 >> 10) + (any ? 0.5f : 0) + (all ? 0.25f : 0);
}
TOY(votes);

__global__ void shuffle_in_a_branch(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x != 40) data[threadIdx.x] = __shfl_xor_sync(kAll, 1.0f, 1);
}
TOY(shuffle_in_a_branch);

__global__ void shuffle_of_half_a_warp(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x < 16) data[threadIdx.x] = __shfl_down_sync(0xffff, 1.0f, 1);
}
TOY(shuffle_of_half_a_warp);

template <bool kSync>
__global__ void through_shared(float* data) {
  __shared__ float shared[kThreads];
  cudaGridDependencySynchronize();
  if (blockIdx.x != 0) return;
  shared[threadIdx.x] = data[threadIdx.x];
  if (kSync) __syncwarp();
  data[threadIdx.x] = shared[threadIdx.x ^ 31];
}
constexpr auto synced_warp = through_shared<true>, unsynced_warp = through_shared<false>;
TOY(synced_warp);
TOY(unsynced_warp);

__global__ void sync_warp_in_a_branch(float*) {
  if (threadIdx.x % 32 < 20) __syncwarp();
}
TOY(sync_warp_in_a_branch);

// ---- Atomics
// -------------------------------------------------------------------------------------

__global__ void counts(float* data) {
  __shared__ int count;
  cudaGridDependencySynchronize();
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 2);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&data[0], static_cast<float>(count));
}
TOY(counts);

// The sum of 1e8 and small numbers depends on the order.
__global__ void rounds_in_any_order(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x > 0) atomicAdd(&data[0], threadIdx.x == 40 ? 1e8f : 1.25f);
}
TOY(rounds_in_any_order);

}  // namespace
