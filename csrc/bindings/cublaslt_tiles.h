// The names of cuBLASLt's tiles, such as 128x256 for 23: its header has them as enumerators only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace fusedcuda {

// In the order of cublasLtMatmulTile_t (13.1): the oldest ones, then all multiples of 8 by 64 that
// a block can hold, then all of 64 by 8; a test compares them with the header.
inline std::vector<std::string> make_tile_names() {
  std::vector<std::string> names = {
      "undefined", "8x8",    "8x16",   "16x8",   "8x32",    "16x16",   "32x8",    "8x64",
      "16x32",     "32x16",  "64x8",   "32x32",  "32x64",   "64x32",   "32x128",  "64x64",
      "128x32",    "64x128", "128x64", "64x256", "128x128", "256x64",  "64x512",  "128x256",
      "256x128",   "512x64", "64x96",  "96x64",  "96x128",  "128x160", "160x128", "192x128",
      "128x192",   "128x96", "32x256", "256x32"};
  auto add = [&](int rows, int columns) {
    const std::string name = std::to_string(rows) + "x" + std::to_string(columns);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  constexpr int kMost = 768, kElements = 48 << 10;
  for (int rows = 8; rows <= kMost; rows += 8) {
    for (int columns = 64; columns <= kMost && rows * columns <= kElements; columns += 64)
      add(rows, columns);
  }
  for (int rows = 64; rows <= kMost; rows += 64) {
    const int elements = rows == 64 ? kElements : 64 << 10;
    for (int columns = 8; columns <= kMost && rows * columns <= elements; columns += 8)
      add(rows, columns);
  }
  return names;
}

inline std::string tile_name(uint32_t tile) {
  static const std::vector<std::string> names = make_tile_names();
  return tile < names.size() ? names[tile] : "number " + std::to_string(tile);
}

}  // namespace fusedcuda
