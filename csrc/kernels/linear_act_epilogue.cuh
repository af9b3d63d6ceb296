// What becomes of the sums of a matrix product: bias, activation, one rounding, and what the
// gradient needs of them. 64 x 64 elements at a time go through shared memory, from where the copy
// engine stores them in whole lines while the threads work on the next.
#pragma once

#include "common/activation.cuh"
#include "common/convert.cuh"
#include "common/hopper_gemm.cuh"
#include "linear_act.h"

namespace fusedcuda {

constexpr int kChunk = 64;  // rows and columns
constexpr int kChunkPairs =
    kChunk * kChunk / 2 / kWarpgroup;  // of neighbouring columns, a thread's
static_assert(kGemmBufferBytes == kChunk * kSwizzleBytes);

// A warpgroup's chunks on their way to memory. The values of a thread come in the order of its sums
// (wgmma.cuh), two columns in a word. One or two chunks are written and then sent together: a
// fence and a meeting of the threads for each such round. While the copy engine reads the buffers
// of one round, the threads write to those of the next.
template <int kBuffers>
class ChunkStore {
 public:
  static constexpr int kRound = kBuffers / 2;  // chunks
  static_assert(kRound == 1 || kRound == 2);

  // `barrier`: a named one that is the warpgroup's own.
  __device__ __forceinline__ ChunkStore(unsigned char* buffers, int barrier)
      : buffers_(buffers), barrier_(barrier) {}

  __device__ __forceinline__ void write(const uint32_t (&pairs)[kChunkPairs], int slot) {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % kWarpSize;
    const int own_row = thread / kWarpSize * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kChunkPairs; i += 4) {
      // Two groups of eight columns, of 16 rows: lanes 16 to 31 have the places of the second.
      const int group = i / 2 + lane / 16;
      unsigned char* const place =
          buffer(slot) + own_row * kSwizzleBytes + ((group ^ (own_row % 8)) * 16);
      const uint32_t four[4] = {pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]};
      store_matrices(place, four);
    }
  }

  // start(send): send(map, slot, row, column) for every chunk of the round.
  template <typename F>
  __device__ __forceinline__ void send_round(F start) {
    const bool is_first = threadIdx.x % kWarpgroup == 0;
    fence_shared_for_copies();
    // The round before this one has left the buffers of the next.
    if (is_first) wait_for_stores_to_read<0>();
    named_barrier(barrier_, kWarpgroup);
    if (is_first) {
      start([&](const TensorMap& map, int slot, int row, int column) {
        store_box(&map, buffer(slot), row, column);
      });
      commit_stores();
    }
    round_ ^= 1;
  }

 private:
  __device__ __forceinline__ unsigned char* buffer(int slot) const {
    return buffers_ + (round_ * kRound + slot) * kGemmBufferBytes;
  }

  unsigned char* buffers_;
  int barrier_;
  int round_ = 0;
};

// One bit a value, set unless the value is negative or zero, for 64 x 64 of them: a thread has two
// bits of each byte, the four threads of a quad have a row's bytes together.
template <int kCount>
__device__ __forceinline__ void store_mask(const float (&values)[kCount], uint8_t* mask,
                                           int64_t row_bytes, int row, int column, int rows,
                                           int columns) {
  static_assert(kCount == 2 * kChunkPairs);
  const int quad_lane = static_cast<int>(threadIdx.x) % 4;
  // Four bytes of the upper row, the next four, and the same of the lower row.
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int group = i / 4, lower = i / 2 % 2, second = i % 2;
    const uint32_t bit = values[i] <= 0.0f ? 0 : 1;
    words[2 * lower + group / 4] |= bit << (8 * (group % 4) + 2 * quad_lane + second);
  }
  // Each of the four ends with the word that has its own number.
  uint32_t kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool upper_half = quad_lane >= 2;
    const uint32_t given = upper_half ? words[i] : words[2 + i];
    kept[i] = (upper_half ? words[2 + i] : words[i]) | __shfl_xor_sync(0xffffffff, given, 2);
  }
  const bool odd = quad_lane % 2 != 0;
  const uint32_t word =
      (odd ? kept[1] : kept[0]) | __shfl_xor_sync(0xffffffff, odd ? kept[0] : kept[1], 1);
  const int at_row = row + wgmma_row_of_thread() + quad_lane / 2 * 8;
  const int at_column = column + quad_lane % 2 * 32;
  if (at_row < rows && at_column < columns)
    *reinterpret_cast<uint32_t*>(mask + at_row * row_bytes + at_column / 8) = word;
}

