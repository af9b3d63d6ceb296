// A stable radix sort of (index, position), from the lowest digit to the highest. A pass is three
// launches:
// - radix_count_kernel: how often each digit occurs in each tile of kSortTile items;
// - radix_scan_kernel: of each digit, how many there are in the tiles before each tile, and in all;
// - radix_scatter_kernel: items to where their digit starts, behind those of the tiles before and
//   those before them in their own tile.
// Counts are integers, so no order in which they are added up shows. The first pass reads the
// indices themselves; positions come into being there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/launch.h"
#include "common/reduce.cuh"
#include "dlrm_gradient.h"
#include "dlrm_index.cuh"

namespace fusedcuda {

struct SortPass {
  int64_t items;
  int64_t tiles;
  int shift, bits;   // of the digit
  const void* from;  // the first pass: indices; all others: IndexedRow
  IndexedRow* to;
  uint32_t* counts;  // [digits, tiles]
  uint32_t* totals;  // [digits]
  // The first pass:
  int64_t rows;  // of the table
  uint4* zeros;  // filled with them, by the way
  int64_t zero_bytes;
};

namespace sorting {

constexpr int kWarps = kSortThreads / kWarpSize;
constexpr unsigned kAllLanes = 0xffffffff;

// A pass reads indices of the type `Source`, the first one, or the items that the one before wrote.
template <typename Source>
constexpr bool kIsFirst = !std::is_same_v<Source, IndexedRow>;

// The row of an item of any pass, as wide as it is given.
template <typename Source>
__device__ __forceinline__ auto row_at(const SortPass& p, int64_t i) {
  if constexpr (kIsFirst<Source>) {
    return static_cast<const Source*>(p.from)[i];
  } else {
    return static_cast<const Source*>(p.from)[i].row;
  }
}

__device__ __forceinline__ unsigned digit_of(const SortPass& p, uint32_t row) {
  return row >> p.shift & ((1u << p.bits) - 1);
}

// Items of the block's tile.
__device__ __forceinline__ int items_of_tile(const SortPass& p, int64_t first) {
  return static_cast<int>(min(p.items - first, int64_t{kSortTile}));
}

// The sum of the values of the threads before, and of all. `scratch` holds a value a warp.
__device__ __forceinline__ uint32_t exclusive_scan(uint32_t value, uint32_t* scratch,
                                                   uint32_t* total) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  uint32_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  __syncthreads();
  if (lane == kWarpSize - 1) scratch[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = all;
    all += scratch[w];
  }
  *total = all;
  return before + inclusive - value;
}

// The lanes that have the same digit, of those where `exists`. A ballot a bit: match_any takes a
// step for each value that occurs, and most of a warp's digits differ.
__device__ __forceinline__ unsigned lanes_with(unsigned digit, bool exists) {
  unsigned lanes = __ballot_sync(kAllLanes, exists);
#pragma unroll
  for (int b = 0; b < kMostDigitBits; ++b) {
    const bool is_set = (digit >> b & 1) != 0;
    const unsigned set = __ballot_sync(kAllLanes, is_set);
    lanes &= is_set ? set : ~set;
  }
  return lanes;
}

// All blocks of the launch together.
__device__ __forceinline__ void fill_with_zeros(const SortPass& p) {
  const int64_t vectors = p.zero_bytes / kVectorBytes;
  const int64_t thread = int64_t{blockIdx.x} * kSortThreads + threadIdx.x;
#pragma unroll 1
  for (int64_t i = thread; i < vectors; i += int64_t{gridDim.x} * kSortThreads)
    p.zeros[i] = uint4{0, 0, 0, 0};
  const int64_t rest = vectors * kVectorBytes + thread;
  if (rest < p.zero_bytes) reinterpret_cast<unsigned char*>(p.zeros)[rest] = 0;
}

}  // namespace sorting

// The first pass refuses indices that are no rows; those behind it need not look.
template <typename Source>
__global__ void __launch_bounds__(kSortThreads)
    radix_count_kernel(const __grid_constant__ SortPass p) {
  __shared__ uint32_t counts[kMostDigits];
  const int digits = 1 << p.bits;
  for (int d = threadIdx.x; d < digits; d += kSortThreads) counts[d] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  if (sorting::kIsFirst<Source>) {
    sorting::fill_with_zeros(p);
    if (blockIdx.x >= p.tiles) return;
  }
  const int64_t first = int64_t{blockIdx.x} * kSortTile;
  const int count = sorting::items_of_tile(p, first);
  decltype(sorting::row_at<Source>(p, 0)) rows[kSortItems];
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    const int i = k * kSortThreads + threadIdx.x;
    rows[k] = i < count ? sorting::row_at<Source>(p, first + i) : 0;
  }
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    if (k * kSortThreads + threadIdx.x >= count) continue;
    if (sorting::kIsFirst<Source>) assert_is_row(rows[k], p.rows);
    atomicAdd(&counts[sorting::digit_of(p, static_cast<uint32_t>(rows[k]))], 1u);
  }
  __syncthreads();
  let_next_kernel_start();
  for (int d = threadIdx.x; d < digits; d += kSortThreads)
    p.counts[d * p.tiles + blockIdx.x] = counts[d];
}

