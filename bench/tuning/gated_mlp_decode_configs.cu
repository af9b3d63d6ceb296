// Times gated_mlp_decode.cuh in configurations that its chooser does not take, and its parts alone.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I csrc/kernels \
//     -o build/decode_tuning bench/tuning/gated_mlp_decode_configs.cu && build/decode_tuning
//
// bf16, silu. A line a contender: the median of interleaved rounds of CUDA graphs, in microseconds
// a call, TB/s of the weights that it reads, and the largest error of y as a part of the largest y.
// The calls go through as many copies of the weights as do not fit into the L2.
//
//   chosen                as the package launches it
//   N KB under way        copies that are started and not there yet, of each block; all: the ring
//   copies of 2048 bytes  instead of 1 KB
//   counted each round    by the blocks that have made their part of h, not once or twice
//   stages N              a ring of so many
//   passes N              over the rows of w_down
//   copies alone          the weights go through the ring, and nobody multiplies them
//   h alone, y alone      of the sums, with next to nothing of the others
//   dependent             it may start before the last one ends, if a cooperative launch may
//   blocks N              instead of one on each SM
//
// Under it, of one launch, when a consumer of each block was how far: the median of the blocks in
// microseconds from the first one's start, and the last block.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "check.cuh"
#include "gated_mlp_decode_marks.cuh"
#include "random_values.cuh"

using namespace fusedcuda;

namespace {

constexpr int kRounds = 7, kCallsOfGraph = 12;
constexpr int64_t kBytesBeyondL2 = 256 << 20;

// --------------------------------------------------------------------------------------------------
// Kernels
// --------------------------------------------------------------------------------------------------

__device__ float dot(const T* a, const T* b, int n) {
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += kWarpSize)
    sum += __bfloat162float(a[i]) * __bfloat162float(b[i]);
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

// A warp for each element of h, and then of y.
__global__ void simple_h(GatedMlpDecodeParams p) {
  const int row = blockIdx.y, column = blockIdx.x;
  const T* const x = static_cast<const T*>(p.x.data) + row * p.x.stride;
  const float gate = dot(x, static_cast<const T*>(p.w_gate.data) + column * p.w_gate.stride, p.k);
  const float up = dot(x, static_cast<const T*>(p.w_up.data) + column * p.w_up.stride, p.k);
  static_cast<T*>(p.h)[row * p.f + column] = __float2bfloat16_rn(gate / (1 + expf(-gate)) * up);
}
__global__ void simple_y(GatedMlpDecodeParams p) {
  const int row = blockIdx.y, column = blockIdx.x;
  const T* const h = static_cast<const T*>(p.h) + row * int64_t{p.f};
  const T* const weights = static_cast<const T*>(p.w_down.data) + column * p.w_down.stride;
  static_cast<T*>(p.y)[row * p.n + column] = __float2bfloat16_rn(dot(h, weights, p.f));
}

// --------------------------------------------------------------------------------------------------
// Contenders
// --------------------------------------------------------------------------------------------------

struct Contender {
  std::string name;
  double bytes;
  bool has_all;                                       // of y
  std::function<cudaError_t(int, cudaStream_t)> run;  // on a copy of the weights
  cudaGraphExec_t graph = nullptr;
  std::vector<double> times = {};
};

class Race {
 public:
  Race(int m, int k, int f, const DeviceTraits& device) : device_(device) {
    p_.m = m;
    p_.k = k;
    p_.f = f;
    p_.n = k;
    const int64_t weights = int64_t{3} * f * k;
    copies_ = static_cast<int>(std::max<int64_t>(3, ceil_div(kBytesBeyondL2, weights * 2)));
    for (int i = 0; i < copies_; ++i)
      weights_.push_back(random_values(weights, i + 1, 1.7f / std::sqrt(static_cast<float>(k))));
    p_.x = {random_values(int64_t{m} * k, 77, 1.7f), k};
    h_ = random_values(int64_t{m} * f, 78, 1);
    y_ = random_values(int64_t{m} * k, 79, 1);
    expected_ = random_values(int64_t{m} * k, 80, 1);
    CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
  }

  ~Race() {
    for (T* data : weights_) CHECK(cudaFree(data));
    for (void* data :
         {p_.x.data, static_cast<void*>(h_), static_cast<void*>(y_), static_cast<void*>(expected_)})
      CHECK(cudaFree(data));
    CHECK(cudaStreamDestroy(stream_));
  }

  GatedMlpDecodeParams params(int copy) const {
    GatedMlpDecodeParams p = p_;
    T* const all = weights_[copy % copies_];
    const int64_t of_one = int64_t{p.f} * p.k;
    p.w_gate = {all, p.k};
    p.w_up = {all + of_one, p.k};
    p.w_down = {all + 2 * of_one, p.f};
    p.h = h_;
    p.y = y_;
    return p;
  }

