// Rows that stream through shared memory: persistent blocks take one set of rows after the other,
// while the next sets are on their way by asynchronous copies. So the memory stays busy while a
// block reduces and stores, and a block has as many bytes in flight as shared memory holds.
//
// A thread works on the same columns of every row, which is what keeps sums over the rows, or
// parameters, in place. blockDim.y rows share a block, or the blocks of a cluster a row: then each
// has a contiguous part of the columns.
//
// kAligned: every vector of every tensor is whole and aligned. A thread's vectors are blockDim.x
// apart, and it copies what it will read itself.
//
// kPhased: the same for the aligned 16-byte pieces that cover the row, where it begins at the same
// place of its first piece in every tensor. That place is another one from row to row, but comes
// back after up to eight of them: a block takes rows that share it one after the other (RowSets),
// and so keeps its columns. Only the pieces at the ends of the row take more than aligned ones.
//
// kShifted: the same pieces are copied, and a warp has a contiguous part of the row: all that its
// threads read, they have copied themselves, so no barrier is wider than a warp. A thread's
// "vectors" are 32-bit words as far apart as the warp has threads. Those it reads without bank
// conflicts, wherever the row begins, and writes as words of whole lines. Where elements are half a
// word and rows begin in the middle of one, both take a shift by 16 bits.
#pragma once

#include "async_copy.cuh"
#include "row.cuh"
#include "row_pipeline.h"
#include "row_sets.cuh"

namespace fusedcuda {

template <typename T, int kItems, RowAccess kAccess>
class RowPipeline {
  static constexpr bool kAligned = kAccess == RowAccess::kAligned;
  static constexpr bool kPhased = kAccess == RowAccess::kPhased;
  static constexpr bool kShifted = kAccess == RowAccess::kShifted;

 public:
  static constexpr int kVec = kVectorWidth<T>;
  static constexpr bool kIsAligned = kAligned;
  static constexpr bool kKeepsUnpacked = !kShifted;
  using V = Packed<T>;

  // `memory`: `stages` times `tensors` times blockDim.y rows of pipeline_slots() each.
  __device__ RowPipeline(void* memory, int stages, int tensors, int columns, unsigned cluster_rank)
      : memory_(static_cast<V*>(memory)), stages_(stages), tensors_(tensors) {
    begin(cluster_rank, columns, 0);
    // The warp's own slots: whatever the shift, no other warp's pieces come there.
    if constexpr (kShifted) memory_ += thread() / kWarpSize * (kItems * kWarpSize + kSlotsOfLine);
  }

  // kPhased: what follows are rows that begin like this one of `matrix`.
  __device__ void begin_segment(const RowMatrix& matrix, int64_t row, int columns,
                                unsigned cluster_rank) {
    if constexpr (kPhased) {
      const auto at = reinterpret_cast<uintptr_t>(row_of<T>(matrix, row));
      stage_ = 0;
      // The number of this thread, which the compiler does not know to stay: it would carry the
      // columns of all elements from segment to segment, and has no registers for them.
      thread_ = static_cast<int>(threadIdx.x + (row >> 28));
      begin(cluster_rank, columns, static_cast<int>(at / sizeof(T) % kVec));
    }
  }

  // Among those of the row in this block.
  __device__ int thread() const { return kPhased ? thread_ : static_cast<int>(threadIdx.x); }

  // The first column of this block's part, negative where the row begins inside of it, and where
  // in the part the columns end.
  __device__ int first() const { return first_; }
  __device__ int length() const { return length_; }
  // Of element j of vector i, within the part.
  __device__ int column(int i, int j = 0) const {
    if constexpr (!kShifted) return piece(i) * kVec + j;
    const int word = (i * V::kWords + j / kPerWord) * width() + lane();
    return first_of_warp() + word * kPerWord + j % kPerWord;
  }
  // Whether element j of vector i belongs to the row; of a vector, any of its elements.
  __device__ bool has(int i, int j) const {
    return column(i, j) < length_ && (!kPhased || column(i, j) + first_ >= 0);
  }
  __device__ bool has(int i) const { return column(i) < length_; }
  __device__ bool has_all(int i) const {
    if constexpr (kPhased) return has(i) && !is_end(i);
    return has(i, kAligned ? 0 : kVec - 1);
  }