// The part of an epilogue that stores chunks of what it makes of the sums.
template <typename Gemm>
class ChunkEpilogue {
 public:
  static constexpr bool kSumsRows = false;

  __device__ __forceinline__ void prepare(int /*column*/) const {}
  __device__ __forceinline__ void store_row_sums(const typename Gemm::Sums&, int, int) const {}

 protected:
  using T = typename Gemm::Element;
  static constexpr int kValues = 2 * kChunkPairs;  // of a chunk, a thread's

  __device__ __forceinline__ ChunkEpilogue(int warpgroup, const GemmShared<Gemm>& shared)
      : barrier_(1 + warpgroup), chunks_(shared.buffers(warpgroup), barrier_) {}

  // Chunks that lie in the result, `kTogether` of a row at a time:
  //   f(values, row, column, c, i) for the i-th of them; c: its column in the tile
  //   done(row, column) behind them, with the place of the first
  // kUnrolled: every chunk has code of its own. Else there is one piece of code for all, and the
  // sums move up in their registers: a few hundred moves for a tile, but a quarter of the
  // instructions (to fetch, and to compile).
  template <bool kUnrolled, int kTogether, typename F, typename Done>
  static __device__ __forceinline__ void for_chunks(typename Gemm::Sums* sums, int row, int column,
                                                    int rows, int columns, F f, Done done) {
    constexpr int kOfRow = Gemm::kTileColumns / kChunk, kCount = Gemm::kHalves * kOfRow;
    static_assert(kOfRow % kTogether == 0);
    auto chunks_from = [&](int chunk) {
      const int c = chunk % kOfRow * kChunk;
      const int at_row = row + chunk / kOfRow * kWgmmaRows, at_column = column + c;
      const bool is_inside = at_row < rows && at_column < columns;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        float values[kValues];
        take_chunk<kUnrolled>(sums, chunk + i, values);
        // (Beyond the last column the copy engine stores nothing.)
        if (is_inside) f(values, at_row, at_column + i * kChunk, c + i * kChunk, i);
      }
      if (is_inside) done(at_row, at_column);
    };
    if constexpr (kUnrolled) {
#pragma unroll
      for (int chunk = 0; chunk < kCount; chunk += kTogether) chunks_from(chunk);
    } else {
#pragma unroll 1
      for (int chunk = 0; chunk < kCount; chunk += kTogether) chunks_from(chunk);
    }
  }

  // The sums of a chunk: in their place, or those of the first, to whose place the others move up.
  template <bool kInPlace>
  static __device__ __forceinline__ void take_chunk(typename Gemm::Sums* sums, int chunk,
                                                    float (&values)[kValues]) {
    constexpr int kOfHalf = Gemm::kSums, kAll = Gemm::kHalves * kOfHalf;
    const int from = kInPlace ? chunk * kValues : 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      values[i] = sums->values[(from + i) / kOfHalf][(from + i) % kOfHalf];
    if constexpr (!kInPlace) {
#pragma unroll
      for (int i = 0; i + kValues < kAll; ++i) {
        const int next = i + kValues;
        sums->values[i / kOfHalf][i % kOfHalf] = sums->values[next / kOfHalf][next % kOfHalf];
      }
    }
  }

  __device__ __forceinline__ void write(const float (&values)[kValues], int slot) {
    uint32_t pairs[kChunkPairs];
#pragma unroll
    for (int i = 0; i < kChunkPairs; ++i) pairs[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
    chunks_.write(pairs, slot);
  }

  // Sends what a round has of one matrix.
  template <int kTogether>
  __device__ __forceinline__ void send(const TensorMap& map, int row, int column) {
    chunks_.send_round([&](auto send) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) send(map, i, row, column + i * kChunk);
    });
  }

  // Chunks of a row that are sent together.
  static constexpr int kTogether =
      Gemm::kTileColumns / kChunk % 2 == 0 ? ChunkStore<Gemm::kNumBuffers>::kRound : 1;

  int barrier_;  // of the warpgroup
  ChunkStore<Gemm::kNumBuffers> chunks_;
};

