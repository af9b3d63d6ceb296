// What walk.cuh does, for tensors without whole aligned vectors: rows of an odd size, storage that
// starts off the boundary, any stride. The templates of walk.cuh are specialised for kVec = 1.
//
// A thread still takes as many elements as fill a vector. It then has the same bytes in flight, 16
// of each tensor, and finds its way, tests accesses and jumps to its activation once for all of
// them: 256 elements of three bf16 tensors take the memory 82 clocks, in which an SM issues 330
// instructions of a warp, where one element a lane and trip would need some 50 for every 32. Which
// elements these are depends on what is written:
//
// - Results that are contiguous over the whole table: neighbours, in a flat walk that goes on from
//   the end of a row in the next one. Results, and all other tensors that are contiguous, move in
//   vectors. The others (a row that repeats, a value per row, storage off the boundary) are loaded
//   element by element, 16 bytes from lane to lane. The L1 merges what they miss, so that the
//   memory sees every sector once; eight such loads cost it about 32 clocks, a vector 4.
// - All else, and everything with sums: elements of one row, as many apart as lanes stand side by
//   side. An access is then 32 neighbours, which cost the L1 one or two clocks. Stores decide it:
//   they are not merged, and with neighbours in a thread each would write two bytes of 16 sectors,
//   every sector eight times.
#pragma once

#include <cstring>
#include <type_traits>

#include "launch.h"
#include "walk.cuh"

namespace fusedcuda {

// Elements that a thread holds of each tensor at a time, in vectors or not.
template <typename T, int kVec>
constexpr int kHeld = kVec > 1 ? kVec : kVectorWidth<T>;

// `count` elements from (row, column) on, `spacing` columns apart: `in_row` of them in that row,
// the others in those behind it. kSpacing is the usual spacing: where it applies, addresses are one
// register and constants.
template <int kTensors, int kSpacing>
struct Span {
  int64_t row;
  int64_t column;
  int spacing;
  int in_row;
  int count;
  Offsets<kTensors> offsets;
};

// How many of kMost elements, `spacing` apart, lie before the end, which is `left` columns away.
template <int kMost>
__device__ __forceinline__ int count_of(int64_t left, int spacing) {
  const int end = left < kMost * spacing ? static_cast<int>(left) : kMost * spacing;
  int count = 0;
#pragma unroll
  for (int j = 0; j < kMost; ++j) count += j * spacing < end;
  return count;
}

// The same for neighbours.
template <int kMost>
__device__ __forceinline__ int count_of(int64_t left) {
  return left < kMost ? static_cast<int>(left) : kMost;
}

// Columns between a thread's elements: the lanes of a warp take neighbours.
__device__ __forceinline__ int spacing_in_row() {
  return blockDim.x < kWarpSize ? blockDim.x : kWarpSize;
}

// The first column of a thread, from the one where its block begins.
template <int kMost>
__device__ __forceinline__ int column_in_block() {
  const int spacing = spacing_in_row();
  return threadIdx.x / spacing * (spacing * kMost) + threadIdx.x % spacing;
}

template <typename T, int kTensors>
class Place<T, 1, kTensors> {
 public:
  __device__ explicit Place(const Table<kTensors>& table) : table_(table) {
    constexpr int kMost = kHeld<T, 1>;
    const int64_t block = static_cast<int64_t>(blockIdx.x) * blockDim.x * kMost;
    if (table.flat) {
      const int64_t index = block + threadIdx.x * kMost;
      const int64_t end = table.rows * table.columns;
      locate_row(index, end);
      span_.spacing = 1;
      span_.count = count_of<kMost>(end - index);
      const int left = count_of<kMost>(table.columns - span_.column);
      span_.in_row = left < span_.count ? left : span_.count;
    } else {
      span_.row =
          (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
      span_.column = block + column_in_block<kMost>();
      span_.spacing = spacing_in_row();
      span_.count = count_of<kMost>(table.columns - span_.column, span_.spacing);
      if (span_.row >= table.rows) span_.count = 0;
      span_.in_row = span_.count;
    }
  }

  __device__ bool exists() const { return span_.count > 0; }
  __device__ const Span<kTensors, 1>& locate() {
    span_.offsets = locate_offsets(table_, span_.row, span_.column);
    return span_;
  }

 private:
  // Row and column of element `index` of a flat walk that ends at `end`.
  __device__ void locate_row(int64_t index, int64_t end) {
    span_.row = 0;
    span_.column = index;
    if (table_.num_dims <= 1) return;
    const Divider& columns = table_.dividers[table_.num_dims - 1];
    if (end >> 32 == 0) {
      uint32_t column;
      span_.row = columns.divide32(static_cast<uint32_t>(index), &column);
      span_.column = column;
    } else {
      span_.row = columns.divide(index, &span_.column);
    }
  }

  const Table<kTensors>& table_;
  Span<kTensors, 1> span_;
};

// A block takes the columns in stretches of what its threads hold. None goes beyond a line, the
// innermost dimension, so that a thread's elements are equally far apart in memory.
template <typename T, int kTensors>
class Walk<T, 1, kTensors> {
 public:
  __device__ explicit Walk(const Table<kTensors>& table) : table_(table) {
    span_.spacing = spacing_in_row();
    span_.row = table.down ? static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y
                           : static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    stretch_ = table.down ? blockIdx.x : blockIdx.y;
    take_stretch();
    span_.offsets = locate_offsets(table, span_.row, span_.column);
  }

