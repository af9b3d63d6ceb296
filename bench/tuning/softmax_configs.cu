// Times the kernels of softmax.cu in many configurations, to choose those of softmax.h.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I csrc/kernels \
//     -o build/softmax_tuning bench/tuning/softmax_configs.cu && build/softmax_tuning
//
// Prints microseconds and TB/s (4 bytes an element forward, 6 backward) of bf16 rows, contenders
// interleaved, medians; the marked line is what the chooser takes.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check.cuh"
#include "random_values.cuh"
#include "softmax.cu"

using namespace fusedcuda;

struct Contender {
  RowConfig config;
  const char* mark;
  std::vector<float> microseconds;
};

// `threads` at most a block, `rows_per_block` rows in it.
RowConfig spread(const RowConfig& chosen, int64_t rows, int64_t columns, int items, int threads,
                 int block_threads) {
  RowConfig config = chosen;
  const int64_t vectors = ceil_div(columns, chosen.vec);
  config.items = items;
  config.cluster = static_cast<int>(next_power_of_two(ceil_div(vectors, int64_t{threads} * items)));
  const int64_t needed = ceil_div(vectors, int64_t{items} * config.cluster);
  config.threads_per_row = static_cast<int>(ceil_div(needed, kWarpSize) * kWarpSize);
  config.rows_per_block =
      config.cluster > 1 ? 1 : std::max(1, block_threads / config.threads_per_row);
  config.blocks = ceil_div(rows, config.rows_per_block) * config.cluster;
  return config;
}

cudaError_t run(const SoftmaxParams& p, const RowConfig& config) {
  using Value = OnlineSum<T>::MaxAndSum;
  switch (config.items) {
    case 1:
      return launch_rows<Value>(softmax_kernel<T, 1, true>, config, nullptr, p);
    case 2:
      return launch_rows<Value>(softmax_kernel<T, 2, true>, config, nullptr, p);
    case 4:
      return launch_rows<Value>(softmax_kernel<T, 4, true>, config, nullptr, p);
    default:
      return launch_rows<Value>(softmax_kernel<T, 8, true>, config, nullptr, p);
  }
}

cudaError_t run(const SoftmaxBwdParams& p, const RowConfig& config) {
  using Value = Compute<T>;
  switch (config.items) {
    case 1:
      return launch_rows<Value>(softmax_bwd_kernel<T, 1, true>, config, nullptr, p);
    case 2:
      return launch_rows<Value>(softmax_bwd_kernel<T, 2, true>, config, nullptr, p);
    default:
      return launch_rows<Value>(softmax_bwd_kernel<T, 4, true>, config, nullptr, p);
  }
}

bool same(const RowConfig& a, const RowConfig& b) {
  return a.path == b.path && a.items == b.items && a.threads_per_row == b.threads_per_row &&
         a.rows_per_block == b.rows_per_block && a.cluster == b.cluster && a.blocks == b.blocks;
}

template <typename Params>
void time(const char* name, const Params& p, std::vector<Contender> contenders, int bytes) {
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  for (int round = 0; round < 5; ++round) {
    for (Contender& c : contenders) {
      CHECK(run(p, c.config));
      CHECK(cudaEventRecord(start));
      for (int i = 0; i < 4; ++i) CHECK(run(p, c.config));
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, start, end));
      c.microseconds.push_back(ms * 1e3f / 4);
    }
  }
  for (Contender& c : contenders) {
    std::sort(c.microseconds.begin(), c.microseconds.end());
    const double us = c.microseconds[c.microseconds.size() / 2];
    std::printf(
        "%s %lldx%d  items %d block %4dx%d cluster %2d blocks %6lld  %7.1f us %5.2f TB/s%s\n", name,
        static_cast<long long>(p.rows), p.columns, c.config.items, c.config.threads_per_row,
        c.config.rows_per_block, c.config.cluster, static_cast<long long>(c.config.blocks), us,
        1e-6 * bytes * p.rows * p.columns / us, c.mark);
  }
}

void sweep(int64_t rows, int columns, T* x, T* y, const DeviceTraits& device) {
  SoftmaxParams p;
  p.dtype = DType::kBFloat16;
  p.rows = rows;
  p.columns = columns;
  p.x = RowMatrix::make(x, columns, rows, columns, 2);
  p.y = RowMatrix::make(y, columns, rows, columns, 2);
  SoftmaxBwdParams q;
  q.dtype = p.dtype;
  q.rows = rows;
  q.columns = columns;
  q.dy = p.x;
  q.y = RowMatrix::make(x + rows * columns, columns, rows, columns, 2);
  q.dx = p.y;
  std::vector<Contender> forward = {{choose_softmax_config(p, device), " *", {}}};
  std::vector<Contender> backward = {{choose_softmax_bwd_config(q, device), " *", {}}};
  auto add = [](const RowConfig& config, const char* mark, std::vector<Contender>* to) {
    if (config.cluster > kMaxCluster) return;
    for (const Contender& known : *to) {
      if (same(known.config, config)) return;
    }
    to->push_back({config, mark, {}});
  };
  const RowConfig chosen = backward[0].config;
  for (int items : {1, 2, 4, 8}) {
    for (int threads : {128, 256, 512}) {
      for (int block_threads : {128, 256}) {
        const RowConfig config = spread(chosen, rows, columns, items, threads, block_threads);
        add(config, "", &forward);
        if (items <= 4) add(config, "", &backward);
      }
    }
  }
  time("forward", p, forward, 4);
  time("backward", q, backward, 6);
}

int main() {
  DeviceTraits device;
  CHECK(softmax_device_traits(&device));
  constexpr int64_t kElements = int64_t{1} << 28;
  T* const x = random_values(2 * kElements, 0, 4);
  T* y;
  CHECK(cudaMalloc(&y, kElements * sizeof(T)));
  for (int columns : {1024, 4096, 8192, 16384, 32768, 65536, 262144})
    sweep(kElements / columns, columns, x, y, device);
}
