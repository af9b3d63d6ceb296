// Times the interaction of dlrm.cu on tensor cores in many configurations, to choose that of
// dlrm_config.h.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I csrc/kernels \
//     -o build/dlrm_tuning bench/tuning/dlrm_configs.cu && build/dlrm_tuning
//
// bf16, forward and backward: samples of a warp in shared memory (stages), warps a block, and
// blocks that an SM has at a time, in which those of the chooser are marked. Contenders are
// interleaved, over buffers that are together larger than the L2; medians of microseconds, and TB/s
// of the bytes that have to be moved. The last line of a shape is its best.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check.cuh"
#include "dlrm.cu"
#include "dlrm_config.h"
#include "random_values.cuh"

using namespace fusedcuda;

constexpr int kMostStages = 3;
constexpr int kRounds = 7;
constexpr int64_t kPoolBytes = int64_t{3} << 29;
constexpr int64_t kColdBytes = int64_t{192} << 20;  // three times the L2

struct Contender {
  DotConfig config;
  bool is_chosen;
  std::vector<float> microseconds;

  float median() const { return microseconds[microseconds.size() / 2]; }
};

template <int kTiles, int kStages>
cudaError_t run(const DotParams& p, const DotConfig& config) {
  return dlrm::launch_dot(dot_interaction_kernel<T, kTiles, kStages, false, true>, config, nullptr,
                          p, dlrm::steps_of(p, p.width, config), config.aligned_row);
}

template <int kTiles, int kStages>
cudaError_t run(const DotBwdParams& p, const DotConfig& config) {
  return dlrm::launch_dot(dot_interaction_bwd_kernel<T, kTiles, kStages, false, true>, config,
                          nullptr, p, dlrm::steps_of(p, p.grad_stride, config), config.aligned_row);
}

template <int kTiles, typename Params>
cudaError_t run_stages(const Params& p, const DotConfig& config) {
  if (config.stages == 1) return run<kTiles, 1>(p, config);
  return config.stages == 2 ? run<kTiles, 2>(p, config) : run<kTiles, kMostStages>(p, config);
}

template <typename Params>
cudaError_t run(const Params& p, const DotConfig& config) {
  return config.tiles == kFewDotTiles ? run_stages<kFewDotTiles>(p, config)
                                      : run_stages<kManyDotTiles>(p, config);
}

// All that fit: stages, warps of a block, and of the blocks that fit an SM all, three quarters or
// half of them.
std::vector<Contender> contenders_of(const DotVectors& p, bool is_backward, const DotConfig& chosen,
                                     const DeviceTraits& device) {
  std::vector<Contender> contenders = {{chosen, true, {}}};
  const int64_t most_blocks = chosen.tiles == kFewDotTiles ? kFewTilesBlocks : kManyTilesBlocks;
  for (int stages = 1; stages <= kMostStages; ++stages) {
    for (int64_t warps = 1; warps <= kDotWarps; warps *= 2) {
      DotConfig config = chosen;
      config.stages = stages;
      config.threads = static_cast<int>(warps) * kWarpSize;
      config.shared_bytes =
          DotLayout(p, config.tiles, stages).block_bytes(is_backward, static_cast<int>(warps));
      if (config.shared_bytes > device.shared_bytes_of_block) continue;
      const int64_t by_memory =
          device.shared_bytes_of_sm / (config.shared_bytes + dlrm_detail::kReservedBytes);
      const int64_t resident = std::min(by_memory, most_blocks * kDotWarps / warps);
      for (int64_t quarters : {4, 3, 2}) {
        config.blocks =
            std::min(ceil_div(p.batch, warps), resident * quarters / 4 * device.num_sms);
        const bool is_known =
            std::any_of(contenders.begin(), contenders.end(), [&](const Contender& other) {
              const DotConfig& c = other.config;
              return c.stages == stages && c.threads == config.threads && c.blocks == config.blocks;
            });
        if (config.blocks > 0 && !is_known) contenders.push_back({config, false, {}});
      }
    }
  }
  return contenders;
}

