// Times the kernels of norm.cu and norm_bwd.cu in many configurations, to choose those of
// norm_config.h.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I csrc/kernels \
//     -o build/norm_tuning bench/tuning/norm_configs.cu && build/norm_tuning
//
// Prints microseconds and TB/s (4 bytes an element forward, 6 backward) of bf16 rows; the marked
// line is what the chooser takes. `build/norm_tuning chosen` times nothing else, in a few seconds.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.cuh"
#include "norm.cu"
#include "norm_bwd.cu"
#include "random_values.cuh"

using namespace fusedcuda;

bool only_chosen = false;

template <typename Call>
double microseconds(Call call) {
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) call();
  CHECK(cudaEventRecord(start));
  constexpr int kCount = 15;
  for (int i = 0; i < kCount; ++i) call();
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  CHECK(cudaGetLastError());
  float ms;
  CHECK(cudaEventElapsedTime(&ms, start, end));
  return ms * 1e3 / kCount;
}

// Rows over blocks of at most `threads` threads, `rows_per_block` of them in a block.
RowConfig spread(const RowConfig& chosen, int64_t columns, int items, int threads,
                 int rows_per_block) {
  RowConfig config = chosen;
  const int64_t vectors = ceil_div(columns + (chosen.aligned ? 0 : chosen.vec - 1), chosen.vec);
  config.items = items;
  config.cluster = static_cast<int>(next_power_of_two(ceil_div(vectors, int64_t{threads} * items)));
  const int64_t needed = ceil_div(vectors, int64_t{items} * config.cluster);
  config.threads_per_row = static_cast<int>(ceil_div(needed, kWarpSize) * kWarpSize);
  config.rows_per_block = rows_per_block;
  return config;
}

std::string text(const NormConfig& c) {
  const RowConfig& row = c.row;
  char line[200];
  std::snprintf(line, sizeof(line), "%-7s items %d block %4dx%d cluster %2d stages %d blocks %4lld",
                c.narrow ? "narrow" : name_of(c.access), row.items, row.threads_per_row,
                row.rows_per_block, row.cluster, c.stages, static_cast<long long>(row.blocks));
  return line;
}

// Times `run` in the chosen configuration and in others.
template <typename Params, typename Run>
void sweep(const char* name, const Params& p, const NormConfig& chosen, int items,
           const norm::Pipeline& pipeline, double gigabytes, const DeviceTraits& device, Run run) {
  const bool is_backward = std::string(name).find("backward") == 0;
  const int threads_of_sm = pipeline.threads_of_sm;
  std::vector<std::string> seen;
  auto time = [&](const NormConfig& config, const char* mark) {
    for (const std::string& other : seen) {
      if (other == text(config)) return;
    }
    seen.push_back(text(config));
    const double us = microseconds([&] { run(config); });
    std::printf("%s %s %lldx%d  %s %8.1f us %5.2f TB/s%s\n",
                p.kind == NormKind::kRms ? "rms" : "layer", name, static_cast<long long>(p.rows),
                p.columns, text(config).c_str(), us, gigabytes / us * 1e3, mark);
  };
  time(chosen, " *");
  if (only_chosen || chosen.row.path == RowPath::kStream || chosen.row.items == 1) return;
  const bool phased = chosen.access == RowAccess::kPhased;
  if (!is_backward) {
    // The register path: rows a block.
    for (int block_threads : {128, 256, 512}) {
      NormConfig config = chosen;
      config.row = spread(chosen.row, p.columns, items, kRowThreads, 1);
      RowConfig& row = config.row;
      if (row.cluster > 1) continue;
      row.path = RowPath::kRegister;
      row.rows_per_block = std::max(1, block_threads / row.threads_per_row);
      row.blocks = ceil_div(p.rows, row.rows_per_block);
      config.shared_bytes = row.scratch_bytes(pipeline.value_size);
      config.stages = 0;
      time(config, " register");
    }
  }
  for (int threads : {128, 256, 512}) {
    for (int block_threads : {128, 256, 320, 512, kPhasedLayerNormBwdThreads}) {
      if (block_threads > 512 && !(phased && is_backward && p.kind == NormKind::kLayer)) continue;
      for (int share : {threads_of_sm, threads_of_sm * 3 / 4, threads_of_sm / 2}) {
        for (int stages : {1, 2, 3}) {
          NormConfig config = chosen;
          config.row = spread(chosen.row, p.columns, items, threads, 1);
          RowConfig& row = config.row;
          if (row.cluster > 16 || (row.cluster == 1 && !is_backward && !phased)) continue;
          row.rows_per_block =
              row.cluster > 1 ? 1 : std::max(1, block_threads / row.threads_per_row);
          norm::Pipeline variant = pipeline;
          variant.threads_of_sm = share;
          variant.most_stages = stages;
          norm::choose_pipeline(p.rows, variant, device, &config);
          if (row.path != RowPath::kStream && config.stages == stages) time(config, "");
        }
      }
    }
  }
}

