// The warp of gated_mlp_decode.cuh that starts the copies of weights. It waits for nothing but room
// in the ring, so it is ahead of the products by as much as there is. All lanes go through its
// loops together, so that addresses are in uniform registers, where the copy engine takes them
// from: a copy is six instructions, of one lane alone it is twenty.
#pragma once

#include <cuda_runtime.h>

#include "common/bulk_copy.cuh"
#include "common/wgmma.cuh"
#include "gated_mlp_decode_parts.cuh"

namespace fusedcuda {
namespace decode {

template <typename T, int kSteps>
class Producer {
 public:
  __device__ __forceinline__ Producer(const GatedMlpDecodeParams& p, const GatedMlpDecodeConfig& c,
                                      const Share& share, const BlockMemory<kSteps>& shared)
      : p_(p), c_(c), share_(share), shared_(shared), turn_(c.stages) {}

  __device__ __forceinline__ void run() {
    for (int round = 0; round < c_.rounds; ++round) {
      const Rows pairs = share_.pairs(round);
      if (pairs.count == 0) continue;
      fetch_tile({0, p_.k}, 2 * pairs.count, [&](char* stage, Columns columns) {
        fetch_rows(p_.w_gate, pairs, columns, stage);
        fetch_rows(p_.w_up, pairs, columns, stage + kDecodePairs * kPitch);
      });
    }
    for (int pass = 0; pass < c_.passes; ++pass) {
      for (int tile = 0; tile < share_.down_tiles(); ++tile) {
        const Rows rows = share_.down_tile(tile);
        fetch_tile(columns_of(pass, p_, c_), rows.count, [&](char* stage, Columns columns) {
          fetch_rows(p_.w_down, rows, columns, stage);
        });
      }
    }
  }

 private:
  static constexpr int kStageColumns = BlockMemory<kSteps>::kStageColumns;
  static constexpr int kPitch = BlockMemory<kSteps>::kPitch;

  // fetch(stage, columns) for every stage of a tile of `rows` rows.
  template <typename Fetch>
  __device__ __forceinline__ void fetch_tile(Columns all, int rows, Fetch fetch) {
    for (int done = 0; done < all.count; done += kStageColumns) {
      const Columns columns = {all.first + done, min(kStageColumns, all.count - done)};
      Handover* const handover = shared_.stage_handover(turn_.place());
      turn_.wait_until_emptied(handover);
      if (is_elected_lane()) {
        handover->filled.arrive_and_expect(rows * bytes_of(columns));
        fetch(shared_.stage(turn_.place()), columns);
      }
      __syncwarp();
      turn_.next();
    }
  }

  __device__ __forceinline__ void fetch_rows(const GemmMatrix& matrix, Rows rows, Columns columns,
                                             char* to) const {
    Mbarrier* const barrier = &shared_.stage_handover(turn_.place())->filled;
    const T* from = static_cast<const T*>(matrix.data) + rows.first * matrix.stride + columns.first;
    for (int row = 0; row < rows.count; ++row) {
      load_bulk(to + row * kPitch, from, bytes_of(columns), barrier);
      from += matrix.stride;
    }
  }

  static __device__ __forceinline__ unsigned bytes_of(Columns columns) {
    return static_cast<unsigned>(columns.count) * sizeof(T);
  }

  const GatedMlpDecodeParams& p_;
  const GatedMlpDecodeConfig& c_;
  const Share& share_;
  const BlockMemory<kSteps>& shared_;
  Turn turn_;
};

}  // namespace decode
}  // namespace fusedcuda