void print(const char* what, const DotVectors& p, double bytes, const Contender& c,
           const DeviceTraits& device, const char* mark) {
  std::printf(
      "%-8s %6lldx%dx%-3d  stages %d block %d warps, %5.2f blocks an SM  %7.1f us %5.2f TB/s%s\n",
      what, static_cast<long long>(p.batch), p.vectors, p.columns, c.config.stages,
      c.config.threads / kWarpSize, static_cast<double>(c.config.blocks) / device.num_sms,
      c.median(), 1e-6 * bytes / c.median(), mark);
}

// `at(k)` gives the parameters of the k-th of `copies` sets of buffers.
template <typename At>
void race(const char* what, bool is_backward, const DotConfig& chosen, const DeviceTraits& device,
          double bytes, int copies, At at) {
  std::vector<Contender> contenders = contenders_of(at(0), is_backward, chosen, device);
  const int launches = std::max(2, copies);
  cudaEvent_t start, end;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&end));
  for (int round = 0; round < kRounds; ++round) {
    for (Contender& c : contenders) {
      CHECK(run(at(0), c.config));
      CHECK(cudaEventRecord(start));
      for (int k = 1; k <= launches; ++k) CHECK(run(at(k % copies), c.config));
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, start, end));
      c.microseconds.push_back(ms * 1e3f / launches);
    }
  }
  for (Contender& c : contenders) {
    std::sort(c.microseconds.begin(), c.microseconds.end());
    print(what, at(0), bytes, c, device, c.is_chosen ? " *" : "");
  }
  const auto best =
      std::min_element(contenders.begin(), contenders.end(),
                       [](const auto& a, const auto& b) { return a.median() < b.median(); });
  print(what, at(0), bytes, *best, device, " best");
}

void sweep(int64_t batch, int vectors, int columns, T* in, T* out, const DeviceTraits& device) {
  const int width = round_up(dot_row_elements(vectors, columns), 8);
  const int64_t of_vectors = batch * vectors * columns, of_rows = batch * width;
  auto describe = [&](T* data, DotVectors* p) {
    p->dtype = DType::kBFloat16;
    p->batch = batch;
    p->vectors = vectors;
    p->columns = columns;
    p->width = width;
    p->dense = data;
    p->dense_stride = columns;
    p->embeddings = data + batch * columns;
    p->sample_stride = (vectors - 1) * columns;
    p->vector_stride = columns;
  };
  const int64_t elements = of_vectors + of_rows;  // of either pool, whichever way
  const int copies = static_cast<int>(
      std::clamp<int64_t>(ceil_div(kColdBytes, 2 * elements), 1, kPoolBytes / (2 * elements)));
  auto forward = [&](int k) {
    DotParams p;
    describe(in + k * elements, &p);
    p.output = out + k * elements;
    return p;
  };
  auto backward = [&](int k) {
    DotBwdParams p;
    describe(in + k * elements, &p);
    p.grad = in + k * elements + of_vectors;
    p.grad_stride = width;
    p.dense_grad = out + k * elements;
    p.embeddings_grad = out + k * elements + batch * columns;
    return p;
  };
  race("forward", false, choose_dot_interaction_config(forward(0), device), device,
       2.0 * (of_vectors + of_rows), copies, forward);
  race("backward", true, choose_dot_interaction_bwd_config(backward(0), device), device,
       2.0 * (2 * of_vectors + of_rows), copies, backward);
}

int main() {
  DeviceTraits device;
  CHECK(dlrm_device_traits(&device));
  T* const in = random_values(kPoolBytes / sizeof(T), 0);
  T* out;
  CHECK(cudaMalloc(&out, kPoolBytes));
  sweep(65536, 27, 128, in, out, device);
  sweep(65536, 27, 64, in, out, device);
  sweep(65536, 27, 16, in, out, device);
  sweep(16384, 64, 64, in, out, device);
  sweep(2048, 27, 128, in, out, device);
}
