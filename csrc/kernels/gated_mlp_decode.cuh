// A gated MLP of few rows, as one token or a few sequences have while text is generated:
//
//   y = h @ w_down.T,   h[m, f] = act(sum_k x[m, k] w_gate[f, k]) * (sum_k x[m, k] w_up[f, k])
//
// All time goes into reading the weights, 2 (2 f k + n f) bytes: 352 MB of 4096 x 14336 are 83 us
// at copy speed. Three products and an elementwise kernel stop the memory at every end: the last
// blocks run alone, the next kernel starts, its first bytes take a microsecond. So this is one
// launch with a block on each SM, through whose ring in shared memory the weights go without a
// stop, also over the border between h and y, because weights depend on nothing. 80 KB are under
// way at a time: what is more only makes everything else wait, which goes the same way. The ring
// has room for 190 KB, so that the copies go on while nobody multiplies.
//
// What depends is h, which every block needs whole. A block takes 8 rows of w_gate and of w_up in
// turn with all other blocks, so that h grows from its front to its end on the whole card at once,
// and blocks walk along the rows of w_down in the same direction: what they begin with was finished
// long ago, and the end of h is only asked for when there has been other work to do. Blocks count
// in global memory how far they are; the launch is cooperative, so all of them run.
//
// Warps of a block have a job each:
//   producers  start the copies of 16 rows of weights, 1 KB of each, into a stage of the ring
//   consumers  multiply a stage, each an eighth of its columns, and keep the sums of 16 rows
//   finisher   adds up the eight sums of a tile: h = act(gate) * up, or y; counts parts of h
//   watcher    waits until other blocks have counted, and lets the consumers read h
// Sums are added up in an order that the shapes and the number of SMs decide.
#pragma once

#include <cassert>

#include "common/activation.cuh"
#include "common/convert.cuh"
#include "common/grid_counter.cuh"
#include "common/launch.h"
#include "common/mbarrier.cuh"
#include "common/wgmma.cuh"
#include "gated_mlp_decode.h"
#include "gated_mlp_decode_config.h"
#include "gated_mlp_decode_consumer.cuh"
#include "gated_mlp_decode_parts.cuh"
#include "gated_mlp_decode_producer.cuh"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Kernel
// ------------------------------------------------------------------------------------------------

// Zero when the library is loaded, and whenever no launch that uses them is running.
static __device__ unsigned decode_counters[kDecodeSlots][kDecodeCounters];

namespace decode {

template <typename T, int kColumnTiles, int kSteps>
class Block {
 public:
  __device__ __forceinline__ Block(const GatedMlpDecodeParams& p, const GatedMlpDecodeConfig& c,
                                   unsigned* counters)
      : p_(p), c_(c), share_(p), shared_(c), counters_(counters) {}

  __device__ __forceinline__ void run() {
    wait_for_previous_kernel();
    // By a shuffle, so that the compiler knows it to be the same for the warp.
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpSize, 0);
    if (warp < kDecodeConsumers) {
      take_registers<232>();
      consume(warp);
    } else {
      give_registers<40>();
      serve(warp);
    }
  }

 protected:  // for the program that times the parts
  __device__ __forceinline__ void serve(int warp) {
    if (threadIdx.x == kDecodeConsumers * kWarpSize) shared_.init_barriers();
    start();
    if (warp == kDecodeConsumers) Producer<T, kSteps, false>(p_, c_, share_, shared_).run();
    if (warp == kDecodeConsumers + 1) Producer<T, kSteps, true>(p_, c_, share_, shared_).run();
    if (warp == kDecodeConsumers + 2) finish();
    if (warp == kDecodeConsumers + 3) watch();
  }

  // Behind it there are barriers in shared memory. Consumers have asked for x by then: it would
  // wait behind all weights that the producers ask for.
  static __device__ __forceinline__ void start() { named_barrier(1, kDecodeThreads); }

  // --- Consumers: 8 warps

