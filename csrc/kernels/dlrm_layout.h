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

// Products of the pairs of a sample's vectors.
FUSEDCUDA_BOTH constexpr int dot_products(int vectors) { return vectors * (vectors - 1) / 2; }

// Elements of an output row in front of its padding: the dense vector and the products.
FUSEDCUDA_BOTH constexpr int dot_row_elements(int vectors, int columns) {
  return columns + dot_products(vectors);
}

// --- Interaction on tensor cores

constexpr int kDotWarps = 4;  // the most in a block; each has samples of its own
// Tiles of 16 vectors that the kernels are made for.
constexpr int kFewDotTiles = 2;
constexpr int kManyDotTiles = 4;
// Blocks of kDotWarps warps that share an SM, as far as registers go: 80 a thread with few tiles,
// 168 with many.
constexpr int kFewTilesBlocks = 6;
constexpr int kManyTilesBlocks = 3;
// Samples of a warp that are in shared memory: one that is worked on, the others on their way.
// 65536 x 27 x 16 forward takes 36.2 us with one, 38.5 with two: while some warps wait, the others
// compute.
constexpr int kDotStages = 1;

// From vector to vector in shared memory: an odd number of 16-byte pieces, so that the same piece
// of eight neighbours lies in all 32 banks.
FUSEDCUDA_BOTH constexpr int dot_pitch(int columns) { return round_up(columns, 16) + 8; }

// In elements of 2 bytes.
struct DotLayout {
  int pitch;
  int vectors;   // of a sample
  int row;       // of the output, or of the incoming gradient
  int stages;    // of a warp
  int triangle;  // of a warp, backward: a square with the products' gradients below its diagonal
  int places;    // of a block, backward: where in the square each of them is

  // All columns that are multiplied can be read from a row, too.
  FUSEDCUDA_BOTH DotLayout(const DotVectors& p, int tiles, int stages)
      : pitch(dot_pitch(p.columns)),
        vectors(p.vectors * pitch),
        row(round_up(p.width > pitch ? p.width : pitch, 8)),
        stages(stages),
        triangle(16 * tiles * side(tiles)),
        places(round_up(dot_products(p.vectors), 8)) {}

  // From row to row of the square; odd like the pitch.
  FUSEDCUDA_BOTH static constexpr int side(int tiles) { return 16 * tiles + 8; }

  // Of a warp: a row that is being written, and the stages.
  FUSEDCUDA_BOTH int forward_elements() const { return row + stages * vectors; }
  // In the backward each stage has a row.
  FUSEDCUDA_BOTH int backward_elements() const { return triangle + stages * (vectors + row); }

  size_t block_bytes(bool is_backward, int64_t warps) const {
    return 2 * (is_backward ? places + warps * backward_elements() : warps * forward_elements());
  }
};

// Lanes of a warp that share a vector, a piece of so many elements each.
FUSEDCUDA_BOTH constexpr int dot_lanes_of_vector(int columns, int piece) {
  return columns / piece < kWarpSize ? columns / piece : kWarpSize;
}

FUSEDCUDA_BOTH inline int bytes_of_index(const EmbeddingLookup& lookup) {
  return lookup.is_int32 ? 4 : 8;
}

// What addresses advance by in the kernels. They take it as a parameter: an instruction can add a
// parameter without a register for it.
struct DotSteps {
  // Samples that every warp has, and those left over, one each for the first warps.
  int rounds, rest;
  // From one of a warp's samples to its next one, in bytes of each tensor; `row` is that of the
  // output, or of the incoming gradient.
  int64_t dense, embeddings, indices, row, dense_grad, embeddings_grad;
  int apart;  // vectors from one of a lane's pieces to the next one
  // The same in bytes, of the embeddings.
  int64_t piece, piece_grad, piece_shared;

  DotSteps(const DotVectors& p, int64_t row_stride, int elements_of_piece, int64_t warps) {
    constexpr int64_t kBytes = 2;
    rounds = static_cast<int>(p.batch / warps);
    rest = static_cast<int>(p.batch % warps);
    dense = kBytes * warps * p.dense_stride;
    embeddings = kBytes * warps * p.sample_stride;
    indices = bytes_of_index(p.lookup) * warps * p.lookup.sample_stride;
    row = kBytes * warps * row_stride;
    dense_grad = kBytes * warps * p.columns;
    embeddings_grad = kBytes * warps * (p.vectors - 1) * p.columns;
    apart = kWarpSize / dot_lanes_of_vector(p.columns, elements_of_piece);
    piece = kBytes * apart * p.vector_stride;
    piece_grad = kBytes * apart * p.columns;
    piece_shared = kBytes * apart * dot_pitch(p.columns);
  }
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
// Rows whose loads a warp has in flight: of 16 bytes a thread, 48 KB an SM together.
constexpr int kBceRows = 4;

#undef FUSEDCUDA_BOTH

}  // namespace fusedcuda