  double all_bytes() const { return 6.0 * p_.f * p_.k; }
  GatedMlpDecodeConfig chosen() const { return choose_gated_mlp_decode_config(params(0), device_); }
  GatedMlpDecodeConfig with_stages(int stages) const {
    GatedMlpDecodeConfig config = chosen();
    for (size_t less = 0; config.stages > stages; less += 1 << 10)
      decode::lay_out(kDecodeSteps, device_.shared_bytes_of_block - less, &config);
    return config;
  }
  GatedMlpDecodeConfig with_passes(int passes) const {
    GatedMlpDecodeConfig config = chosen();
    decode::divide_columns(p_.f, passes, kDecodeSteps, &config);
    config.rounds_counted = static_cast<int>(ceil_div(config.rounds, config.passes));
    decode::lay_out(kDecodeSteps, device_.shared_bytes_of_block, &config);
    return config;
  }
  static GatedMlpDecodeConfig with_under_way(GatedMlpDecodeConfig config, int stages) {
    config.under_way = std::min(stages, config.stages);
    return config;
  }

  // `change`: of the parameters; the configuration is of those.
  template <typename Kernel>
  void add(
      const std::string& name, double bytes, bool has_all, Kernel kernel,
      const GatedMlpDecodeConfig& config, bool cooperative = true, bool dependent = false,
      std::function<void(GatedMlpDecodeParams*)> change = [](GatedMlpDecodeParams*) {}) {
    const auto run = [=](int copy, cudaStream_t stream) {
      GatedMlpDecodeParams p = params(copy);
      change(&p);
      LaunchOptions options;
      options.cooperative = cooperative;
      options.dependent = dependent;
      options.shared_bytes = config.shared_bytes;
      return launch(kernel, dim3(config.blocks), dim3(kDecodeThreads), options, stream, p, config,
                    DecodeCounters{});
    };
    contenders_.push_back({name, bytes, has_all, run});
  }

  template <int kSteps>
  void add_copies(int bytes) {
    const GatedMlpDecodeConfig config = decode::choose(params(0), kSteps, device_);
    const std::string of = " of " + std::to_string(bytes) + " bytes";
    add("copies alone" + of, all_bytes(), false, copies_alone<T, kSteps>, config);
    add("copies alone" + of + ", all", all_bytes(), false, copies_alone<T, kSteps>,
        with_under_way(config, config.stages));
    if constexpr (kSteps == kDecodeSteps) return;
    const auto kernel = decode::kernel_for<T, kSteps>(config.column_tiles);
    add("copies" + of, all_bytes(), true, kernel, config);
    add("copies" + of + ", one more", all_bytes(), true, kernel,
        with_under_way(config, config.under_way + 1));
  }

  void add_all() {
    const GatedMlpDecodeConfig config = chosen();
    const auto kernel = decode::kernel_for<T, kDecodeSteps>(config.column_tiles);
    add("chosen", all_bytes(), true, kernel, config);
    for (int stages : {2, 4, 5, 8}) {
      add(std::to_string(stages * 16) + " KB under way", all_bytes(), true, kernel,
          with_under_way(config, stages));
    }
    GatedMlpDecodeConfig counted = config;
    counted.rounds_counted = static_cast<int>(ceil_div(config.rounds, kDecodeCounters - 1));
    add("counted each round", all_bytes(), true, kernel, counted);
    add("all under way", all_bytes(), true, kernel, with_under_way(config, config.stages));
    add_copies<kDecodeSteps>(1024);
    add_copies<4>(2048);
    for (int stages : {6, 8}) {
      add("stages " + std::to_string(stages), all_bytes(), true, kernel, with_stages(stages));
    }
    const int most_columns = kDecodeMostColumns / config.column_tiles;
    for (int passes : {1, config.passes * 2}) {
      if (passes != config.passes && p_.f <= most_columns * passes)
        add("passes " + std::to_string(passes), all_bytes(), true, kernel, with_passes(passes));
    }
    const auto h_alone = [](GatedMlpDecodeParams* p) { p->n = 1; };
    const auto y_alone = [](GatedMlpDecodeParams* p) { p->k = 8; };
    add("h alone", all_bytes() / 3 * 2, false, kernel, config, true, false, h_alone);
    add("y alone", all_bytes() / 3, false, kernel, config, true, false, y_alone);
    add("dependent", all_bytes(), true, kernel, config, true, true);
    DeviceTraits fewer = device_;
    fewer.num_sms = device_.num_sms / 8 * 8;
    add("blocks " + std::to_string(fewer.num_sms), all_bytes(), true, kernel,
        choose_gated_mlp_decode_config(params(0), fewer));
  }