  __device__ __forceinline__ void consume(int warp) const {
    Consumer<T, kColumnTiles, kSteps> consumer(p_.m, warp, c_, shared_);
    consumer.load(p_.x, {0, p_.k});
    start();
    for (int round = 0; round < c_.rounds; ++round) {
      if (share_.pairs(round).count > 0) consumer.multiply_tile(p_.k);
    }
    if (share_.down().count == 0) return;
    for (int pass = 0; pass < c_.passes; ++pass) {
      const Columns part = columns_of(pass, p_, c_);
      shared_.hidden_is_there(pass)->wait(0);
      consumer.load({p_.h, p_.f}, part);
      for (int tile = 0; tile < share_.down_tiles(); ++tile) consumer.multiply_tile(part.count);
    }
  }

  // --- Finisher: one warp
  //
  // Of lane l: rows l / 4 (x, y) and l / 4 + 8 (z, w) of a tile of weights, with two rows of x.

  __device__ __forceinline__ void finish() const {
    Turn buffers(kSumBuffers);
    for (int round = 0; round < c_.rounds; ++round) {
      const Rows pairs = share_.pairs(round);
      const int counter = round / c_.rounds_counted, next = round + 1;
      const bool counts = next == c_.rounds || next / c_.rounds_counted > counter;
      if (pairs.count > 0)
        take_sums(&buffers, [&](int tile, float4 sums) { store_hidden(pairs, tile, sums); });
      // Not every round: it waits until the stores have gone past all weights that are under way.
      __syncwarp();
      if (counts && lane_ == 0) add_release(&counters_[counter], 1);
    }
    for (int pass = 0; pass < c_.passes; ++pass) {
      for (int down = 0; down < share_.down_tiles(); ++down) {
        take_sums(&buffers, [&](int tile, float4 sums) {
          float4* const total = shared_.totals(down, tile) + lane_;
          if (pass > 0) sums = sum_of(*total, sums);
          if (pass + 1 < c_.passes) {
            *total = sums;
          } else {
            store_output(share_.down_tile(down), tile, sums);
          }
        });
      }
    }
  }