void forward(NormKind kind, int64_t rows, int columns, bool residual, T* x, T* y, T* weight,
             const DeviceTraits& device) {
  NormParams p;
  p.kind = kind;
  p.dtype = DType::kBFloat16;
  p.rows = rows;
  p.columns = columns;
  p.x = RowMatrix::make(x, columns, rows, columns, 2);
  p.y = RowMatrix::make(y, columns, rows, columns, 2);
  if (residual) {
    p.residual = RowMatrix::make(x + rows * columns, columns, rows, columns, 2);
    p.sum = RowMatrix::make(y + rows * columns, columns, rows, columns, 2);
  }
  p.weight.data = weight;
  if (kind == NormKind::kLayer) p.bias.data = weight;
  p.eps = 1e-6;
  const int parameters = kind == NormKind::kLayer ? 2 : 1, tensors = residual ? 2 : 1;
  sweep(residual ? "forward residual" : "forward", p, choose_norm_config(p, device), kNormItems,
        {parameters, tensors, sizeof(float), 2 * kRowThreads},
        (residual ? 8e-9 : 4e-9) * rows * columns, device,
        [&](const NormConfig& config) { CHECK(launch_norm(p, config, nullptr)); });
}

void backward(NormKind kind, int64_t rows, int columns, bool residual, T* x, T* y, T* weight,
              float* rstd, float* workspace, const DeviceTraits& device) {
  NormBwdParams p;
  p.kind = kind;
  p.dtype = DType::kBFloat16;
  p.rows = rows;
  p.columns = columns;
  p.h = RowMatrix::make(x, columns, rows, columns, 2);
  p.dy = RowMatrix::make(x + rows * columns, columns, rows, columns, 2);
  p.dx = RowMatrix::make(y, columns, rows, columns, 2);
  if (residual) p.dh = RowMatrix::make(y + rows * columns, columns, rows, columns, 2);
  p.rstd = rstd;
  p.weight.data = weight;
  p.dweight.data = weight + columns;
  if (kind == NormKind::kLayer) {
    p.mean = rstd;
    p.dbias.data = weight + 2 * columns;
  }
  const NormConfig chosen = choose_norm_bwd_config(p, device);
  const bool is_phased_layer = kind == NormKind::kLayer && chosen.access == RowAccess::kPhased;
  sweep(residual ? "backward residual" : "backward", p, chosen, chosen.row.items,
        {1, residual ? 3 : 2, 2 * sizeof(float),
         is_phased_layer ? kPhasedLayerNormBwdThreads : kRowThreads},
        (residual ? 8e-9 : 6e-9) * rows * columns, device,
        [&](const NormConfig& config) { CHECK(launch_norm_bwd(p, config, workspace, nullptr)); });
}

int main(int argc, char** argv) {
  only_chosen = argc > 1 && std::string(argv[1]) == "chosen";
  DeviceTraits device;
  CHECK(norm_device_traits(&device));
  std::printf("%d SMs, resident clusters of 2, 4, 8, 16: %d %d %d %d\n", device.num_sms,
              device.resident_clusters[0][1], device.resident_clusters[0][2],
              device.resident_clusters[0][3], device.resident_clusters[0][4]);
  constexpr int64_t kElements = int64_t{1} << 28;
  T* x = random_values(2 * kElements + (1 << 24), 1);
  T* y = random_values(2 * kElements + (1 << 24), 2);
  T* weight = random_values(1 << 20, 3);
  float *rstd, *workspace;
  CHECK(cudaMalloc(&rstd, sizeof(float) << 22));
  CHECK(cudaMemset(rstd, 0x3f, sizeof(float) << 22));
  CHECK(cudaMalloc(&workspace, sizeof(float) << 26));
  const struct {
    NormKind kind;
    int64_t rows;
    int columns;
    bool residual;
  } cases[] = {
      {NormKind::kRms, 262144, 1024, false},  {NormKind::kRms, 65536, 4096, false},
      {NormKind::kRms, 32768, 8192, false},   {NormKind::kRms, 16384, 16384, false},
      {NormKind::kRms, 8192, 32768, false},   {NormKind::kRms, 4096, 65536, false},
      {NormKind::kRms, 1024, 262144, false},  {NormKind::kRms, 65536, 4096, true},
      {NormKind::kRms, 16384, 16384, true},   {NormKind::kRms, 65536, 4097, false},
      {NormKind::kRms, 4096, 50257, false},   {NormKind::kRms, 128, 4096, false},
      {NormKind::kRms, 1, 4096, false},       {NormKind::kLayer, 81920, 3072, false},
      {NormKind::kLayer, 65536, 4096, false}, {NormKind::kLayer, 16384, 16384, false},
      {NormKind::kLayer, 4096, 65536, false}, {NormKind::kLayer, 1024, 262144, false},
      {NormKind::kLayer, 65536, 4097, false}, {NormKind::kLayer, 4096, 50257, false},
      {NormKind::kRms, 262144, 1025, false},  {NormKind::kLayer, 262144, 1025, false},
      {NormKind::kRms, 1 << 20, 1, false},    {NormKind::kLayer, 1 << 20, 1, false},
      {NormKind::kRms, 1 << 20, 7, false},    {NormKind::kLayer, 1 << 20, 7, false},
  };
  for (const auto& c : cases) {
    forward(c.kind, c.rows, c.columns, c.residual, x, y, weight, device);
    backward(c.kind, c.rows, c.columns, c.residual, x, y, weight, rstd, workspace, device);
  }
}
