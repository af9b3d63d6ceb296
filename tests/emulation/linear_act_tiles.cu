// The Hopper product with tiles that linear_act_product.cu does not choose today, but that
// bench/tuning/linear_act_configs.cu measures.
#include "entry.h"
#include "kernels/linear_act_product.cu"

namespace {

using namespace fusedcuda;
using T = __nv_bfloat16;

// Call in test_linear_act_tiles_on_cpu.py.
struct Call {
  int tile, num_sms;
  int64_t m, n, k;
  void *a, *b, *bias, *mask, *output;
};

using Tile0 = HopperGemm<T, 128, 128, true, 1, 6, true, true>;
using Tile1 = HopperGemm<T, 128, 128, true, 4, 6, true, true>;
using Tile2 = HopperGemm<T, 64, 256, true, 4, 4, true, true>;
using Tile3 = HopperGemm<T, 64, 192, true, 2, 5, true, true>;
using Tile4 = HopperGemm<T, 64, 256, false, 2, 3, true, true, GemmScale::kNone, 4>;
using Tile5 = HopperGemm<T, 128, 128, false, 2, 4, true, true>;
using Tile6 = HopperGemm<T, 128, 128, true, 4, 6, true, false>;

template <typename Gemm>
cudaError_t run(const LinearActParams& params, int num_sms) {
  DeviceTraits device;
  device.num_sms = num_sms;
  GemmConfig config;
  config.tile_rows = Gemm::kTileRows;
  config.tile_columns = Gemm::kTileColumns;
  config.cluster = Gemm::kClusterBlocks;
  gemm::set_blocks(params.m, params.n, device, &config);
  return linear_act::run<Gemm>(params, config, nullptr);
}

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    constexpr decltype(&run<Tile0>) kTiles[] = {run<Tile0>, run<Tile1>, run<Tile2>, run<Tile3>,
                                                run<Tile4>, run<Tile5>, run<Tile6>};
    const bool k_is_inner = call->tile != 6;
    LinearActParams params;
    params.activation = Activation::kRelu;
    params.m = call->m;
    params.n = call->n;
    params.k = call->k;
    params.a = {call->a, call->k, true};
    params.b = {call->b, k_is_inner ? call->k : call->n, k_is_inner};
    params.bias = call->bias;
    params.output = {call->output, call->n};
    params.saves = SavedForBackward::kMask;
    params.saved = call->mask;
    emulation::check_launch(kTiles[call->tile](params, call->num_sms));
  });
}
