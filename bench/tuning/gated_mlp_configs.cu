// Times gated_mlp.cu's product with many tiles beside what it takes the place of, to choose the
// tile: cuBLASLt's products of gate and up and an elementwise kernel.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I csrc/kernels -lcublasLt \
//     -o build/gated_mlp_tuning bench/tuning/gated_mlp_configs.cu csrc/kernels/pointwise.cu &&
//     build/gated_mlp_tuning
//
// bf16, SiLU. A line a shape (M x F x K) and contender: the median of interleaved rounds in
// microseconds, TFLOP/s of the products, and the largest difference from the first contender's h
// (which is computed from rounded products). Of cuBLASLt: its first choice, and the best of the
// eight that it proposes.
#include "gated_mlp.cu"
#include "pointwise.h"
#include "pointwise_config.h"
#include "products.cuh"

using namespace fusedcuda;

namespace {

// h = act(gate) * up; the rows of gate and up are `pitch` elements apart.
class ActMul {
 public:
  ActMul(int64_t m, int64_t f, T* gate, T* up, int64_t pitch, T* h) {
    params_.op = PointwiseOp::kActMul;
    params_.activation = Activation::kSilu;
    params_.dtype = DType::kBFloat16;
    RawIteration& space = params_.space;
    space.num_dims = 2;
    space.num_tensors = 3;
    space.sizes[0] = m;
    space.sizes[1] = f;
    T* const tensors[] = {gate, up, h};
    for (int t = 0; t < 3; ++t) {
      params_.tensors[t].data = tensors[t];
      space.strides[t][0] = t < 2 ? pitch : f;
      space.strides[t][1] = 1;
    }
    DeviceTraits device;
    CHECK(pointwise_device_traits(&device));
    CHECK(choose_pointwise_config(params_, device, &plan_) ? cudaSuccess : cudaErrorInvalidValue);
  }

  void run() const { CHECK(launch_pointwise(params_, plan_, nullptr)); }

 private:
  PointwiseParams params_;
  PointwisePlan plan_;
};

// One shape: operands, and the contenders that are left to add.
struct Race {
  GatedProductParams params;
  DeviceTraits device;
  const T* expected;
  std::vector<Contender> contenders;

  float error() const {
    return difference(static_cast<T*>(params.h.data), expected, params.m * params.f);
  }

