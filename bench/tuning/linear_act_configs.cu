// Times the Hopper kernels of linear_act with many tiles beside cuBLASLt, to choose the tiles.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I csrc/kernels -lcublasLt \
//     -o build/linear_act_tuning bench/tuning/linear_act_configs.cu && build/linear_act_tuning
//
// bf16. A line a shape and kernel: the median of interleaved rounds in microseconds, TFLOP/s, and
// the largest difference from cuBLASLt's result; cuBLASLt's own lines are its first choice and the
// best of the eight that it proposes.
#include "linear_act.cu"
#include "linear_act_product.cu"
#include "linear_act_product_bwd.cu"
#include "products.cuh"

using namespace fusedcuda;

namespace {

// --- Forward

template <typename Gemm>
void add(const char* name, const LinearActParams& p, const DeviceTraits& device, int group,
         const T* expected, std::vector<Contender>* contenders) {
  GemmConfig config;
  config.tile_rows = Gemm::kTileRows;
  config.tile_columns = Gemm::kTileColumns;
  config.cluster = Gemm::kClusterBlocks;
  config.group = group;
  gemm::set_blocks(p.m, p.n, device, &config);
  contenders->push_back(
      {std::string(name) + " group " + std::to_string(group),
       [=] { CHECK(linear_act::run<Gemm>(p, config, nullptr)); },
       [=] { return difference(static_cast<T*>(p.output.data), expected, p.m * p.n); },
       {}});
}

// saves: what the gradient needs is stored as well (cuBLASLt's line is without that).
void forward(const Lt& lt, int64_t m, int64_t n, int64_t k, Activation activation, bool saves,
             const DeviceTraits& device) {
  T* x = random_values(m * k, 1);
  T* weight = random_values(n * k, 2, 1.7f / std::sqrt(static_cast<float>(k)));
  T* bias = random_values(n, 3);
  T* expected = random_values(m * n, 4);
  T* y = random_values(m * n, 5);
  const LtProduct reference(
      lt, n, m, k, true, weight, false, x, expected,
      activation == Activation::kRelu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS,
      bias);
  LinearActParams p;
  p.activation = activation;
  p.m = m;
  p.n = n;
  p.k = k;
  p.a = {x, k, true};
  p.b = {weight, k, true};
  p.bias = bias;
  p.output = {y, n};
  T* saved = random_values(m * n, 6);
  if (saves) {
    p.saved = saved;
    p.saves =
        activation == Activation::kRelu ? SavedForBackward::kMask : SavedForBackward::kDerivative;
  }
  std::vector<Contender> contenders;
  const size_t best = reference.best();
  auto no_error = [] { return 0.0f; };
  contenders.push_back({"cublasLt", [&] { reference.run(0); }, no_error, {}});
  contenders.push_back({"cublasLt best", [&, best] { reference.run(best); }, no_error, {}});
  auto named = [&](auto gemm, const char* name, int group = 8) {
    add<decltype(gemm)>(name, p, device, group, expected, &contenders);
  };
  constexpr auto kNone = GemmScale::kNone;
  named(HopperGemm<T, 128, 128, true, 2, 6, true, true>(), "turns 128x128 2");
  for (int group : {2, 4, 8, 16, 32}) {
    named(HopperGemm<T, 128, 128, true, 2, 5, true, true, kNone, 4>(), "turns 128x128 2 buffers 4",
          group);
  }
  named(HopperGemm<T, 128, 128, true, 1, 5, true, true, kNone, 4>(), "turns 128x128 1 buffers 4");
  for (int group : {8, 16})
    named(HopperGemm<T, 128, 192, true, 2, 4, true, true>(), "turns 128x192 2", group);
  named(HopperGemm<T, 64, 256, true, 2, 4, true, true, kNone, 4>(), "turns 64x256 2 buffers 4");
  named(HopperGemm<T, 64, 256, false, 1, 4, true, true>(), "together 128x256 1");
  named(HopperGemm<T, 64, 256, false, 2, 4, true, true>(), "together 128x256 2");
  named(HopperGemm<T, 64, 256, false, 2, 3, true, true, kNone, 4>(),
        "together 128x256 2 buffers 4");
  named(HopperGemm<T, 128, 128, false, 2, 4, true, true>(), "together 256x128 2");
  char shape[100];
  std::snprintf(shape, sizeof(shape), "forward%s %lldx%lldx%lld", saves ? " saves" : "",
                static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k));
  race(shape, 2.0 * m * n * k, contenders);
  for (T* data : {x, weight, bias, expected, y, saved}) CHECK(cudaFree(data));
}