  // Starts the copy of a row of `matrix` to the present stage.
  __device__ void fetch(int tensor, const RowMatrix& matrix, int64_t row) {
    const T* part = part_of(matrix, row);
    if constexpr (kPhased) {
      V* slots = slots_of(tensor) + line_of(part);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (has_all(i)) copy_async_16(slots + slot(i), part + column(i));
      }
      if (ends_ == 0) return;
#pragma unroll 1
      for (int i = 0; i < kItems; ++i) {
        if (!is_end(i)) continue;
        const T* source = part + column(i);
        if (source >= matrix.data && source + kVec <= matrix.end) {
          copy_async_16(slots + slot(i), source);
          continue;
        }
        // Of the first or the last row: nothing outside of the tensor.
        T* elements = reinterpret_cast<T*>(slots + slot(i));
#pragma unroll 1
        for (int j = 0; j < kVec; ++j) {
          if (has(i, j)) elements[j] = source[j];
        }
      }
    } else if constexpr (kAligned) {
      V* slots = slots_of(tensor);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (has(i)) copy_async_16(slots + piece(i), part + column(i));
      }
    } else {
      const int shift = shift_of(part) % kVec;
      const int pieces = (shift + length_ + kVec - 1) / kVec;
      const T* source = part - shift;
      V* slots = slots_of(tensor) + shift_of(part) / kVec + lane();
      if (source >= matrix.data && source + pieces * kVec <= matrix.end) {
#pragma unroll
        for (int i = 0; i <= kItems; ++i) {
          if (!copies(i) || piece(i) >= pieces) continue;
          copy_async_16(slots + i * width(), source + piece(i) * kVec);
        }
      } else {  // The first or the last row: element by element, nothing outside of the tensor.
#pragma unroll 1
        for (int i = 0; i <= kItems; ++i) {
          T* elements = reinterpret_cast<T*>(slots + i * width());
#pragma unroll 1
          for (int j = 0; copies(i) && j < kVec; ++j) {
            const int column = piece(i) * kVec - shift + j;
            if (column >= 0 && column < length_) elements[j] = part[column];
          }
        }
      }
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

  // Between the threads of a warp, which read what others of them have copied: also before the
  // next fetch() to a stage that has been read.
  __device__ void synchronize() const {
    if constexpr (!kAligned) __syncwarp();
  }

  // kPhased: what the pieces at the ends of a row that has arrived hold of other rows becomes 0.
  // To be called before the row is read.
  __device__ void clear_ends(int tensor, unsigned shift) const {
    if constexpr (kPhased) {
      if (ends_ == 0) return;
#pragma unroll 1
      for (int i = 0; i < kItems; ++i) {
        if (!is_end(i)) continue;
        T* elements = reinterpret_cast<T*>(slots_of(tensor) + shift + slot(i));
#pragma unroll 1
        for (int j = 0; j < kVec; ++j) {
          if (!has(i, j)) elements[j] = from_compute<T>(0);
        }
      }
    }
  }

  // Vector i of a row that has arrived; `shift` is shift_of() its source. Elements beyond the row
  // are 0.
  __device__ V read(int tensor, int i, unsigned shift) const {
    const V* slots = slots_of(tensor);
    if constexpr (!kShifted) {
      if (has(i)) return slots[(kPhased ? shift : 0) + slot(i)];
      return V{};
    } else {
      const uint32_t* words = slots->words + shift / kPerWord + lane();
      V v;
#pragma unroll
      for (int k = 0; k < V::kWords; ++k) {
        const uint32_t* word = words + (i * V::kWords + k) * width();
        v.words[k] = kPerWord > 1 ? cut(word[0], word[1], shift) : word[0];
      }
      if (!has_all(i)) {
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

  // Elements between the part of a row and the address below it at which its slots begin: a
  // multiple of 16 bytes or, for whole warps, of 128. kPhased: slots.
  __device__ unsigned shift_of(const RowMatrix& matrix, int64_t row) const {
    if constexpr (kPhased) return line_of(part_of(matrix, row));
    return kAligned ? 0 : shift_of(part_of(matrix, row));
  }

  // A row of results. Shifted, all threads of a warp take part, also those whose row does not
  // exist.
  __device__ void write(const RowMatrix& matrix, int64_t row, const V (&results)[kItems],
                        bool exists = true) const {
    T* part = part_of(matrix, row);
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (has(i)) store_packed(part + column(i), results[i]);
      }
    } else if constexpr (kPhased) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (has_all(i)) store_packed(part + column(i), results[i]);
      }
      if (ends_ == 0) return;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (!is_end(i)) continue;
        const Vector<T, kVec> elements = results[i];
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if (has(i, j)) part[column(i, j)] = elements.values[j];
        }
      }
    } else {
      // In the middle of a word of the thread one in memory begins, if `shift` is odd.
      const unsigned shift = shift_of(part);
      const int odd = shift % kPerWord;
      const int end_of_warp = first_of_warp() + kItems * kVec * width();
      const int end = exists ? min(length_, end_of_warp) : 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        V v = results[i];
        if constexpr (kPerWord > 1) {
#pragma unroll
          for (int k = 0; k < V::kWords; ++k) {
            // Behind the last lane's word is the first lane's next one.
            const uint32_t following = k + 1 < V::kWords ? results[i].words[(k + 1) % V::kWords]
                                                         : results[(i + 1) % kItems].words[0];
            const uint32_t offered = lane() == 0 ? following : results[i].words[k];
            const uint32_t next = __shfl_sync(0xffffffffu, offered, lane() + 1, width());
            v.words[k] = cut(results[i].words[k], next, shift);
          }
        }
        T* at = part + column(i) + odd;
        const int step = kPerWord * width();
        if (column(i, kVec - 1) + odd < end) {
#pragma unroll
          for (int k = 0; k < V::kWords; ++k) {
            *reinterpret_cast<uint32_t*>(at + k * step) = v.words[k];
          }
        } else {
          const Vector<T, kVec> elements = v;
#pragma unroll
          for (int j = 0; j < kVec; ++j) {
            if (column(i, j) + odd < end) at[column(i, j) - column(i)] = elements.values[j];
          }
        }
      }
      if (odd && lane() == 0 && column(0) < end) {
        part[column(0)] = static_cast<Vector<T, kVec>>(results[0]).values[0];
      }
    }
  }

 private:
  static constexpr int kPerWord = sizeof(T) == 2 ? 2 : 1;  // elements of a 32-bit word

  // A row's threads in a warp: all, where they have several vectors (choose_norm_bwd_config).
  __device__ static int width() {
    return kItems > 1 ? kWarpSize : min(static_cast<int>(blockDim.x), kWarpSize);
  }
  __device__ static int lane() { return threadIdx.x % kWarpSize; }

  // The first column of the warp's part.
  __device__ static int first_of_warp() {
    return static_cast<int>(threadIdx.x) / kWarpSize * (kItems * kVec * kWarpSize);
  }

  // The part of block `cluster_rank`, of rows whose first piece begins `phase` elements earlier.
  __device__ void begin(unsigned cluster_rank, int columns, int phase) {
    first_ = static_cast<int>(cluster_rank * kItems * blockDim.x) * kVec - phase;
    length_ = min(max(columns - first_, 0), kItems * static_cast<int>(blockDim.x) * kVec);
    if constexpr (kPhased) {
      ends_ = 0;
      for (int i = 0; i < kItems; ++i) {
        const bool is_whole = column(i) + first_ >= 0 && column(i) + kVec <= length_;
        if (has(i) && !is_whole) ends_ |= 1u << i;
      }
    }
  }

  // kPhased: whether some, not all, of vector i belongs to the row.
  __device__ bool is_end(int i) const { return ends_ >> i & 1; }

  // The place of the i-th piece that the thread copies among those of the part. Shifted, the
  // first lane also copies a kItems-th one: there the warp's part ends, and the next one's begins.
  __device__ int piece(int i) const {
    if constexpr (!kShifted) return i * static_cast<int>(blockDim.x) + thread();
    return (thread() / kWarpSize * kItems + i) * width() + lane();
  }
  __device__ static bool copies(int i) { return i < kItems || lane() == 0; }

  // What lies `shift` elements behind the first of `low`, if those fill words: one or none.
  __device__ static uint32_t cut(uint32_t low, uint32_t high, unsigned shift) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (shift % 2 * 16));
  }

  __device__ T* part_of(const RowMatrix& matrix, int64_t row) const {
    return row_of<T>(matrix, row) + first_;
  }
  __device__ static unsigned shift_of(const T* part) {
    const unsigned slots = blockDim.x < kWarpSize ? 1 : kSlotsOfLine;
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(part) / sizeof(T)) % (slots * kVec);
  }
  // Its slot. Whatever the place in a line at which the row begins, no other warp's pieces come
  // there.
  __device__ int slot(int i) const {
    if constexpr (!kPhased) return piece(i);
    const int warp = thread_ / kWarpSize + i * static_cast<int>(blockDim.x / kWarpSize);
    return warp * (kWarpSize + kSlotsOfLine) + lane();
  }

  // Slots between the 128-byte line in which a part begins and the part.
  __device__ static unsigned line_of(const T* part) {
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(part) / kVectorBytes) % kSlotsOfLine;
  }
  __device__ V* slots_of(int tensor) const {
    return memory_ + ((stage_ * tensors_ + tensor) * static_cast<int>(blockDim.y) +
                      static_cast<int>(threadIdx.y)) *
                         pipeline_slots(kItems, static_cast<int>(blockDim.x), kAccess);
  }

  V* memory_;
  int stages_, tensors_;
  int first_, length_;
  int stage_ = 0;
  int thread_ = threadIdx.x;  // kPhased
  unsigned ends_ = 0;         // kPhased: a bit for each vector that the row ends, or begins, in
};

}  // namespace fusedcuda
