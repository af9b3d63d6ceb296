// Matrices as the Hopper products take them, and how the blocks of a product are chosen. Pure host
// functions. Kernels: hopper_gemm.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dtype.h"
#include "hopper_gemm.h"
#include "iteration.h"
#include "launch.h"

namespace fusedcuda {

// A matrix of 2-byte or larger elements whose rows are `stride` elements apart.
struct GemmMatrix {
  void* data = nullptr;
  int64_t stride = 0;
};

// One factor of a matrix product, as the tensor cores see it: `rows` x k elements, stored either
// row by row (k_is_inner) or k by k.
struct GemmFactor {
  const void* data = nullptr;
  int64_t stride = 0;  // elements between rows, or between values of k
  bool k_is_inner = true;
};

// Blocks that take tiles of the result; see hopper_gemm.cuh.
struct GemmConfig {
  int tile_rows = 128;
  int tile_columns = 128;  // of the result
  int cluster = 2;         // blocks along the rows
  int group = 8;           // rows of clusters of tiles
  int splits = 1;          // of k
  int blocks = 0;
};

namespace gemm {

// The copy engine wants 16-byte aligned rows.
inline bool can_be_boxed(const void* data, int64_t stride, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * size_of(dtype) % 16 == 0;
}

inline bool can_run(DType dtype, int64_t m, int64_t n, int64_t k, const DeviceTraits& device) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const bool two_bytes = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  return device.wgmma && two_bytes && m > 0 && n > 0 && k > 0 && m < kMost && n < kMost &&
         k < kMost;
}

inline int64_t count_tiles(int64_t rows, int64_t columns, const GemmConfig& config) {
  return ceil_div(rows, int64_t{config.tile_rows} * config.cluster) *
         ceil_div(columns, config.tile_columns) * config.splits;
}

// Rows of clusters of tiles that are computed together, by the bytes of b: the tiles that run at
// the same time should need as few rows and columns as possible. H200 at its highest clock,
// microseconds of groups of 2, 4, 8 and 16 (bench/tuning/linear_products.cu, gated_mlp_configs.cu):
// 8192 x 4096 x 4096, 356.5, 357.8, 354.5, 356.6; 8192 x 14336 x 4096, 1280, 1247, 1237, 1247;
// twice that as one product, 2634, 2536, 2512, 2630. Small weights are in the L2 as a whole: 65536
// x 512 x 16, 27.2, 26.9, 28.1, 29.2.
inline int group_for(int64_t bytes_of_b) {
  constexpr int64_t kSmallBytes = int64_t{8} << 20;
  return bytes_of_b > kSmallBytes ? 8 : 4;
}

// Clusters that run at the same time.
inline int64_t resident_clusters(const DeviceTraits& device, const GemmConfig& config) {
  const int log2 = config.cluster == 1 ? 0 : config.cluster == 2 ? 1 : 2;
  return std::min<int64_t>(device.num_sms / config.cluster, device.resident_clusters[0][log2]);
}

// Tiles that a cluster computes one behind the other.
inline int64_t count_rounds(int64_t rows, int64_t columns, const DeviceTraits& device,
                            const GemmConfig& config) {
  return ceil_div(count_tiles(rows, columns, config), resident_clusters(device, config));
}

// What part of the elements that all clusters could have in these rounds is the result's: tiles
// stick out of it, and in the last round not every cluster has one.
inline double useful_part(int64_t rows, int64_t columns, const DeviceTraits& device,
                          const GemmConfig& config) {
  const double of_tile = static_cast<double>(config.tile_rows) * config.tile_columns;
  const int64_t tiles = count_rounds(rows, columns, device, config) *
                        resident_clusters(device, config) * config.cluster;
  return static_cast<double>(rows) * static_cast<double>(columns) /
         (of_tile * static_cast<double>(tiles));
}

// As many blocks as there are clusters of tiles, and no more than run at the same time.
inline void set_blocks(int64_t rows, int64_t columns, const DeviceTraits& device,
                       GemmConfig* config) {
  const int64_t clusters =
      std::min(count_tiles(rows, columns, *config), resident_clusters(device, *config));
  config->blocks = static_cast<int>(clusters) * config->cluster;
}

}  // namespace gemm
}  // namespace fusedcuda
