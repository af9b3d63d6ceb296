// Rows that stream through shared memory: persistent blocks take one set of rows after the other,
// while the next sets are on their way by asynchronous copies. So the memory stays busy while a
// block reduces and stores, and a block has as many bytes in flight as shared memory holds.
//
// A thread works on the same columns of every row: vectors blockDim.x apart, which is what keeps
// sums over the rows, or parameters, in place. blockDim.y rows share a block, or the blocks of a
// cluster a row: then each has a contiguous part of the columns.
//
// kAligned: every vector of every tensor is whole and aligned. A thread copies what it will read
// itself, and no barrier is needed. Otherwise the aligned 16-byte pieces that cover the row are
// copied, and a thread cuts its vectors out of them, word by word; results take the same way back,
// so that global memory sees only 16-byte accesses. That takes four barriers a row.
#pragma once

#include "async_copy.cuh"
#include "row.cuh"

namespace fusedcuda {

template <typename T, int kItems, bool kAligned>
class RowPipeline {
 public:
  static constexpr int kVec = kVectorWidth<T>;
  static constexpr bool kIsAligned = kAligned;
  using V = Packed<T>;

  // 16-byte slots of a row of one tensor: one a vector and, unaligned, one more.
  __device__ static int slots_of_row() { return kItems * blockDim.x + (kAligned ? 0 : 1); }

  // `memory`: `stages` times `tensors` times blockDim.y rows.
  __device__ RowPipeline(void* memory, int stages, int tensors, int columns,
                         unsigned cluster_rank)
      : memory_(static_cast<V*>(memory)), stages_(stages), tensors_(tensors) {
    first_ = static_cast<int>(cluster_rank * kItems * blockDim.x) * kVec;
    length_ = min(max(columns - first_, 0), kItems * static_cast<int>(blockDim.x) * kVec);
  }

  // The first column of this block's part, and how many there are.
  __device__ int first() const { return first_; }
  __device__ int length() const { return length_; }
  // Of element j of vector i, within the part.
  __device__ int column(int i, int j = 0) const {
    return (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVec + j;
  }
  __device__ bool has(int i, int j = 0) const { return column(i, j) < length_; }
  __device__ bool has_all(int i) const { return has(i, kAligned ? 0 : kVec - 1); }

  // Starts the copy of a row of `matrix` to the present stage.
  __device__ void fetch(int tensor, const RowMatrix& matrix, int64_t row) {
    const T* source = row_of<T>(matrix, row) + first_;
    V* slots = slots_of(tensor);
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (has(i)) copy_async_16(slots + slot(i), source + column(i));
      }
      return;
    }
    source -= shift_of(source);
#pragma unroll 1
    for (int i = 0; i <= kItems; ++i) {
      if (i < kItems || threadIdx.x == 0) fetch_piece(matrix, row, source, slots, slot(i));
    }
  }
  __device__ void commit() { copy_async_commit(); }

  // Until the present stage, for which one group was committed among the last stages_, is there.
  __device__ void wait() const {
    switch (stages_) {
      case 1:
        copy_async_wait<0>();
        break;
      case 2:
        copy_async_wait<1>();
        break;
      case 3:
        copy_async_wait<2>();
        break;
      default:
        copy_async_wait<3>();
        break;
    }
    synchronize();
  }
  __device__ void advance() { stage_ = stage_ + 1 < stages_ ? stage_ + 1 : 0; }

  // Between the threads of the block, where they read what others have copied.
  __device__ void synchronize() const {
    if constexpr (!kAligned) __syncthreads();
  }