  // take(column tile, sums) of the next tile of weights.
  template <typename Take>
  __device__ __forceinline__ void take_sums(Turn* buffers, Take take) const {
    Handover* const handover = shared_.sums_handover(buffers->place());
    buffers->wait_until_filled(handover);
    unsigned read = 0;
#pragma unroll 1
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      float4 sums = {};
#pragma unroll
      for (int warp = 0; warp < kDecodeConsumers; ++warp)
        sums = sum_of(sums, shared_.sums(buffers->place(), warp, tile)[lane_]);
      read |= __float_as_uint(sums.x);
      take(tile, sums);
    }
    arrive_behind(read, &handover->emptied);
    buffers->next();
  }

  // A tile's upper rows are of w_gate, the lower ones of w_up.
  __device__ __forceinline__ void store_hidden(Rows pairs, int tile, float4 sums) const {
    const float gate[2] = {sums.x, sums.y}, up[2] = {sums.z, sums.w};
    float activated[2];
    activate</*kFast=*/true>(p_.activation, gate, activated);
    const int pair = lane_ / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of_x(tile, i);
      if (pair < pairs.count && row < p_.m)
        at(p_.h, row, p_.f, pairs.first + pair) = from_compute<T>(activated[i] * up[i]);
    }
  }

  __device__ __forceinline__ void store_output(Rows rows, int tile, float4 sums) const {
    const float of_rows[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}};
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int column = lane_ / 4 + lower * kDecodePairs;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row_of_x(tile, i);
        if (column < rows.count && row < p_.m)
          at(p_.y, row, p_.n, rows.first + column) = from_compute<T>(of_rows[lower][i]);
      }
    }
  }

  __device__ __forceinline__ int row_of_x(int tile, int i) const {
    return tile * kDecodeColumns + lane_ % 4 * 2 + i;
  }

  static __device__ __forceinline__ T& at(void* matrix, int row, int columns, int column) {
    return static_cast<T*>(matrix)[int64_t{row} * columns + column];
  }

  static __device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }

  // --- Watcher: one warp

  __device__ __forceinline__ void watch() const {
    for (int pass = 0; pass < c_.passes; ++pass) {
      const Columns part = columns_of(pass, p_, c_);
      wait_for_counters(counter_of(part.first), counter_of(part.first + part.count - 1));
      __syncwarp();
      if (lane_ == 0) shared_.hidden_is_there(pass)->arrive();
    }
    // Whoever is the last to need the counters leaves them as it has found them.
    if (lane_ != 0) return;
    const unsigned through = add_acquire_release(&counters_[kDecodeCounters - 1], 1);
    if (through + 1 < gridDim.x) return;
    for (int i = 0; i < kDecodeCounters; ++i) counters_[i] = 0;
  }

  // Of the blocks that have done their part of the rounds around a column of h.
  __device__ __forceinline__ int counter_of(int column) const {
    return column / (kDecodePairs * static_cast<int>(gridDim.x)) / c_.rounds_counted;
  }

  // Until all blocks have counted at those from `first` to `last`, each lane at one of them.
  __device__ __forceinline__ void wait_for_counters(int first, int last) const {
    constexpr int kMostPolls = 1 << 24;  // 10 s
    const bool waits = first <= lane_ && lane_ <= last;
    for (int polls = 0;; ++polls) {
      const bool is_there = !waits || load_acquire(&counters_[lane_]) >= gridDim.x;
      if (__all_sync(0xffffffffu, is_there)) return;
      assert(polls < kMostPolls &&
             "gated_mlp_decode: the other blocks of this launch have stopped");
    }
  }

  const GatedMlpDecodeParams& p_;
  const GatedMlpDecodeConfig& c_;
  const Share share_;
  const BlockMemory<kSteps> shared_;
  unsigned* const counters_;
  const int lane_ = static_cast<int>(threadIdx.x) % kWarpSize;
};

}  // namespace decode

template <typename T, int kColumnTiles, int kSteps>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    gated_mlp_decode_kernel_sm90(const __grid_constant__ GatedMlpDecodeParams p,
                                 const __grid_constant__ GatedMlpDecodeConfig c,
                                 const DecodeCounters counters) {
#if defined(FUSEDCUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  unsigned* const counts =
      counters.memory != nullptr ? counters.memory : decode_counters[counters.slot];
  decode::Block<T, kColumnTiles, kSteps>(p, c, counts).run();
#else
  __trap();
#endif
}

// ------------------------------------------------------------------------------------------------
// Launcher
// ------------------------------------------------------------------------------------------------

namespace decode {

template <typename T, int kSteps>
auto kernel_for(int column_tiles) {
  return column_tiles == 1 ? gated_mlp_decode_kernel_sm90<T, 1, kSteps>
                           : gated_mlp_decode_kernel_sm90<T, 2, kSteps>;
}

template <typename T, int kSteps>
cudaError_t run(const GatedMlpDecodeParams& p, const GatedMlpDecodeConfig& c,
                const DecodeCounters& counters, cudaStream_t stream) {
  LaunchOptions options;
  options.cooperative = true;
  options.shared_bytes = c.shared_bytes;
  return launch(kernel_for<T, kSteps>(c.column_tiles), dim3(c.blocks), dim3(kDecodeThreads),
                options, stream, p, c, counters);
}

}  // namespace decode

cudaError_t launch_gated_mlp_decode(const GatedMlpDecodeParams& params,
                                    const GatedMlpDecodeConfig& config,
                                    const DecodeCounters& counters, cudaStream_t stream) {
  using decode::run;
  return params.dtype == DType::kFloat16
             ? run<__half, kDecodeSteps>(params, config, counters, stream)
             : run<__nv_bfloat16, kDecodeSteps>(params, config, counters, stream);
}

}  // namespace fusedcuda
