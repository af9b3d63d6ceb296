// The body of a kernel that computes a matrix product on Hopper (hopper_gemm.cuh).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cluster.cuh"
#include "convert.cuh"
#include "hopper_gemm.cuh"

namespace fusedcuda {

// The body of a kernel: sets up the stages and gives every warpgroup its part. A computing
// warpgroup makes an Epilogue(params, warpgroup, shared), and for every tile, with the place in the
// result of what the warpgroup has of it, calls
//   epilogue.prepare(column);                    // before the products
//   epilogue.finish(&sums, row, column, split);  // behind them; may change them
// Epilogue::kSumsRows: whether it wants the sums of a's rows; with the first column of tiles it
// gets
//   epilogue.store_row_sums(sums, row, split);
// Side: see NoGemmSide.
template <typename Gemm, typename Epilogue, typename Side = NoGemmSide>
__device__ __forceinline__ void run_gemm(const typename Gemm::Factors& factors,
                                         const GemmTiles& tiling,
                                         const typename Epilogue::Params& params,
                                         const typename Side::Params& side_params = {}) {
  const GemmShared<Gemm> shared;
  typename Gemm::Stages* const stages = shared.stages();
  // -1: the producer. (By a shuffle, so that the compiler knows it to be the same for the warp.)
  const int warpgroup = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup, 0) - 1;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&factors.a);
    prefetch_tensor_map(&factors.b);
    stages->init();
    Mbarrier::fence_init();
  }
  if (Epilogue::kSumsRows && warpgroup < 0) {
    auto* const ones = reinterpret_cast<uint32_t*>(shared.ones());
    for (int i = static_cast<int>(threadIdx.x); i < kOnesColumns * kSwizzleBytes / 4;
         i += kWarpgroup)
      ones[i] = pack_pair<typename Gemm::Element>(1.0f, 1.0f);
    fence_shared_for_copies();  // the tensor cores read as the copy engine does
  }
  cluster_arrive();
  cluster_wait();
  wait_for_previous_kernel();
  if (warpgroup < 0) {
    give_registers<Side::kProducerRegisters>();
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    const Side side(side_params);
    if (warp == 0) Gemm::load(factors, shared, tiling, side);
    if constexpr (Gemm::kIsScaled) {
      static_assert(!Side::kRuns);
      if (warp == 1) Gemm::load_scaled_a(factors, shared, tiling);
    }
    if (Side::kRuns && warp > 0) side.run(warp - 1, kWarpgroup / kWarpSize - 1);
    __syncwarp();  // the barrier below is one of whole warps
  } else {
    take_registers<Side::kConsumerRegisters>();
    typename Gemm::Position at;
    Epilogue epilogue(params, warpgroup, shared);
    const unsigned rank = Gemm::kClusterBlocks == 1 ? 0 : cluster_rank();
    int turn = 0, own_tiles = 0;
    for (int index = Gemm::first_tile(); index < tiling.count; index += Gemm::tile_step()) {
      const GemmTile tile = tiling.at(index);
      const int first_block = tiling.first_block(tile.split);
      const int end = tiling.end_block(tile.split);
      if (Gemm::kTakesTurns && turn++ % 2 != warpgroup) {
        at.main.advance(end - first_block);
        continue;
      }
      const int first = Gemm::kTakesTurns ? 0 : warpgroup * Gemm::kWarpgroupRows;
      const int row = Gemm::first_row(tile, rank) + first;
      const int column = tile.column * Gemm::kResultColumns;
      typename Gemm::Sums sums;
      epilogue.prepare(column);
      const int own_tile = own_tiles++;
      if (Epilogue::kSumsRows && column == 0) {
        Gemm::template multiply<true>(shared, own_tile, first_block, end, warpgroup, &at, &sums);
        epilogue.store_row_sums(sums, row, tile.split);
      } else {
        Gemm::template multiply<false>(shared, own_tile, first_block, end, warpgroup, &at, &sums);
      }
      epilogue.finish(&sums, row, column, tile.split);
    }
    if (threadIdx.x % kWarpgroup == 0) wait_for_stores();
  }
  // No block may end while the other one still sends to it or reads from it.
  cluster_arrive();
  cluster_wait();
}

}  // namespace fusedcuda