// A block a digit.
static __global__ void __launch_bounds__(kSortThreads)
    radix_scan_kernel(uint32_t* counts, uint32_t* totals, int64_t tiles) {
  __shared__ uint32_t scratch[sorting::kWarps];
  uint32_t* const of_digit = counts + blockIdx.x * tiles;
  wait_for_previous_kernel();
  uint32_t before = 0;
  for (int64_t first = 0; first < tiles; first += kSortThreads) {
    const int64_t tile = first + threadIdx.x;
    uint32_t all;
    const uint32_t value = tile < tiles ? of_digit[tile] : 0;
    const uint32_t sum = sorting::exclusive_scan(value, scratch, &all);
    if (tile < tiles) of_digit[tile] = before + sum;
    before += all;
  }
  let_next_kernel_start();
  if (threadIdx.x == 0) totals[blockIdx.x] = before;
}

// The items of a warp lie behind those of the warp before, and lanes take neighbours: the order is
// that of warp, k, lane. The tile is put in order in shared memory first, so that neighbours are
// stored to neighbours.
template <typename Source>
__global__ void __launch_bounds__(kSortThreads, kSortBlocksOfSm)
    radix_scatter_kernel(const __grid_constant__ SortPass p) {
  using sorting::kWarps;
  constexpr int kDigits = kMostDigits / kSortThreads;  // of a thread
  static_assert(kDigits * kSortThreads == kMostDigits);
  // Of each warp how many it has of a digit; then where in the tile the first of them goes.
  __shared__ uint16_t places[kWarps][kMostDigits];
  __shared__ uint32_t starts[kMostDigits];  // what a place in the tile is off its place in `to` by
  __shared__ IndexedRow tile[kSortTile];
  __shared__ uint32_t scratch[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int d = lane; d < kMostDigits; d += kWarpSize) places[warp][d] = 0;
  wait_for_previous_kernel();

  const int64_t first = int64_t{blockIdx.x} * kSortTile;
  const int count = sorting::items_of_tile(p, first);
  const int own = warp * (kSortTile / kWarps) + lane;
  uint32_t rows[kSortItems];
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    const int i = own + k * kWarpSize;
    rows[k] = i < count ? static_cast<uint32_t>(sorting::row_at<Source>(p, first + i)) : 0;
  }
  uint32_t totals[kDigits], before_tile[kDigits];
#pragma unroll
  for (int j = 0; j < kDigits; ++j) {
    const int d = kDigits * threadIdx.x + j;
    const bool exists = d >> p.bits == 0;
    totals[j] = exists ? p.totals[d] : 0;
    before_tile[j] = exists ? p.counts[d * p.tiles + blockIdx.x] : 0;
  }

  uint32_t ranks[kSortItems];  // among the warp's items of the digit
  __syncwarp();
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    const bool exists = own + k * kWarpSize < count;
    const unsigned digit = sorting::digit_of(p, rows[k]);
    const unsigned same = sorting::lanes_with(digit, exists);
    ranks[k] = places[warp][digit] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    const bool is_last = same >> lane == 1;
    if (is_last) places[warp][digit] = static_cast<uint16_t>(ranks[k] + 1);
    __syncwarp();
  }
  __syncthreads();

  uint32_t of_tile[kDigits], in_tile = 0, in_all = 0, unused;
#pragma unroll
  for (int j = 0; j < kDigits; ++j) {
    of_tile[j] = 0;
    for (int w = 0; w < kWarps; ++w) {
      uint16_t& place = places[w][kDigits * threadIdx.x + j];
      const uint16_t of_warp = place;
      place = static_cast<uint16_t>(of_tile[j]);
      of_tile[j] += of_warp;
    }
    in_tile += of_tile[j];
    in_all += totals[j];
  }
  in_tile = sorting::exclusive_scan(in_tile, scratch, &unused);
  in_all = sorting::exclusive_scan(in_all, scratch, &unused);
#pragma unroll
  for (int j = 0; j < kDigits; ++j) {
    const int d = kDigits * threadIdx.x + j;
    for (int w = 0; w < kWarps; ++w) places[w][d] += static_cast<uint16_t>(in_tile);
    starts[d] = in_all + before_tile[j] - in_tile;
    in_tile += of_tile[j];
    in_all += totals[j];
  }
  __syncthreads();

  // Items are read again, from the cache: there are no registers to keep them in meanwhile.
  IndexedRow items[kSortItems];
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    const int i = own + k * kWarpSize;
    items[k] = {};
    if (i >= count) continue;
    if constexpr (sorting::kIsFirst<Source>) {
      items[k].row = static_cast<uint32_t>(sorting::row_at<Source>(p, first + i));
      items[k].position = static_cast<uint32_t>(first + i);
    } else {
      items[k] = static_cast<const Source*>(p.from)[first + i];
    }
  }
#pragma unroll
  for (int k = 0; k < kSortItems; ++k) {
    if (own + k * kWarpSize < count)
      tile[places[warp][sorting::digit_of(p, items[k].row)] + ranks[k]] = items[k];
  }
  __syncthreads();
  let_next_kernel_start();
  for (int i = threadIdx.x; i < count; i += kSortThreads) {
    const IndexedRow item = tile[i];
    p.to[starts[sorting::digit_of(p, item.row)] + static_cast<uint32_t>(i)] = item;
  }
}

}  // namespace fusedcuda
