// Parts of gated_mlp_decode.cuh for gated_mlp_decode_configs.cu: the copies alone, and the kernel
// with notes of when its blocks are how far.
#pragma once

#include "gated_mlp_decode.cuh"

namespace fusedcuda {

// The ring alone: what is copied is given back at once.
template <typename T, int kSteps>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    copies_alone(const __grid_constant__ GatedMlpDecodeParams p,
                 const __grid_constant__ GatedMlpDecodeConfig c, const DecodeCounters) {
  using namespace decode;
  const Share share(p);
  const BlockMemory<kSteps> shared(c);
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  if (warp == kDecodeConsumers) Producer<T, kSteps, false>(p, c, share, shared).run();
  if (warp == kDecodeConsumers + 1) Producer<T, kSteps, true>(p, c, share, shared).run();
  if (warp >= kDecodeConsumers) return;
  constexpr int kStageColumns = BlockMemory<kSteps>::kStageColumns;
  const auto stages_of = [](int columns) { return (columns + kStageColumns - 1) / kStageColumns; };
  int64_t stages = 0;
  for (int round = 0; round < c.rounds; ++round)
    stages += share.pairs(round).count > 0 ? stages_of(p.k) : 0;
  for (int pass = 0; pass < c.passes; ++pass)
    stages += share.down_tiles() * stages_of(columns_of(pass, p, c).count);
  Turn turn(c.stages);
  for (int64_t i = 0; i < stages; ++i) {
    Handover* const handover = shared.stage_handover(turn.place());
    turn.wait_until_filled(handover);
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) handover->emptied.arrive();
    turn.next();
  }
}

// The kernel itself, and when its blocks are how far.
enum Mark {
  kStart,
  kFirstTile,
  kLastTile,
  kFirstPart,
  kFirstPartTile,
  kLastPart,
  kLastPartTile,
  kLastSums,
  kEnd,
  kMarks
};
constexpr const char* kMarkNames[kMarks] = {"start",
                                            "first tile of h",
                                            "all own tiles of h",
                                            "first part of h is there",
                                            "its first tile",
                                            "last part there",
                                            "its first tile of sums",
                                            "all sums",
                                            "end"};
struct Marks {
  unsigned long long at[kMarks];
};

template <typename T, int kColumnTiles>
class MarkedBlock : public decode::Block<T, kColumnTiles, kDecodeSteps> {
  using Base = decode::Block<T, kColumnTiles, kDecodeSteps>;
  using Base::Base, Base::p_, Base::c_, Base::share_, Base::shared_;

 public:
  __device__ void run(int warp, Marks* marks) {
    if (threadIdx.x == 0) mark(kStart, marks);
    if (warp < kDecodeConsumers) {
      take_registers<232>();
      consume(warp, marks);
    } else {
      give_registers<40>();
      Base::serve(warp);
    }
    mark(kEnd, marks);
  }

 private:
  // As in Block, with marks.
  __device__ __forceinline__ void consume(int warp, Marks* marks) const {
    decode::Consumer<T, kColumnTiles, kDecodeSteps> consumer(p_.m, warp, c_, shared_);
    consumer.load(p_.x, {0, p_.k});
    Base::start();
    for (int round = 0; round < c_.rounds; ++round) {
      if (share_.pairs(round).count > 0) consumer.multiply_tile(p_.k);
      if (round == 0 && threadIdx.x == 0) mark(kFirstTile, marks);
    }
    if (threadIdx.x == 0) mark(kLastTile, marks);
    for (int pass = 0; pass < c_.passes; ++pass) {
      const bool is_last = pass + 1 == c_.passes;
      const decode::Columns part = decode::columns_of(pass, p_, c_);
      shared_.hidden_is_there(pass)->wait(0);
      if (threadIdx.x == 0 && (pass == 0 || is_last)) mark(is_last ? kLastPart : kFirstPart, marks);
      consumer.load({p_.h, p_.f}, part);
      for (int tile = 0; tile < share_.down_tiles(); ++tile) {
        consumer.multiply_tile(part.count);
        if (threadIdx.x == 0 && tile == 0 && (pass == 0 || is_last))
          mark(is_last ? kLastPartTile : kFirstPartTile, marks);
      }
    }
    if (threadIdx.x == 0) mark(kLastSums, marks);
  }

  static __device__ __forceinline__ void mark(Mark what, Marks* marks) {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
    atomicMax(&marks[blockIdx.x].at[what], time);
  }
};

template <typename T, int kColumnTiles>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    marked_kernel(const __grid_constant__ GatedMlpDecodeParams p,
                  const __grid_constant__ GatedMlpDecodeConfig c, Marks* marks) {
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpSize, 0);
  MarkedBlock<T, kColumnTiles>(p, c, decode_counters[0]).run(warp, marks);
}

}  // namespace fusedcuda