  __device__ bool done() const {
    return span_.row >= table_.rows || stretch_ >= table_.num_stretches;
  }
  __device__ const Span<kTensors, kWarpSize>& place() const { return span_; }

  __device__ void advance() {
    if (table_.down) {
      const uint32_t step = gridDim.y * blockDim.y;
      span_.row += step;
      if (table_.simple) {
#pragma unroll
        for (int k = 0; k < kTensors; ++k) {
          span_.offsets.of[k] += static_cast<uint64_t>(step) * table_.row_strides[k];
        }
        return;
      }
    } else {
      stretch_ += gridDim.y;
      take_stretch();
    }
    span_.offsets = locate_offsets(table_, span_.row, span_.column);
  }

  __device__ bool has(int j) const { return j < span_.count; }
  __device__ int64_t row() const { return span_.row; }

  __device__ static int64_t column_of(const Table<kTensors>& table, int c, int* x, int* j) {
    *x = c % blockDim.x;
    *j = c / blockDim.x;
    int64_t in_line;
    const int64_t begin = begin_of(table, blockIdx.x, &in_line);
    return in_line + c < table.line ? begin + c : table.columns;
  }

 private:
  // The first column of a stretch, also within its line.
  __device__ static int64_t begin_of(const Table<kTensors>& table, int64_t stretch,
                                     int64_t* in_line) {
    const int64_t line = table.stretches.divide(stretch, in_line);
    *in_line *= blockDim.x * kHeld<T, 1>;
    return line * table.line + *in_line;
  }

  __device__ void take_stretch() {
    constexpr int kMost = kHeld<T, 1>;
    int64_t in_line;
    const int64_t begin = begin_of(table_, stretch_, &in_line);
    const int column = column_in_block<kMost>();
    span_.column = begin + column;
    span_.count = count_of<kMost>(table_.line - in_line - column, span_.spacing);
    span_.in_row = span_.count;
  }

  const Table<kTensors>& table_;
  int64_t stretch_;
  Span<kTensors, kWarpSize> span_;
};

// What was loaded of a tensor: a vector in the first words, or one element a word. So a register
// gets its value from one load on either path, and nothing waits for a load before all are issued.
template <typename T>
struct Loaded<T, 1> {
  using Word = std::conditional_t<sizeof(T) == 2, uint32_t, T>;
  static constexpr int kWordsInVector = kVectorBytes / static_cast<int>(sizeof(Word));
  Word words[kHeld<T, 1>];

  __device__ void load_vector(const T* data) {
    const auto vector =
        fusedcuda::load_vector<Word, kWordsInVector>(reinterpret_cast<const Word*>(data));
#pragma unroll
    for (int i = 0; i < kWordsInVector; ++i) words[i] = vector.values[i];
  }

  __device__ void load_element(int j, const T* data) {
    if constexpr (sizeof(T) == 2) {
      words[j] = *reinterpret_cast<const uint16_t*>(data);
    } else {
      words[j] = *data;
    }
  }