// The sums as they are.
struct PlainEpilogueParams {
  TensorMap output;
  int m = 0, n = 0;
};

template <typename Gemm>
class PlainEpilogue : public ChunkEpilogue<Gemm> {
 public:
  using Params = PlainEpilogueParams;
  using ChunkEpilogue<Gemm>::kTogether;

  __device__ __forceinline__ PlainEpilogue(const Params& params, int warpgroup,
                                           const GemmShared<Gemm>& shared)
      : ChunkEpilogue<Gemm>(warpgroup, shared), params_(params) {}

  __device__ __forceinline__ void finish(typename Gemm::Sums* sums, int row, int column,
                                         int /*split*/) {
    this->template for_chunks<true, kTogether>(
        sums, row, column, params_.m, params_.n,
        [&](const auto& values, int, int, int, int i) { this->write(values, i); },
        [&](int at_row, int at_column) {
          this->template send<kTogether>(params_.output, at_row, at_column);
        });
  }

 private:
  const Params& params_;
};

// Values and derivatives of an activation; one type for each piece of code that there is.
template <Activation kActivation>
struct FixedActivation {
  static constexpr bool kIsLinear = kActivation == Activation::kNone;
  static constexpr bool kIsRelu = kActivation == Activation::kRelu;

  template <int kCount>
  __device__ __forceinline__ void operator()(const float (&z)[kCount], float (&y)[kCount],
                                             float (&derivative)[kCount]) const {
    float ones[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) ones[i] = 1.0f;
    activate<true>(kActivation, z, ones, y, derivative);
  }
};

// In the time of an epilogue every instruction counts, other than in a kernel that waits for
// memory: the constants of activation.cuh's formula are multiplied together.
struct GeluTanhActivation {
  static constexpr bool kIsLinear = false, kIsRelu = false;

  template <int kCount>
  __device__ __forceinline__ void operator()(const float (&z)[kCount], float (&y)[kCount],
                                             float (&derivative)[kCount]) const {
    constexpr float kScale = static_cast<float>(2 * kGeluAlpha);
    constexpr float kSlope = static_cast<float>(6 * kGeluAlpha * kGeluBeta);
    constexpr float kExponent = static_cast<float>(-2 * kGeluAlpha * 1.44269504088896340736);
    constexpr float kCubic =
        static_cast<float>(-2 * kGeluAlpha * 1.44269504088896340736 * kGeluBeta);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float square = z[i] * z[i];
      const float q = approximate_exp2(z[i] * (kExponent + kCubic * square));
      const float s = approximate_reciprocal(1.0f + q);
      y[i] = z[i] * s;
      derivative[i] = s + y[i] * (1.0f - s) * (kScale + kSlope * square);
    }
  }
};

struct SigmoidActivation {
  static constexpr bool kIsLinear = false, kIsRelu = false;
  Activation activation;

  template <int kCount>
  __device__ __forceinline__ void operator()(const float (&z)[kCount], float (&y)[kCount],
                                             float (&derivative)[kCount]) const {
    float ones[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) ones[i] = 1.0f;
    activate_by_sigmoid<true>(activation, z, ones, y, derivative);
  }
};

template <typename F>
__device__ __forceinline__ void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kNone:
      return f(FixedActivation<Activation::kNone>());
    case Activation::kRelu:
      return f(FixedActivation<Activation::kRelu>());
    case Activation::kReluSquared:
      return f(FixedActivation<Activation::kReluSquared>());
    case Activation::kTanh:
      return f(FixedActivation<Activation::kTanh>());
    case Activation::kGelu:
      return f(FixedActivation<Activation::kGelu>());
    case Activation::kGeluTanh:
      return f(GeluTanhActivation());
    case Activation::kSigmoid:
    case Activation::kSilu:
      return f(SigmoidActivation{activation});
  }
}

// act(sums + bias), and what its gradient needs: a mask of a ReLU, the derivative of another
// activation.
struct LinearActEpilogueParams {
  TensorMap output;
  SavedForBackward saves = SavedForBackward::kNone;
  TensorMap saved;  // the derivative
  uint8_t* mask = nullptr;
  int64_t mask_stride = 0;  // bytes
  const void* bias = nullptr;
  Activation activation = Activation::kNone;
  int m = 0, n = 0;
};

