// Times linear_act_product.cu without an activation beside cuBLASLt, with many tiles; and what a
// LoRA branch costs inside them, and its t = x @ A.T before.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I csrc/kernels -lcublasLt \
//     -o build/products_tuning bench/tuning/linear_products.cu && build/products_tuning
//
// bf16, 16 ranks. A line a shape and contender: the median of interleaved rounds in microseconds,
// the TFLOP/s of the layer without the branch, and the largest difference from cuBLASLt's result.
// Twice: one call behind the other, at the card's power limit, and after pauses ("cool").
#include "linear_act_product.cu"
#include "products.cuh"

using namespace fusedcuda;

namespace {

constexpr int kRank = 16;

// b_k_inner: the weight lies [n, k] (forward), else [k, n] (the gradient of x).
void layer(const Lt& lt, int64_t m, int64_t n, int64_t k, bool b_k_inner,
           const DeviceTraits& device) {
  T* x = random_values(m * k, 1);
  T* weight = random_values(n * k, 2, 1.7f / std::sqrt(static_cast<float>(k)));
  T* a = random_values(kRank * k, 3, 1.7f / std::sqrt(static_cast<float>(k)));
  T* b = random_values(n * 64, 4);
  T* t = random_values(m * 64, 5);
  T* expected = random_values(m * n, 6);
  T* y = random_values(m * n, 7);
  const LtProduct plain(lt, n, m, k, b_k_inner, weight, false, x, expected);
  const LtProduct down(lt, kRank, m, k, true, a, false, x, t);
  LinearActParams p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.a = {x, k, true};
  p.b = {weight, b_k_inner ? k : n, b_k_inner};
  p.output = {y, n};
  const GemmConfig config = choose_linear_act_config(p, device);
  auto with_branch = [&](int columns) {
    LinearActParams result = p;
    result.extra_k = columns;
    result.extra_a = {t, columns, true};
    result.extra_b = {b, b_k_inner ? columns : n, b_k_inner};
    return result;
  };
  const LinearActParams branch = with_branch(kRank), wide = with_branch(64);
  std::vector<Contender> contenders;
  const size_t best = plain.best(), best_down = down.best();
  auto no_error = [] { return 0.0f; };
  auto add = [&](const char* name, std::function<void()> call) {
    contenders.push_back({name, std::move(call), no_error, {}});
  };
  add("cublasLt", [&] { plain.run(0); });
  add("cublasLt best", [&, best] { plain.run(best); });
  add("ours", [&] { CHECK(launch_linear_act(p, config, nullptr)); });
  contenders.back().error = [&] { return difference(y, expected, m * n); };
  add("ours, branch of 16", [&] { CHECK(launch_linear_act(branch, config, nullptr)); });
  add("ours, branch of 64", [&] { CHECK(launch_linear_act(wide, config, nullptr)); });
  add("t", [&] { down.run(0); });
  add("t best", [&, best_down] { down.run(best_down); });
  add("t, ours, branch of 16", [&] {
    down.run(0);
    CHECK(launch_linear_act(branch, config, nullptr));
  });
  add("t, cublasLt", [&] {
    down.run(0);
    plain.run(0);
  });
  auto tile = [&](auto gemm, const char* name, std::initializer_list<int> groups) {
    using Gemm = decltype(gemm);
    for (const int group : groups) {
      GemmConfig other;
      other.tile_rows = Gemm::kTileRows;
      other.tile_columns = Gemm::kTileColumns;
      other.cluster = Gemm::kClusterBlocks;
      other.group = group;
      gemm::set_blocks(p.m, p.n, device, &other);
      contenders.push_back({std::string(name) + " group " + std::to_string(group),
                            [=] { CHECK((linear_act::run<Gemm, false>(p, other, nullptr))); },
                            [=] { return difference(y, expected, m * n); },
                            {}});
    }
  };
  constexpr auto kNone = GemmScale::kNone;
  auto tiles = [&](auto b_inner) {
    constexpr bool kInner = decltype(b_inner)::value;
    tile(HopperGemm<T, 128, 128, true, 2, 5, true, kInner, kNone, 4>(), "turns 128x128 2 buffers 4",
         {4, 8});
    tile(HopperGemm<T, 128, 192, true, 2, 4, true, kInner>(), "turns 128x192 2", {4, 8});
    tile(HopperGemm<T, 64, 256, false, 2, 4, true, kInner>(), "together 128x256 2", {2, 4, 8, 16});
    tile(HopperGemm<T, 64, 256, false, 1, 4, true, kInner>(), "together 128x256 1", {8, 16});
    tile(HopperGemm<T, 128, 128, false, 2, 4, true, kInner>(), "together 256x128 2", {2, 4, 8});
    tile(HopperGemm<T, 128, 128, false, 1, 4, true, kInner>(), "together 256x128 1", {4, 8});
  };
  b_k_inner ? tiles(std::true_type()) : tiles(std::false_type());
  char shape[100];
  std::snprintf(shape, sizeof(shape), "%s %lldx%lldx%lld", b_k_inner ? "forward" : "dx",
                static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k));
  race(shape, 2.0 * m * n * k, contenders);
  for (Contender& c : contenders) c.times.clear();
  race((std::string("cool ") + shape).c_str(), 2.0 * m * n * k, contenders,
       std::chrono::milliseconds(20));
  for (T* data : {x, weight, a, b, t, expected, y}) CHECK(cudaFree(data));
}

}  // namespace

int main() {
  DeviceTraits device;
  CHECK(linear_act_device_traits(&device));
  std::printf("%d SMs, wgmma %d, cublasLt %zu\n", device.num_sms, device.wgmma,
              cublasLtGetVersion());
  const Lt lt;
  layer(lt, 8192, 4096, 4096, true, device);
  layer(lt, 8192, 14336, 4096, true, device);
  layer(lt, 8192, 4096, 14336, true, device);
  layer(lt, 2048, 4096, 4096, true, device);
  layer(lt, 8192, 4096, 4096, false, device);
}