  __device__ T element(int j, bool in_vector) const {
    if constexpr (sizeof(T) == 2) {
      const uint16_t bits =
          static_cast<uint16_t>(in_vector ? words[j / 2] >> (j % 2 * 16) : words[j]);
      T value;
      std::memcpy(&value, &bits, sizeof(value));
      return value;
    } else {
      return words[j];
    }
  }
};

// Whether the elements of tensor k are one aligned vector; only neighbours can be.
template <typename T, int kTensors, int kSpacing>
__device__ __forceinline__ bool in_vector(const Table<kTensors>& table, int k,
                                          const Span<kTensors, kSpacing>& span) {
  constexpr bool kPossible = kSpacing == 1 && kHeld<T, 1> > 1;
  return kPossible && table.access[k] == Access::kVector && span.count == kHeld<T, 1>;
}

// Calls visit(j, pointer) for elements [begin, end) of tensor k, which lie in one row, the first of
// them at `offset`.
template <typename T, int kTensors, int kSpacing, typename Visit>
__device__ __forceinline__ void visit_elements(const Table<kTensors>& table, int k,
                                               const Span<kTensors, kSpacing>& span, int begin,
                                               int end, int64_t offset, Visit visit) {
  T* data = static_cast<T*>(table.data[k]) + offset;
  const int64_t step = span.spacing * table.steps[k];
#pragma unroll
  for (int j = 0; j < kHeld<T, 1>; ++j) {
    if (j >= begin && j < end) visit(j, data + (j - begin) * step);
  }
}

// All elements of tensor k that lie in the row where the span begins.
template <typename T, int kTensors, int kSpacing, typename Visit>
__device__ __forceinline__ void visit_first_row(const Table<kTensors>& table, int k,
                                                const Span<kTensors, kSpacing>& span,
                                                int64_t offset, Visit visit) {
  if (table.access[k] == Access::kUnaligned && span.spacing == kSpacing &&
      span.in_row == kHeld<T, 1>) {
    T* data = static_cast<T*>(table.data[k]) + offset;
#pragma unroll
    for (int j = 0; j < kHeld<T, 1>; ++j) visit(j, data + j * kSpacing);
    return;
  }
  // What moves in vectors goes on from row to row; here it is the end of the table.
  const int end = table.access[k] == Access::kVector ? span.count : span.in_row;
  visit_elements<T>(table, k, span, 0, end, offset, visit);
}

template <typename T, int kVec, int kInputs, int kTensors, int kSpacing>
__device__ __forceinline__ void load(const Table<kTensors>& table,
                                     const Span<kTensors, kSpacing>& span,
                                     Loaded<T, kVec> (&loaded)[kInputs]) {
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    if (table.access[k] == Access::kNumber) continue;
    if (in_vector<T>(table, k, span)) {
      loaded[k].load_vector(static_cast<const T*>(table.data[k]) + span.offsets.of[k]);
    } else {
      visit_first_row<T>(table, k, span, span.offsets.of[k],
                         [&](int j, const T* data) { loaded[k].load_element(j, data); });
    }
  }
  if constexpr (kSpacing == 1) {
    int64_t row = span.row;
#pragma unroll 1
    for (int begin = span.in_row; begin < span.count;) {
      const bool is_last = span.count - begin <= table.columns;
      const int end = is_last ? span.count : begin + static_cast<int>(table.columns);
      const Offsets<kTensors> offsets = locate_offsets(table, ++row, 0);
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        if (table.access[k] < Access::kUnaligned) continue;
        visit_elements<T>(table, k, span, begin, end, offsets.of[k],
                          [&](int j, const T* data) { loaded[k].load_element(j, data); });
      }
      begin = end;
    }
  }
}

template <typename T, int kVec, int kTensors, int kSpacing>
__device__ __forceinline__ void values_of(const Table<kTensors>& table, int k,
                                          const Span<kTensors, kSpacing>& span,
                                          const Loaded<T, kVec>& loaded,
                                          Compute<T> (&x)[kHeld<T, kVec>]) {
  if (table.access[k] == Access::kNumber) {
#pragma unroll
    for (int j = 0; j < kHeld<T, kVec>; ++j) x[j] = static_cast<Compute<T>>(table.number[k]);
    return;
  }
  const bool vector = in_vector<T>(table, k, span);
#pragma unroll
  for (int j = 0; j < kHeld<T, kVec>; ++j) x[j] = to_compute(loaded.element(j, vector));
}

template <typename T, int kVec, int kTensors, int kSpacing>
__device__ __forceinline__ void store(const Table<kTensors>& table, int k,
                                      const Span<kTensors, kSpacing>& span,
                                      const Compute<T> (&x)[kHeld<T, kVec>]) {
  if (table.access[k] == Access::kAbsent) return;
  const int64_t offset = span.offsets.of[k];
  if (in_vector<T>(table, k, span)) {
    store_vector<T, kHeld<T, 1>>(static_cast<T*>(table.data[k]) + offset, pack<T, kHeld<T, 1>>(x));
    return;
  }
  const auto store_element = [&](int j, T* data) { *data = from_compute<T>(x[j]); };
  if constexpr (kSpacing == 1) {  // neighbours are stored one by one only at the end of the table
    visit_elements<T>(table, k, span, 0, span.count, offset, store_element);
  } else {
    visit_first_row<T>(table, k, span, offset, store_element);
  }
}

}  // namespace fusedcuda