template <typename Gemm>
class LinearActEpilogue : public ChunkEpilogue<Gemm> {
 public:
  using Base = ChunkEpilogue<Gemm>;
  using Params = LinearActEpilogueParams;
  using typename Base::T;

  __device__ __forceinline__ LinearActEpilogue(const Params& params, int warpgroup,
                                               const GemmShared<Gemm>& shared)
      : Base(warpgroup, shared), params_(params), bias_(shared.bias(warpgroup)) {}

  // Fetches the bias, which arrives while the products are computed.
  __device__ __forceinline__ void prepare(int column) {
    if (params_.bias == nullptr) return;
    const T* const bias = static_cast<const T*>(params_.bias);
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      const int at = column + own_bias(i);
      fetched_[i] = own_bias(i) < Gemm::kTileColumns && at < params_.n ? bias[at] : T();
    }
  }

  __device__ __forceinline__ void finish(typename Gemm::Sums* sums, int row, int column,
                                         int /*split*/) {
    if (params_.bias != nullptr) {
      // All threads have read that of the last tile: they met when its last chunk was stored.
#pragma unroll
      for (int i = 0; i < kBiases; ++i) {
        if (own_bias(i) < Gemm::kTileColumns) bias_[own_bias(i)] = to_compute(fetched_[i]);
      }
      named_barrier(this->barrier_, kWarpgroup);
    }
    const bool saves = params_.saves != SavedForBackward::kNone;
    // The choice is made once for all chunks, so that they have no branches.
    with_activation(params_.activation, [&](auto act) {
      if (decltype(act)::kIsLinear || !saves) {
        write_all<false>(act, sums, row, column);
      } else {
        write_all<true>(act, sums, row, column);
      }
    });
  }

 private:
  using Base::kValues;

  static __device__ __forceinline__ void add_bias(float (&z)[kValues], const float* values) {
    const int quad_lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int group = 0; group < kChunk / 8; ++group) {
      const float2 pair = *reinterpret_cast<const float2*>(values + 8 * group + 2 * quad_lane);
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        z[4 * group + 2 * lower] += pair.x;
        z[4 * group + 2 * lower + 1] += pair.y;
      }
    }
  }

  template <bool kSaves, typename Act>
  __device__ __forceinline__ void write_all(const Act& act, typename Gemm::Sums* sums, int row,
                                            int column) {
    constexpr bool kIsShort = Act::kIsLinear || Act::kIsRelu;
    constexpr bool kSavesDerivative = kSaves && !Act::kIsRelu;
    constexpr int kChunks = kSavesDerivative ? 1 : Base::kTogether;
    this->template for_chunks<kIsShort, kChunks>(
        sums, row, column, params_.m, params_.n,
        [&](auto& z, int at_row, int at_column, int c, int i) {
          if (params_.bias != nullptr) add_bias(z, bias_ + c);
          write_chunk<kSaves>(act, z, at_row, at_column, i);
        },
        [&](int at_row, int at_column) {
          if constexpr (!kSavesDerivative) {
            this->template send<kChunks>(params_.output, at_row, at_column);
          } else if constexpr (kIsRoundOfTwo) {
            this->chunks_.send_round([&](auto send) {
              send(params_.output, 0, at_row, at_column);
              send(params_.saved, 1, at_row, at_column);
            });
          } else {
            this->template send<1>(params_.output, at_row, at_column);
          }
        });
  }

  // `slot`: of y.
  template <bool kSaves, typename Act>
  __device__ __forceinline__ void write_chunk(const Act& act, float (&z)[kValues], int row,
                                              int column, int slot) {
    uint32_t y_pairs[kChunkPairs], derivative_pairs[kChunkPairs];
    // A part at a time: values and derivatives of a whole chunk would not fit beside the sums.
    constexpr int kPart = kValues / 4;
#pragma unroll
    for (int first = 0; first < kValues; first += kPart) {
      float part[kPart], y[kPart], derivative[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) part[i] = z[first + i];
      act(part, y, derivative);
#pragma unroll
      for (int i = 0; i < kPart; i += 2) {
        y_pairs[(first + i) / 2] = pack_pair<T>(y[i], y[i + 1]);
        derivative_pairs[(first + i) / 2] = pack_pair<T>(derivative[i], derivative[i + 1]);
      }
    }
    if constexpr (kSaves && Act::kIsRelu) {
      store_mask(z, params_.mask, params_.mask_stride, row, column, params_.m, params_.n);
    } else if constexpr (kSaves && kIsRoundOfTwo) {
      this->chunks_.write(derivative_pairs, 1);
    } else if constexpr (kSaves) {
      this->chunks_.write(derivative_pairs, 0);
      this->template send<1>(params_.saved, row, column);
    }
    this->chunks_.write(y_pairs, slot);
  }

  static constexpr bool kIsRoundOfTwo = ChunkStore<Gemm::kNumBuffers>::kRound == 2;

  // A thread fetches so many biases of a tile, a warpgroup apart.
  static constexpr int kBiases = (Gemm::kTileColumns + kWarpgroup - 1) / kWarpgroup;
  static __device__ __forceinline__ int own_bias(int i) {
    return static_cast<int>(threadIdx.x) % kWarpgroup + i * kWarpgroup;
  }

  const Params& params_;
  float* bias_;         // of the tile
  T fetched_[kBiases];  // of the next one
};

