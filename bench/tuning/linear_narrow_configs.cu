// Times linear_act.cu's kernel for few inputs in many configurations, to choose that of
// linear_act_config.h, beside what only writes as much.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I csrc/kernels \
//     -o build/narrow_tuning bench/tuning/linear_narrow_configs.cu && build/narrow_tuning
//
// bf16, ReLU. A line a shape and contender: the median of interleaved rounds of a CUDA graph of 40
// calls, over outputs that are together three times the L2, in microseconds, and TB/s of what is
// written. Sets: of 16 rows, of a warp.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "check.cuh"
#include "linear_act.cu"
#include "linear_act_product.cu"
#include "random_values.cuh"

using namespace fusedcuda;

namespace {

constexpr int kRounds = 9, kCalls = 40;
constexpr int64_t kColdBytes = int64_t{192} << 20;

// 16 bytes a thread and step, whole lines a warp.
template <int kSteps>
__global__ void __launch_bounds__(256) fill_kernel(uint4* to, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * kSteps * 256 + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    if (first + i * 256 < count) to[first + i * 256] = {1, 2, 3, 4};
}

// Blocks that stay, in steps of the grid.
__global__ void __launch_bounds__(256) fill_by_resident_blocks(uint4* to, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * 256)
    to[i] = {1, 2, 3, 4};
}

// As the products leave it: eight rows of 64 bytes a warp and store, `kHalves` of them side by
// side.
template <int kHalves>
__global__ void __launch_bounds__(256) fill_rows_of_quads(char* to, int64_t rows, int64_t pitch) {
  const int64_t of_row = pitch / (64 * kHalves);
  const int64_t warps = int64_t{gridDim.x} * 8, lane = threadIdx.x % 32;
  for (int64_t i = (int64_t{blockIdx.x} * 256 + threadIdx.x) / 32; i < rows / 8 * of_row;
       i += warps) {
    char* const place = to + (i / of_row * 8 + lane / 4) * pitch + i % of_row * 64 * kHalves;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      *reinterpret_cast<uint4*>(place + half * 64 + lane % 4 * 16) = {1, 2, 3, 4};
  }
}

// By the copy engine, from shared memory.
constexpr int kBulkBytes = 32 << 10;
__global__ void __launch_bounds__(128) fill_in_bulk(char* to, int64_t bytes) {
  extern __shared__ __align__(128) char data[];
  for (int i = threadIdx.x; i < kBulkBytes / 4; i += 128) reinterpret_cast<int*>(data)[i] = i;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x != 0) return;
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(data));
  for (int64_t at = int64_t{blockIdx.x} * kBulkBytes; at < bytes;
       at += int64_t{gridDim.x} * kBulkBytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + at),
                 "r"(from), "r"(kBulkBytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

struct Contender {
  std::string name;
  std::function<void(T*)> call;
  cudaGraphExec_t graph = nullptr;
  std::vector<float> us;
};

void shape(int64_t m, int64_t n, int64_t k, int num_sms) {
  const int64_t bytes = 2 * m * n;
  const int copies = static_cast<int>(std::max<int64_t>(2, (kColdBytes + bytes - 1) / bytes));
  std::vector<T*> outputs;
  for (int i = 0; i < std::min(copies, kCalls); ++i) outputs.push_back(random_values(m * n, i));
  LinearActParams p;
  p.activation = Activation::kRelu;
  p.m = m;
  p.n = n;
  p.k = k;
  p.a = {random_values(m * k, 100), k, true};
  p.b = {random_values(n * k, 101), k, true};
  p.bias = random_values(n, 102);
  std::vector<Contender> contenders;
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  auto add = [&](std::string name, std::function<void(T*)> call) {
    contenders.push_back({std::move(name), std::move(call), nullptr, {}});
  };
  add("memset", [=](T* y) { CHECK(cudaMemsetAsync(y, 0x3c, bytes, stream)); });
  auto blocks = [=](int of_block) {
    return dim3(static_cast<unsigned>((bytes / 16 + of_block - 1) / of_block));
  };
  add("fill, 1 step", [=](T* y) {
    fill_kernel<1><<<blocks(256), 256, 0, stream>>>(reinterpret_cast<uint4*>(y), bytes / 16);
  });
  add("fill, 4 steps", [=](T* y) {
    fill_kernel<4><<<blocks(1024), 256, 0, stream>>>(reinterpret_cast<uint4*>(y), bytes / 16);
  });
  add("fill, resident blocks", [=](T* y) {
    fill_by_resident_blocks<<<num_sms * 8, 256, 0, stream>>>(reinterpret_cast<uint4*>(y),
                                                             bytes / 16);
  });
  add("fill, in bulk", [=](T* y) {
    fill_in_bulk<<<num_sms * 2, 128, kBulkBytes, stream>>>(reinterpret_cast<char*>(y), bytes);
  });
  add("fill, 64 bytes of a row", [=](T* y) {
    fill_rows_of_quads<1><<<num_sms * 8, 256, 0, stream>>>(reinterpret_cast<char*>(y), m, 2 * n);
  });
  add("fill, 128 bytes of a row", [=](T* y) {
    fill_rows_of_quads<2><<<num_sms * 8, 256, 0, stream>>>(reinterpret_cast<char*>(y), m, 2 * n);
  });
  auto add_warps = [&](const std::string& name, int64_t warps) {
    const NarrowConfig config = narrow_config(p.m, p.n, warps);
    add("few inputs, " + name, [=](T* y) {
      LinearActParams q = p;
      q.output = {y, n};
      CHECK(launch_linear_narrow(q, config, true, stream));
    });
  };
  const int64_t resident = int64_t{num_sms} * narrow_blocks_of_sm(true) * kNarrowWarps;
  add_warps("resident", resident);
  add_warps("3/4 resident", resident * 3 / 4);
  add_warps("half resident", resident / 2);
  const int64_t all = m / 16 * ceil_div(n, kNarrowColumns);
  for (int sets : {1, 2, 8}) add_warps(std::to_string(sets) + " sets", all / sets);
  for (Contender& c : contenders) {
    for (T* y : outputs) c.call(y);
    CHECK(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCalls; ++i) c.call(outputs[i % outputs.size()]);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&c.graph, graph, 0));
  }
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& c : contenders) {
      CHECK(cudaGraphLaunch(c.graph, stream));
      CHECK(cudaEventRecord(start, stream));
      CHECK(cudaGraphLaunch(c.graph, stream));
      CHECK(cudaEventRecord(end, stream));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, start, end));
      c.us.push_back(ms * 1e3f / kCalls);
    }
  }
  for (Contender& c : contenders) {
    std::sort(c.us.begin(), c.us.end());
    const float us = c.us[kRounds / 2];
    std::printf("%ldx%ldx%ld %-24s %7.2f us (%.2f-%.2f) %5.2f TB/s\n", static_cast<long>(m),
                static_cast<long>(n), static_cast<long>(k), c.name.c_str(), us, c.us.front(),
                c.us.back(), static_cast<double>(bytes) / us * 1e-6);
  }
  for (T* y : outputs) CHECK(cudaFree(y));
}

}  // namespace

int main() {
  DeviceTraits device;
  CHECK(linear_act_device_traits(&device));
  shape(65536, 512, 16, device.num_sms);
  shape(65536, 512, 13, device.num_sms);
  shape(2048, 512, 13, device.num_sms);
}
