// What lies where in the shared memory of the interaction's kernels, and the constants of all of
// dlrm.cu that its host code knows too.
#pragma once

#include "dlrm.h"

namespace fusedcuda {

#ifdef __CUDACC__
#define FUSEDCUDA_BOTH __host__ __device__
#else
#define FUSEDCUDA_BOTH
#endif

FUSEDCUDA_BOTH constexpr int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Elements of an output row in front of its padding: the dense vector and the products.
FUSEDCUDA_BOTH constexpr int dot_row_elements(int vectors, int columns) {
  return columns + vectors * (vectors - 1) / 2;
}

// --- Interaction on tensor cores

constexpr int kDotWarps = 4;  // the most in a block; each has samples of its own
// Tiles of 16 vectors that the kernels are made for, and blocks of kDotWarps warps that share an
// SM, as far as registers go: 96 a thread with few tiles, 142 with many.
constexpr int kFewDotTiles = 2;
constexpr int kManyDotTiles = 4;
constexpr int kFewTilesBlocks = 5;
constexpr int kManyTilesBlocks = 3;

// Samples of a warp in shared memory: one that is worked on, the others on their way.
FUSEDCUDA_BOTH constexpr int dot_stages(int tiles) { return tiles == kFewDotTiles ? 3 : 2; }

// In elements of 2 bytes, of one warp.
struct DotLayout {
  int stages;
  // From vector to vector: an odd number of 16-byte pieces, so that the same piece of eight
  // neighbours lies in all 32 banks.
  int pitch;
  int vectors;  // of a sample
  int row;      // of the output, or of the incoming gradient

  FUSEDCUDA_BOTH DotLayout(const DotVectors& p, int tiles)
      : stages(dot_stages(tiles)),
        pitch(round_up(p.columns, 16) + 8),
        vectors(16 * tiles * pitch),
        row(round_up(p.width, 8)) {}

  // A row that is being written, and the stages.
  FUSEDCUDA_BOTH int forward_elements() const { return row + stages * vectors; }
  // In the backward each stage has a row.
  FUSEDCUDA_BOTH int backward_elements() const { return stages * (vectors + row); }
};

// --- Interaction by threads

constexpr int kDotThreads = 256;  // the most in a block
// Blocks beyond which each takes several samples: a hundred waves, so that they end together.
constexpr int kDotBlocksOfSm = 1024;
constexpr int kDotChunk = 64;  // columns of all vectors that are in shared memory at a time
constexpr int kDotSide = 4;    // products that a thread makes are those of 4 x 4 vectors

// In elements, of one block.
struct DotChunkLayout {
  int step;    // elements of a 16-byte piece
  int pitch;   // from vector to vector of a chunk
  int chunk;   // of all vectors
  int row;     // forward: of the output
  int side;    // backward: of the square of the products' gradients
  int groups;  // forward: of vectors, kDotSide each

  FUSEDCUDA_BOTH DotChunkLayout(const DotVectors& p, int itemsize)
      : step(kVectorBytes / itemsize),
        pitch(kDotChunk + step),
        chunk(p.vectors * pitch),
        row(round_up(p.width, step)),
        side(round_up(p.vectors, step)),
        groups((p.vectors + kDotSide - 1) / kDotSide) {}

  FUSEDCUDA_BOTH int forward_elements() const { return chunk + row; }
  FUSEDCUDA_BOTH int backward_elements() const { return chunk + side * side; }
  // Shares of the work that threads take.
  FUSEDCUDA_BOTH int forward_tiles() const { return groups * (groups + 1) / 2; }
  FUSEDCUDA_BOTH int backward_tiles() const { return side / step * (kDotChunk / step); }
};

// --- Head

constexpr int kBceThreads = 256;
constexpr int kBceBlocksOfSm = 3;  // what 80 registers a thread leave room for
// Rows whose loads a warp (in the backward, a thread) has in flight: of 16 bytes a thread, 48 KB an
// SM together.
constexpr int kBceRows = 4;

#undef FUSEDCUDA_BOTH

}  // namespace fusedcuda