// --- Gradient of a ReLU, against the two products alone (of dy itself)

void backward(const Lt& lt, int64_t m, int64_t n, int64_t k, const DeviceTraits& device) {
  T* dy = random_values(m * n, 1);
  T* x = random_values(m * k, 2);
  T* weight = random_values(n * k, 3);
  T* saved = random_values(m * n, 4);
  T* dx = random_values(m * k, 5);
  T* dweight = random_values(n * k, 6);
  T* dbias = random_values(n, 7);
  T* expected_dx = random_values(m * k, 8);
  T* expected_dweight = random_values(n * k, 9);
  T* dz = random_values(m * n, 10);
  const LtProduct first(lt, k, m, n, false, weight, false, dz, expected_dx);
  const LtProduct second(lt, k, n, m, false, x, true, dz, expected_dweight);
  ActRowsParams rows;
  rows.backward = rows.dependent = true;
  rows.m = m;
  rows.n = n;
  rows.input = {dy, n};
  rows.output = {dz, n};
  rows.saves = SavedForBackward::kMask;
  rows.saved = saved;
  LinearActBwdParams p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.dy = {dy, n};
  p.mask = saved;
  p.x = {x, k};
  p.weight = {weight, k};
  p.dx = {dx, k};
  p.dweight = dweight;
  p.dbias = dbias;
  void* workspace;
  constexpr size_t kWorkspace = 512 << 20;
  CHECK(cudaMalloc(&workspace, kWorkspace));
  ColumnSumsParams sums;
  sums.rows = rows;
  sums.sums = dbias;
  const ColumnSumsConfig sums_config = choose_column_sums_config(sums, device);
  auto no_error = [] { return 0.0f; };
  std::vector<Contender> contenders;
  contenders.push_back({"cublasLt dz with dbias, dx, dweight",
                        [&] {
                          CHECK(launch_column_sums(sums, sums_config, workspace, nullptr));
                          first.run(0);
                          second.run(0);
                        },
                        no_error,
                        {}});
  contenders.push_back({"dz with dbias",
                        [&] { CHECK(launch_column_sums(sums, sums_config, workspace, nullptr)); },
                        no_error,
                        {}});
  contenders.push_back({"dz", [&] { CHECK(launch_act_rows(rows, nullptr)); }, no_error, {}});
  contenders.push_back({"cublasLt dz, dx, dweight",
                        [&] {
                          CHECK(launch_act_rows(rows, nullptr));
                          first.run(0);
                          second.run(0);
                        },
                        no_error,
                        {}});
  contenders.push_back(
      {"cublasLt dx, dweight", [&] { first.run(0), second.run(0); }, no_error, {}});
  contenders.push_back({"cublasLt dx", [&] { first.run(0); }, no_error, {}});
  contenders.push_back({"cublasLt dweight", [&] { second.run(0); }, no_error, {}});
  const LinearActBwdConfig chosen = choose_linear_act_bwd_config(p, device);
  CHECK(chosen.workspace_bytes <= kWorkspace ? cudaSuccess : cudaErrorMemoryAllocation);
  contenders.push_back({"dx, dweight, dbias as chosen",
                        [&] { CHECK(launch_linear_act_bwd(p, chosen, workspace, nullptr)); },
                        [&] {
                          return std::max(difference(dx, expected_dx, m * k),
                                          difference(dweight, expected_dweight, n * k));
                        },
                        {}});
  auto add_tile = [&](auto dx_gemm, auto dweight_gemm, const std::string& tile) {
    using Dx = decltype(dx_gemm);
    using Dweight = decltype(dweight_gemm);
    GemmConfig config;
    config.tile_rows = Dx::kTileRows;
    config.tile_columns = Dx::kTileColumns;
    gemm::set_blocks(m, k, device, &config);
    contenders.push_back({"dx " + tile,
                          [&p, config] { CHECK(linear_act::run_dx<Dx>(p, config, nullptr)); },
                          [&] { return difference(dx, expected_dx, m * k); },
                          {}});
    const int64_t tiles = ceil_div(n, Dx::kTileRows * 2) * ceil_div(k, Dx::kTileColumns);
    std::vector<int> tried;
    for (int rounds : {0, 1, 2, 3}) {
      const int splits = static_cast<int>(rounds == 0 ? 1 : (66 * rounds + tiles / 4) / tiles);
      if (splits < 1 || splits * int64_t{512} > m ||
          splits * (n * k + n) * sizeof(float) > kWorkspace ||
          std::find(tried.begin(), tried.end(), splits) != tried.end())
        continue;
      tried.push_back(splits);
      config.splits = splits;
      gemm::set_blocks(n, k, device, &config);
      contenders.push_back({"dweight " + tile + " splits " + std::to_string(splits),
                            [&p, config, workspace] {
                              CHECK(
                                  linear_act::run_dweight<Dweight>(p, config, workspace, nullptr));
                            },
                            [&] { return difference(dweight, expected_dweight, n * k); },
                            {}});
    }
  };
  add_tile(linear_act::BwdGemm<T, 256, true>(), linear_act::BwdGemm<T, 256, false>(), "128x256");
  add_tile(linear_act::BwdGemm<T, 192, true>(), linear_act::BwdGemm<T, 192, false>(), "128x192");
  add_tile(linear_act::BwdGemm<T, 64, true>(), linear_act::BwdGemm<T, 64, false>(), "128x64");
  char shape[100];
  std::snprintf(shape, sizeof(shape), "backward %lldx%lldx%lld", static_cast<long long>(m),
                static_cast<long long>(n), static_cast<long long>(k));
  race(shape, 4.0 * m * n * k, contenders);
  for (T* data : {dy, x, weight, saved, dx, dweight, dbias, expected_dx, expected_dweight, dz})
    CHECK(cudaFree(data));
  CHECK(cudaFree(workspace));
}

}  // namespace

int main() {
  DeviceTraits device;
  CHECK(linear_act_device_traits(&device));
  std::printf("%d SMs, wgmma %d, cublasLt %zu\n", device.num_sms, device.wgmma,
              cublasLtGetVersion());
  const Lt lt;
  for (bool saves : {false, true}) {
    forward(lt, 65536, 512, 16, Activation::kRelu, saves, device);
    forward(lt, 65536, 1024, 480, Activation::kRelu, saves, device);
    forward(lt, 65536, 1024, 480, Activation::kGeluTanh, saves, device);
    forward(lt, 8192, 3072, 768, Activation::kGeluTanh, saves, device);
    forward(lt, 8192, 4096, 1024, Activation::kGeluTanh, saves, device);
    forward(lt, 8192, 4096, 4096, Activation::kGeluTanh, saves, device);
  }
  forward(lt, 8192, 14336, 4096, Activation::kGeluTanh, false, device);
  backward(lt, 65536, 1024, 480, device);
  backward(lt, 65536, 512, 16, device);
  backward(lt, 8192, 3072, 768, device);
  backward(lt, 8192, 4096, 1024, device);
}