// What a part of k gives, in float32, for sum_partials.cuh: values[split][row][column], and the
// sums of a's rows, row_sums[split][row]. Or, where there is one part, the result.
struct PartialsEpilogueParams {
  float* values = nullptr;
  float* row_sums = nullptr;                       // or null
  int64_t values_stride = 0, row_sums_stride = 0;  // between splits
  void* output = nullptr;                          // contiguous; instead of `values`
  void* row_sums_output = nullptr;                 // or null
  int m = 0, n = 0;                                // rows and columns
};

template <typename Gemm>
class PartialsEpilogue {
 public:
  using Params = PartialsEpilogueParams;
  using T = typename Gemm::Element;
  static constexpr bool kSumsRows = true;

  __device__ __forceinline__ PartialsEpilogue(const Params& params, int /*warpgroup*/,
                                              const GemmShared<Gemm>& /*shared*/)
      : params_(params) {}

  __device__ __forceinline__ void prepare(int /*column*/) const {}

  __device__ __forceinline__ void store_row_sums(const typename Gemm::Sums& sums, int row,
                                                 int split) const {
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < Gemm::kHalves; ++h) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int at = row + wgmma_row_of_thread() + h * kWgmmaRows + 8 * lower;
        if (at >= params_.m) continue;
        const float sum = sums.of_rows[h][2 * lower];
        if (params_.row_sums != nullptr)
          params_.row_sums[split * params_.row_sums_stride + at] = sum;
        if (params_.row_sums_output != nullptr)
          static_cast<T*>(params_.row_sums_output)[at] = from_compute<T>(sum);
      }
    }
  }

  __device__ __forceinline__ void finish(const typename Gemm::Sums* sums, int row, int column,
                                         int split) const {
    if (params_.output != nullptr) {
      store(sums, static_cast<T*>(params_.output), row, column);
    } else {
      store(sums, params_.values + split * params_.values_stride, row, column);
    }
  }

 private:
  template <typename Element>
  __device__ __forceinline__ void store(const typename Gemm::Sums* sums, Element* to, int row,
                                        int column) const {
    const int quad_lane = static_cast<int>(threadIdx.x) % 4;
    const int own_row = row + wgmma_row_of_thread();
    const bool pairs = params_.n % 2 == 0;  // and aligned
#pragma unroll
    for (int h = 0; h < Gemm::kHalves; ++h) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int at = own_row + h * kWgmmaRows + 8 * lower;
        if (at >= params_.m) continue;
        Element* const values = to + int64_t{at} * params_.n;
#pragma unroll
        for (int group = 0; group < Gemm::kTileColumns / 8; ++group) {
          const float first = sums->values[h][4 * group + 2 * lower];
          const float second = sums->values[h][4 * group + 2 * lower + 1];
          const int at_column = column + 8 * group + 2 * quad_lane;
          if (pairs) {
            if (at_column < params_.n) store_pair(values + at_column, first, second);
          } else {
            if (at_column < params_.n) values[at_column] = from_compute<Element>(first);
            if (at_column + 1 < params_.n) values[at_column + 1] = from_compute<Element>(second);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void store_pair(float* to, float first, float second) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  }
  static __device__ __forceinline__ void store_pair(T* to, float first, float second) {
    *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(first, second);
  }

  const Params& params_;
};

}  // namespace fusedcuda