  void run() {
    std::printf("\n%d x %d, m = %d: %d stages, %d passes\n", p_.k, p_.f, p_.m, chosen().stages,
                chosen().passes);
    GatedMlpDecodeParams p = params(0);
    p.y = expected_;
    simple_h<<<dim3(p.f, p.m), kWarpSize, 0, stream_>>>(p);
    simple_y<<<dim3(p.n, p.m), kWarpSize, 0, stream_>>>(p);
    CHECK(cudaStreamSynchronize(stream_));
    std::vector<float> errors;
    for (Contender& contender : contenders_) {
      CHECK(cudaMemsetAsync(h_, 0xff, int64_t{p.m} * p.f * sizeof(T), stream_));
      CHECK(cudaMemsetAsync(y_, 0xff, int64_t{p.m} * p.n * sizeof(T), stream_));
      const cudaError_t status = contender.run(0, stream_);
      errors.push_back(status == cudaSuccess ? error() : NAN);
      if (status == cudaSuccess) {
        capture(&contender);
      } else {
        cudaGetLastError();
        std::printf("  %-34s refused: %s\n", contender.name.c_str(), cudaGetErrorString(status));
      }
    }
    for (int round = 0; round < kRounds; ++round) {
      for (Contender& contender : contenders_) {
        if (contender.graph != nullptr) contender.times.push_back(time(contender));
      }
    }
    for (size_t i = 0; i < contenders_.size(); ++i) {
      Contender& c = contenders_[i];
      if (c.graph == nullptr) continue;
      std::sort(c.times.begin(), c.times.end());
      const double us = c.times[kRounds / 2];
      std::printf("  %-34s %8.2f us (%7.2f to %7.2f) %6.2f TB/s", c.name.c_str(), us,
                  c.times.front(), c.times.back(), c.bytes / us * 1e-6);
      std::printf(c.has_all ? "   error %.4f\n" : "\n", errors[i]);
      CHECK(cudaGraphExecDestroy(c.graph));
    }
    if (chosen().column_tiles == 1) print_marks(marked_kernel<T, 1>);
    if (chosen().column_tiles == 2) print_marks(marked_kernel<T, 2>);
  }

 private:
  float error() const {
    CHECK(cudaStreamSynchronize(stream_));
    const int64_t count = int64_t{p_.m} * p_.n;
    std::vector<T> y(count), expected(count);
    CHECK(cudaMemcpy(y.data(), y_, count * sizeof(T), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(expected.data(), expected_, count * sizeof(T), cudaMemcpyDeviceToHost));
    float largest = 0, error = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float a = __bfloat162float(y[i]), b = __bfloat162float(expected[i]);
      if (std::isnan(a)) return NAN;
      largest = std::max(largest, std::fabs(b));
      error = std::max(error, std::fabs(a - b));
    }
    return error / largest;
  }

  void capture(Contender* contender) const {
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kCallsOfGraph; ++i) CHECK(contender->run(i, stream_));
    CHECK(cudaStreamEndCapture(stream_, &graph));
    CHECK(cudaGraphInstantiate(&contender->graph, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphLaunch(contender->graph, stream_));
  }

  double time(const Contender& contender) const {
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventRecord(start, stream_));
    CHECK(cudaGraphLaunch(contender.graph, stream_));
    CHECK(cudaEventRecord(end, stream_));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, start, end));
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(end));
    return ms * 1e3 / kCallsOfGraph;
  }

  // Of the last of three launches.
  template <typename Kernel>
  void print_marks(Kernel kernel) const {
    const GatedMlpDecodeConfig config = chosen();
    Marks* marks;
    CHECK(cudaMalloc(&marks, config.blocks * sizeof(Marks)));
    LaunchOptions options;
    options.cooperative = true;
    options.shared_bytes = config.shared_bytes;
    for (int i = 0; i < 3; ++i) {
      CHECK(cudaMemsetAsync(marks, 0, config.blocks * sizeof(Marks), stream_));
      CHECK(launch(kernel, dim3(config.blocks), dim3(kDecodeThreads), options, stream_, params(i),
                   config, marks));
    }
    CHECK(cudaStreamSynchronize(stream_));
    std::vector<Marks> found(config.blocks);
    CHECK(cudaMemcpy(found.data(), marks, found.size() * sizeof(Marks), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(marks));
    unsigned long long first = found[0].at[kStart];
    for (const Marks& block : found) first = std::min(first, block.at[kStart]);
    for (int mark = 0; mark < kMarks; ++mark) {
      std::vector<double> times;
      for (const Marks& block : found) {
        if (block.at[mark] != 0) times.push_back((block.at[mark] - first) * 1e-3);
      }
      if (times.empty()) continue;  // a single part is the last one
      std::sort(times.begin(), times.end());
      std::printf("    %-26s %7.1f %7.1f\n", kMarkNames[mark], times[times.size() / 2],
                  times.back());
    }
  }

  DeviceTraits device_;
  GatedMlpDecodeParams p_;
  int copies_;
  std::vector<T*> weights_;
  T *h_, *y_, *expected_;
  cudaStream_t stream_;
  std::vector<Contender> contenders_;
};

}  // namespace

int main() {
  DeviceTraits device;
  CHECK(describe_device(gated_mlp_decode_kernel_sm90<T, 1, kDecodeSteps>, &device));
  std::printf("%d SMs\n", device.num_sms);
  constexpr int kCases[][3] = {{1, 4096, 14336}, {8, 4096, 14336}, {16, 4096, 14336},
                               {1, 2048, 8192},  {16, 2048, 8192}, {1, 1024, 3072}};
  for (const auto& [m, k, f] : kCases) {
    Race race(m, k, f, device);
    race.add_all();
    race.run();
  }
}
