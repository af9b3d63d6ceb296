// Times lora_decode.cuh with clusters of other sizes than its chooser takes, beside cuBLASLt's
// product without an adapter.
//
//   S=.../site-packages/nvidia/cu13
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I csrc/kernels -I $S/include \
//     -L $S/lib -l:libcublasLt.so.13 -o build/lora_decode_tuning \
//     bench/tuning/lora_decode_configs.cu && build/lora_decode_tuning
//
// bf16, no activation. A line a contender: the median of interleaved rounds, in microseconds a
// call, and the largest difference to sums in float32. The calls go through as many copies of the
// weight as do not fit into the L2.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "lora_one_launch.cu"
#include "products.cuh"

using namespace fusedcuda;

namespace {

constexpr int64_t kBytesBeyondL2 = 256 << 20;
constexpr float kScale = 2;

// A warp for each element.
__global__ void simple(const T* a, const T* b, int64_t k, T* output, int64_t pitch, float scale,
                       bool adds) {
  const int64_t row = blockIdx.y, column = blockIdx.x;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < k; i += kWarpSize)
    sum += __bfloat162float(a[row * k + i]) * __bfloat162float(b[column * k + i]);
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  T& to = output[row * pitch + column];
  sum = sum * scale + (adds ? __bfloat162float(to) : 0.0f);
  if (threadIdx.x == 0) to = __float2bfloat16_rn(sum);
}

void compare_clusters(const Lt& lt, int m, int n, int k, int rank, const DeviceTraits& device) {
  const int64_t of_weight = int64_t{n} * k;
  const int copies =
      static_cast<int>(std::max<int64_t>(2, ceil_div(kBytesBeyondL2, of_weight * 2)));
  std::vector<T*> weights;
  const float small = 1.7f / std::sqrt(static_cast<float>(k));
  for (int i = 0; i < copies; ++i) weights.push_back(random_values(of_weight, i + 1, small));
  T* const x = random_values(int64_t{m} * k, 77, 1.7f);
  T* const down = random_values(int64_t{rank} * k, 78, small);
  T* const up = random_values(int64_t{n} * rank, 79, 0.5f);
  T* const t = random_values(int64_t{m} * rank, 80, 1);
  T* const y = random_values(int64_t{m} * n, 81, 1);
  T* const expected = random_values(int64_t{m} * n, 82, 1);
  int next = 0;

  LoraProductParams p;
  LinearActParams& linear = p.linear;
  linear.m = m;
  linear.n = n;
  linear.k = k;
  linear.extra_k = lora_pitch(rank);
  linear.a = {x, k, true};
  linear.extra_a = {t, linear.extra_k, true};
  linear.extra_b = {up, linear.extra_k, true};
  linear.output = {y, n};
  p.rank = rank;
  p.down = {down, k, true};
  p.scale = kScale;
  auto params = [=, &next]() mutable {
    LoraProductParams of_call = p;
    of_call.linear.b = {weights[next++ % copies], k, true};
    return of_call;
  };
  // Of the copy that the last call has read.
  auto error = [=, &next] {
    T* const t_expected = random_values(int64_t{m} * rank, 83, 1);
    simple<<<dim3(rank, m), kWarpSize>>>(x, down, k, t_expected, rank, kScale, false);
    simple<<<dim3(n, m), kWarpSize>>>(x, weights[(next + copies - 1) % copies], k, expected, n, 1,
                                      false);
    simple<<<dim3(n, m), kWarpSize>>>(t_expected, up, rank, expected, n, 1, true);
    const float largest = difference(y, expected, int64_t{m} * n);
    CHECK(cudaFree(t_expected));
    return largest;
  };
  std::vector<Contender> contenders;
  contenders.push_back(
      {"chosen",
       [=]() mutable {
         const LoraProductParams of_call = params();
         CHECK(launch_lora_decode(of_call, choose_lora_decode_config(of_call, device), nullptr));
       },
       error,
       {}});
  for (int log2 = 0; log2 <= 3; ++log2) {
    linear.b = {weights[0], k, true};
    const FewRowsConfig config = few_rows::choose(lora_decode_detail::problem_of(p), log2, device);
    if (config.own_tiles == 0) continue;
    contenders.push_back({"clusters of " + std::to_string(1 << log2),
                          [=]() mutable { CHECK(launch_lora_decode(params(), config, nullptr)); },
                          error,
                          {}});
  }
  std::vector<LtProduct> products;
  for (const T* weight : weights)
    products.emplace_back(lt, n, m, k, true, weight, false, x, expected);
  contenders.push_back({"cuBLASLt without an adapter",
                        [&] { products[next++ % copies].run(0); },
                        [] { return 0.0f; },
                        {}});
  const std::string shape = std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k) +
                            " r" + std::to_string(rank);
  race(shape.c_str(), 2.0 * m * n * k, contenders);
  for (T* data : weights) CHECK(cudaFree(data));
  for (T* data : {x, down, up, t, y, expected}) CHECK(cudaFree(data));
}

}  // namespace

int main() {
  const Lt lt;
  DeviceTraits device;
  CHECK(lora_decode_device_traits(&device));
  std::printf("clusters of 8: %d with one block on an SM, %d with two\n",
              device.resident_clusters[0][3], device.resident_clusters[1][3]);
  for (int m : {1, 16, 32, 64}) compare_clusters(lt, m, 4096, 4096, 16, device);
  for (int rank : {8, 64}) compare_clusters(lt, 16, 4096, 4096, rank, device);
  compare_clusters(lt, 16, 14336, 4096, 16, device);
  compare_clusters(lt, 16, 4096, 14336, 16, device);
  compare_clusters(lt, 16, 1024, 4096, 16, device);
  return 0;
}