  // A tile, and how many rows of clusters of tiles are computed together.
  template <typename Gemm>
  void add(const std::string& name, int group = 8) {
    GemmConfig config;
    config.tile_rows = Gemm::kTileRows;
    config.tile_columns = Gemm::kResultColumns;
    config.cluster = Gemm::kClusterBlocks;
    config.group = group;
    gemm::set_blocks(params.m, params.f, device, &config);
    contenders.push_back({name + " group " + std::to_string(group),
                          [this, config] { CHECK(gated_mlp::run<Gemm>(params, config, nullptr)); },
                          [this] { return error(); },
                          {}});
  }
};

template <int kRows, int kColumns, bool kInTurns, int kCluster, int kStages, int kBuffers = 2>
using Tile = HopperGemm<T, kRows, kColumns, kInTurns, kCluster, kStages, true, true,
                        GemmScale::kNone, kBuffers, 0, true>;

// saves: gate and up are stored side by side as well.
void time_shape(const Lt& lt, int64_t m, int64_t f, int64_t k, bool saves,
                const DeviceTraits& device) {
  T* x = random_values(m * k, 1);
  T* w = random_values(2 * f * k, 2, 1.7f / std::sqrt(static_cast<float>(k)));
  T* gate_up = random_values(m * 2 * f, 3);
  T* expected = random_values(m * f, 4);
  T* h = random_values(m * f, 5);
  const int64_t pitch = saves ? 2 * f : f;
  T* up = gate_up + (saves ? f : m * f);
  constexpr auto kPlain = CUBLASLT_EPILOGUE_DEFAULT;
  const LtProduct to_gate(lt, f, m, k, true, w, false, x, gate_up, kPlain, nullptr, pitch);
  const LtProduct to_up(lt, f, m, k, true, w + f * k, false, x, up, kPlain, nullptr, pitch);
  const LtProduct to_both(lt, 2 * f, m, k, true, w, false, x, gate_up);
  const size_t best = to_gate.best(), best_of_both = to_both.best();
  const ActMul act_mul(m, f, gate_up, up, pitch, expected);
  const ActMul act_mul_packed(m, f, gate_up, gate_up + f, 2 * f, h);

  Race shape;
  shape.device = device;
  shape.expected = expected;
  shape.params.m = m;
  shape.params.f = f;
  shape.params.k = k;
  shape.params.x = {x, k};
  shape.params.w_gate = {w, k};
  shape.params.w_up = {w + f * k, k};
  shape.params.h = {h, f};
  if (saves) shape.params.gate_up = gate_up;

  auto peer = [&](const char* name, std::function<void()> call, std::function<float()> error) {
    shape.contenders.push_back({name, std::move(call), std::move(error), {}});
  };
  auto apart = [&](size_t choice) { to_gate.run(choice), to_up.run(choice), act_mul.run(); };
  auto concatenated = [&](size_t choice) { to_both.run(choice), act_mul_packed.run(); };
  auto none = [] { return 0.0f; };
  auto of_h = [&] { return shape.error(); };
  peer("cublasLt two, act_mul", [&] { apart(0); }, none);
  peer("cublasLt two best, act_mul", [&] { apart(best); }, none);
  peer("cublasLt two best alone", [&] { to_gate.run(best), to_up.run(best); }, none);
  peer("cublasLt one, act_mul", [&] { concatenated(0); }, of_h);
  peer("cublasLt one best, act_mul", [&] { concatenated(best_of_both); }, of_h);
  peer("cublasLt one best alone", [&] { to_both.run(best_of_both); }, none);

  for (const int group : {2, 4, 8, 16, 32})
    shape.add<Tile<128, 128, true, 2, 5, 4>>("turns 128x64 2 buffers 4", group);
  shape.add<Tile<128, 128, true, 2, 6>>("turns 128x64 2");
  shape.add<Tile<128, 128, true, 1, 5, 4>>("turns 128x64 1 buffers 4", 16);
  for (const int group : {4, 8, 16}) shape.add<Tile<128, 192, true, 2, 4>>("turns 128x96 2", group);
  shape.add<Tile<64, 256, true, 2, 4, 4>>("turns 64x128 2 buffers 4", 16);
  for (const int group : {4, 8, 16})
    shape.add<Tile<64, 256, false, 2, 4>>("together 128x128 2", group);
  shape.add<Tile<64, 256, false, 2, 3, 4>>("together 128x128 2 buffers 4");
  shape.add<Tile<128, 128, false, 2, 4>>("together 256x64 2");

  char name[100];
  std::snprintf(name, sizeof(name), "%lldx%lldx%lld%s", static_cast<long long>(m),
                static_cast<long long>(f), static_cast<long long>(k), saves ? " saves" : "");
  race(name, 4.0 * m * f * k, shape.contenders);
  for (Contender& c : shape.contenders) c.times.clear();
  race((std::string("cool ") + name).c_str(), 4.0 * m * f * k, shape.contenders,
       std::chrono::milliseconds(20));
  for (T* data : {x, w, gate_up, expected, h}) CHECK(cudaFree(data));
}

}  // namespace

int main() {
  DeviceTraits device;
  CHECK(gated_mlp_device_traits(&device));
  std::printf("%d SMs, wgmma %d, cublasLt %zu\n", device.num_sms, device.wgmma,
              cublasLtGetVersion());
  const Lt lt;
  for (const bool saves : {false, true}) {
    time_shape(lt, 8192, 14336, 4096, saves, device);
    time_shape(lt, 2048, 8192, 2048, saves, device);
  }
  time_shape(lt, 512, 14336, 4096, false, device);
  time_shape(lt, 128, 14336, 4096, false, device);
}
