// The product of a gated MLP with tiles that gated_mlp.cu does not choose today, but that
// bench/tuning/gated_mlp_configs.cu measures.
#include "entry.h"
#include "entry_gated_mlp.h"
#include "kernels/gated_mlp.cu"

namespace {

using namespace fusedcuda;

// T, rows of a warpgroup, columns of gate and of up together, in turns, cluster, stages, buffers.
template <int kRows, int kColumns, bool kInTurns, int kCluster, int kStages, int kBuffers>
using Tile = HopperGemm<__nv_bfloat16, kRows, kColumns, kInTurns, kCluster, kStages, true, true,
                        GemmScale::kNone, kBuffers, 0, true>;

template <typename Gemm>
cudaError_t run(const GatedProductParams& params, const DeviceTraits& device) {
  GemmConfig config;
  config.tile_rows = Gemm::kTileRows;
  config.tile_columns = Gemm::kResultColumns;
  config.cluster = Gemm::kClusterBlocks;
  gemm::set_blocks(params.m, params.f, device, &config);
  return gated_mlp::run<Gemm>(params, config, nullptr);
}

using Run = cudaError_t (*)(const GatedProductParams&, const DeviceTraits&);
constexpr Run kTiles[] = {
    run<Tile<128, 128, true, 1, 5, 4>>,  run<Tile<128, 128, true, 4, 6, 2>>,
    run<Tile<128, 192, true, 2, 4, 2>>,  run<Tile<64, 256, true, 2, 4, 4>>,
    run<Tile<64, 256, false, 2, 3, 4>>,  run<Tile<64, 256, false, 2, 4, 2>>,
    run<Tile<128, 128, false, 2, 4, 2>>,
};

}  // namespace

EXPORT int emulate(Call* call, char* error, size_t error_size) {
  return emulation::report_errors(error, error_size, [&] {
    emulation::check_launch(kTiles[call->tile](call->params(), call->device()));
  });
}