  // Vector i of a row that has arrived; `shift` is shift_of() its source. Elements beyond the row
  // are 0.
  __device__ V read(int tensor, int i, int shift) const {
    const V* slots = slots_of(tensor);
    if constexpr (kAligned) {
      if (has(i)) return slots[slot(i)];
      return zeros();
    } else {
      if (!has(i)) return zeros();
      const int element = column(i) + shift;
      const uint32_t* words = slots->words + element * static_cast<int>(sizeof(T)) / 4;
      const int half = sizeof(T) == 2 ? element % 2 * 16 : 0;
      V v;
      uint32_t low = words[0];
#pragma unroll
      for (int k = 0; k < V::kWords; ++k) {
        // The last is not read where it would lie beyond the slots.
        const uint32_t high = k + 1 < V::kWords || half != 0 ? words[k + 1] : 0;
        v.words[k] = static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> half);
        low = high;
      }
      if (!has(i, kVec - 1)) {
        Vector<T, kVec> elements = v;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if (!has(i, j)) elements.values[j] = from_compute<T>(0);
        }
        v = elements;
      }
      return v;
    }
  }

  // Elements between the aligned address at or below `row` + first() and that.
  __device__ static int shift_of(const T* part) {
    if constexpr (kAligned) return 0;
    return static_cast<int>(reinterpret_cast<uintptr_t>(part) / sizeof(T) % kVec);
  }
  __device__ int shift_of(const RowMatrix& matrix, int64_t row) const {
    return shift_of(row_of<T>(matrix, row) + first_);
  }

  // Vector i of a result. Unaligned: on its way through the slots of `tensor`, which nobody reads
  // any more; flush() takes it to memory.
  __device__ void write(int tensor, const RowMatrix& matrix, int64_t row, int i,
                        const V& v) const {
    T* part = row_of<T>(matrix, row) + first_;
    if constexpr (kAligned) {
      if (has(i)) store_packed(part + column(i), v);
    } else {
      T* elements = reinterpret_cast<T*>(slots_of(tensor)) + shift_of(part) + column(i);
      const Vector<T, kVec> values = v;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (has(i, j)) elements[j] = values.values[j];
      }
    }
  }

  // Behind a synchronize() after the last write().
  __device__ void flush(int tensor, const RowMatrix& matrix, int64_t row) const {
    if constexpr (!kAligned) {
      T* part = row_of<T>(matrix, row) + first_;
      const int shift = shift_of(part);
#pragma unroll 1
      for (int i = 0; i <= kItems; ++i) {
        if (i == kItems && threadIdx.x > 0) break;
        const int column = slot(i) * kVec - shift;  // of the piece
        const V& piece = slots_of(tensor)[slot(i)];
        if (column >= 0 && column + kVec <= length_) {
          store_packed(part + column, piece);
        } else {
          const T* elements = reinterpret_cast<const T*>(&piece);
          for (int j = max(-column, 0); j < kVec && column + j < length_; ++j) {
            part[column + j] = elements[j];
          }
        }
      }
    }
  }

 private:
  __device__ int slot(int i) const {
    return i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  }
  __device__ V* slots_of(int tensor) const {
    return memory_ +
           ((stage_ * tensors_ + tensor) * static_cast<int>(blockDim.y) +
            static_cast<int>(threadIdx.y)) *
               slots_of_row();
  }
  __device__ static V zeros() {
    V v;
#pragma unroll
    for (int k = 0; k < V::kWords; ++k) v.words[k] = 0;
    return v;
  }

  // One aligned piece of the row; `source` is the aligned address below its first element. Pieces
  // that reach beyond the tensor are taken element by element.
  __device__ void fetch_piece(const RowMatrix& matrix, int64_t row, const T* source, V* slots,
                              int piece) {
    const T* from = source + piece * kVec;
    const T* begin = row_of<T>(matrix, row) + first_;
    const T* end = begin + length_;
    if (from >= end) return;
    if (from >= matrix.data && from + kVec <= matrix.end) {
      copy_async_16(slots + piece, from);
      return;
    }
    T* elements = reinterpret_cast<T*>(slots + piece);
    for (int j = 0; j < kVec; ++j) {
      if (from + j >= begin && from + j < end) elements[j] = from[j];
    }
  }

  V* memory_;
  int stages_, tensors_;
  int first_, length_;
  int stage_ = 0;
};

}  // namespace fusedcuda
