// The warps of gated_mlp_decode.cuh that start the copies of weights, each of half the rows of a
// tile: of w_gate and of w_up, or of 8 rows of w_down. They wait for room in the ring, and for the
// arrival of what was asked for long enough ago. All lanes go through the loops together, so that
// addresses are in uniform registers, where the copy engine takes them from: a copy is six
// instructions, of one lane alone it is twenty.
#pragma once

#include <cuda_runtime.h>

#include "common/bulk_copy.cuh"
#include "common/wgmma.cuh"
#include "gated_mlp_decode_parts.cuh"

namespace fusedcuda {
namespace decode {

// kLower: the lower half.
template <typename T, int kSteps, bool kLower>
class Producer {
 public:
  __device__ __forceinline__ Producer(const GatedMlpDecodeParams& p, const GatedMlpDecodeConfig& c,
                                      const Share& share, const BlockMemory<kSteps>& shared)
      : p_(p), c_(c), share_(share), shared_(shared), turn_(c.stages), arriving_(c.stages) {}

  __device__ __forceinline__ void run() {
    for (int round = 0; round < c_.rounds; ++round) {
      const Rows pairs = share_.pairs(round);
      if (pairs.count > 0) fetch_tile(kLower ? p_.w_up : p_.w_gate, {0, p_.k}, pairs);
    }
    for (int pass = 0; pass < c_.passes; ++pass) {
      for (int tile = 0; tile < share_.down_tiles(); ++tile) {
        const Rows rows = share_.down_tile(tile);
        const Rows half = kLower
                              ? Rows{rows.first + kDecodePairs, max(rows.count - kDecodePairs, 0)}
                              : Rows{rows.first, min(rows.count, kDecodePairs)};
        fetch_tile(p_.w_down, columns_of(pass, p_, c_), half);
      }
    }
  }

 private:
  static constexpr int kStageColumns = BlockMemory<kSteps>::kStageColumns;
  static constexpr int kPitch = BlockMemory<kSteps>::kPitch;

  // Half of a tile, stage by stage. There may be no rows of it.
  __device__ __forceinline__ void fetch_tile(const GemmMatrix& matrix, Columns all, Rows rows) {
    for (int done = 0; done < all.count; done += kStageColumns) {
      const Columns columns = {all.first + done, min(kStageColumns, all.count - done)};
      if (started_ == c_.under_way) {
        arriving_.wait_until_filled(shared_.stage_handover(arriving_.place()));
        arriving_.next();
      } else {
        ++started_;
      }
      Handover* const handover = shared_.stage_handover(turn_.place());
      turn_.wait_until_emptied(handover);
      if (is_elected_lane()) {
        handover->filled.arrive_and_expect(rows.count * bytes_of(columns));
        fetch_rows(matrix, rows, columns, &handover->filled);
      }
      __syncwarp();
      turn_.next();
    }
  }

  __device__ __forceinline__ void fetch_rows(const GemmMatrix& matrix, Rows rows, Columns columns,
                                             Mbarrier* filled) const {
    char* const to = shared_.stage(turn_.place()) + (kLower ? kDecodePairs * kPitch : 0);
    const T* from = static_cast<const T*>(matrix.data) + rows.first * matrix.stride + columns.first;
    for (int row = 0; row < rows.count; ++row) {
      load_bulk(to + row * kPitch, from, bytes_of(columns), filled);
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
  Turn turn_, arriving_;
  int started_ = 0;  // and not waited for
};

}  // namespace decode
}  // namespace fusedcuda
