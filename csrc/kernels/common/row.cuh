// A row in the registers of its threads: which columns a thread holds, and reductions over a row.
//
// blockDim.x threads hold a row (a power of two up to 32, or whole warps), blockDim.y rows share a
// block; or a row is shared by the blocks of a cluster. A thread holds kItems vectors, blockDim.x
// vectors apart, so that a warp's loads are contiguous.
//
// Rows that do not start at a multiple of 16 bytes keep their 16-byte loads: vectors are counted
// from the aligned address at or below the row's first element, and what belongs to the rows before
// and behind is masked. kAligned says that this is not needed.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cluster.cuh"
#include "convert.cuh"
#include "reduce.cuh"
#include "row.h"
#include "vec.cuh"

namespace fusedcuda {

template <typename T>
__device__ __forceinline__ T* row_of(const RowMatrix& matrix, int64_t row) {
  return static_cast<T*>(matrix.data) + row * matrix.stride;
}

// The elements of one vector as they lie in memory, two of a 16-bit type in a register. (Of a
// Vector<T, kVec> the compiler makes kVec registers.)
template <typename T>
struct alignas(kVectorWidth<T> * sizeof(T)) Packed {
  static constexpr int kVec = kVectorWidth<T>;
  static constexpr int kWords = kVec * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];

  Packed() = default;
  __device__ Packed(const Vector<T, kVec>& v) { memcpy(words, v.values, sizeof(words)); }
  __device__ operator Vector<T, kVec>() const {
    Vector<T, kVec> v;
    memcpy(v.values, words, sizeof(words));
    return v;
  }

  // Makes the compiler forget what it has unpacked: it would keep that from one pass over the
  // elements to the next, in twice the registers. Without an instruction ptxas does not forget, so
  // this one combines the words with a zero that it does not know to be one. If `zero` comes out of
  // the reduction between the passes, the instruction cannot move ahead of it either.
  __device__ void forget_unpacked(uint32_t zero = gridDim.z - 1) {
#ifdef __CUDA_ARCH__
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      asm volatile("xor.b32 %0, %0, %1;" : "+r"(words[i]) : "r"(zero));
#endif
  }
};

template <typename T, int kVec>
__device__ __forceinline__ void unpack(const Packed<T>& v, Compute<T> (&x)[kVec]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    // The upper half of a float. Element by element it would take two instructions for every second
    // one.
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) {
      const uint32_t pair[] = {v.words[i] << 16, v.words[i] & 0xffff0000u};
      memcpy(&x[2 * i], pair, sizeof(pair));
    }
  } else {
    unpack<T, kVec>(static_cast<Vector<T, kVec>>(v), x);
  }
}

template <typename T>
__device__ __forceinline__ Packed<T> load_packed(const T* data) {
  return *reinterpret_cast<const Packed<T>*>(data);
}

template <typename T>
__device__ __forceinline__ void store_packed(T* data, const Packed<T>& v) {
  if constexpr (sizeof(v) == kVectorBytes) {
    store_words(data, v.words);
  } else {
    *reinterpret_cast<Packed<T>*>(data) = v;
  }
}

// kVec elements as they lie in memory: a whole vector, or one.
template <typename T, int kVec>
using Part = std::conditional_t<kVec == 1, Vector<T, 1>, Packed<T>>;

template <typename T, int kVec>
__device__ __forceinline__ Part<T, kVec> load_part(const T* data) {
  return *reinterpret_cast<const Part<T, kVec>*>(data);
}

template <int kVec, typename T>
__device__ __forceinline__ void store_part(T* data, const Part<T, kVec>& values) {
  if constexpr (kVec == 1) {
    store_vector(data, values);
  } else {
    store_packed(data, values);
  }
}

// The row of this thread, which it shares with the other threads of its threadIdx.y and cluster. A
// block's last rows may lie beyond the matrix: their threads read the last row and store nothing.
struct OwnRow {
  int64_t index;
  bool exists;

  __device__ explicit OwnRow(int64_t rows)
      : index(static_cast<int64_t>(blockIdx.x / cluster_size()) * blockDim.y + threadIdx.y),
        exists(index < rows) {
    if (!exists) index = rows - 1;
  }
};

// The columns of one row that this thread holds.
template <typename T, int kItems, bool kAligned>
class RowSlice {
 public:
  static constexpr int kVec = kVectorWidth<T>;
  static constexpr bool kIsAligned = kAligned;
  static constexpr bool kKeepsUnpacked = kAligned;

  // `row`: the first element of the row whose alignment counts.
  __device__ RowSlice(const T* row, int columns, unsigned cluster_rank) : columns_(columns) {
    first_ = static_cast<int>(cluster_rank * kItems * blockDim.x + threadIdx.x) * kVec;
    if constexpr (!kAligned) {
      first_ -= static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kVec);
    }
  }

  // Of the first element of vector i; may lie outside of the row.
  __device__ int column(int i) const { return first_ + i * static_cast<int>(blockDim.x) * kVec; }

  // Whether element j of vector i belongs to the row.
  __device__ bool has(int i, int j) const {
    if constexpr (kAligned) return column(i) < columns_;
    return static_cast<unsigned>(column(i) + j) < static_cast<unsigned>(columns_);
  }
  // Whether any element of vector i does.
  __device__ bool has(int i) const {
    return column(i) < columns_ && (kAligned || column(i) > -kVec);
  }
  __device__ bool has_all(int i) const {
    return kAligned ? column(i) < columns_ : column(i) >= 0 && column(i) + kVec <= columns_;
  }

  // Whether vector i can be read in one piece. It may then hold elements of other rows.
  __device__ bool is_loadable(const RowMatrix& matrix, const T* row, int i) const {
    if (!has(i)) return false;
    if constexpr (kAligned) return true;
    const T* at = row + column(i);
    return reinterpret_cast<uintptr_t>(at) % kVectorBytes == 0 && at >= matrix.data &&
           at + kVec <= matrix.end;
  }

  // Vector i element by element; 0 outside of the row.
  __device__ Packed<T> load_elements(const T* row, int i) const {
    Vector<T, kVec> v;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      v.values[j] = has(i, j) ? row[column(i) + j] : from_compute<T>(0);
    }
    return v;
  }

  // Elements of other rows become 0.
  __device__ void mask(int i, Packed<T>* v) const {
    if constexpr (!kAligned) {
      if (has_all(i)) return;
      Vector<T, kVec> elements = *v;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (!has(i, j)) elements.values[j] = from_compute<T>(0);
      }
      *v = elements;
    }
  }

  // Vector i of `row`, which is a row of `matrix`; 0 outside of the row.
  __device__ Packed<T> load(const RowMatrix& matrix, const T* row, int i) const {
    if (!is_loadable(matrix, row, i)) return load_elements(row, i);
    Packed<T> v = load_packed(row + column(i));
    mask(i, &v);
    return v;
  }

  // All vectors of `row`. The whole ones are in flight together before the others, at the ends of
  // the row, are looked at. Those are rare in a long row, and read element by element: what it
  // takes to know that they may be read in one piece costs registers.
  __device__ void load_all(const RowMatrix& matrix, const T* row, Packed<T> (&v)[kItems]) const {
    const bool aligned = kAligned || reinterpret_cast<uintptr_t>(row + first_) % kVectorBytes == 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      v[i] = Packed<T>{};
      if (aligned && has_all(i)) v[i] = load_packed(row + column(i));
    }
    if constexpr (!kAligned) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (!has(i) || (aligned && has_all(i))) continue;
        v[i] = kItems == 1 ? load(matrix, row, i) : load_elements(row, i);
      }
    }
  }

  __device__ void store(T* row, int i, const Packed<T>& v) const {
    T* at = row + column(i);
    if (has_all(i) && (kAligned || reinterpret_cast<uintptr_t>(at) % kVectorBytes == 0)) {
      store_packed(at, v);
      return;
    }
    if constexpr (!kAligned) {
      const Vector<T, kVec> elements = v;
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (has(i, j)) at[j] = elements.values[j];
      }
    }
  }

  // What a parameter of `columns` values, of type T or float32, has for vector i; `absent` where
  // there is none.
  __device__ void load_parameter(const void* data, bool is_float32, int i, Compute<T> absent,
                                 Compute<T> (&x)[kVec]) const {
    if (data == nullptr) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[j] = absent;
    } else if (is_float32) {
      load_parameter(static_cast<const float*>(data), i, x);
    } else {
      load_parameter(static_cast<const T*>(data), i, x);
    }
  }

 private:
  template <typename P>
  __device__ void load_parameter(const P* data, int i, Compute<T> (&x)[kVec]) const {
    constexpr int kWidth = kVec < kVectorWidth<P> ? kVec : kVectorWidth<P>;
    data += column(i);
    if constexpr (kAligned) {
      if (!has(i)) return;
#pragma unroll
      for (int j = 0; j < kVec; j += kWidth) {
        const Vector<P, kWidth> v = load_vector<P, kWidth>(data + j);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) x[j + k] = to_compute(v.values[k]);
      }
    } else if (has_all(i)) {  // nearly always: no check for every element
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[j] = static_cast<Compute<T>>(to_compute(data[j]));
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        x[j] = has(i, j) ? static_cast<Compute<T>>(to_compute(data[j])) : 0;
      }
    }
  }

  int columns_;
  int first_;
};

// Two values that are reduced together.
template <typename C>
struct Pair {
  C a, b;
};

template <typename C>
__device__ __forceinline__ C shuffle_xor(C value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <typename C>
__device__ __forceinline__ Pair<C> shuffle_xor(const Pair<C>& value, int mask) {
  return {shuffle_xor(value.a, mask), shuffle_xor(value.b, mask)};
}

struct Add {
  template <typename C>
  __device__ C operator()(C x, C y) const {
    return x + y;
  }
  template <typename C>
  __device__ Pair<C> operator()(const Pair<C>& x, const Pair<C>& y) const {
    return {x.a + y.a, x.b + y.b};
  }
};

// Reductions of one value a thread over the threads of each row; every thread gets its row's
// result, the same bits everywhere, in an order that does not depend on scheduling.
//
// A warp leaves its part in a slot of shared memory, in every block of the cluster, and after one
// barrier every warp combines all slots. Two sets of slots take turns, so that the next reduction
// need not wait until everybody has read the last one's. Every thread of the block takes part in
// every reduction. kClusters: whether the kernel is ever launched with clusters.
template <typename V, bool kClusters = true>
class RowReduction {
 public:
  // `scratch`: RowConfig::scratch_bytes(sizeof(V)) of dynamic shared memory (in a cluster, at the
  // same place in every block).
  __device__ explicit RowReduction(void* scratch)
      : barriers_(static_cast<uint64_t*>(scratch)),
        slots_(reinterpret_cast<V*>(barriers_ + 2)),
        cluster_(kClusters ? cluster_size() : 1) {
    while (width_ < min(num_slots(), kWarpSize)) width_ *= 2;
    if (!kClusters || cluster_ == 1) return;
    if (threadIdx.x == 0) {
      ClusterMailbox(barriers_).init();
      ClusterMailbox(barriers_ + 1).init();
    }
    cluster_arrive();  // here already, so that nobody has to wait in the first reduction
  }

  // For the present block: RowConfig::scratch_bytes() on the device.
  __device__ static int scratch_bytes() {
    const int warps = (blockDim.x * blockDim.y + kWarpSize - 1) / kWarpSize;
    return row_scratch_bytes(warps * (kClusters ? cluster_size() : 1), sizeof(V));
  }

  template <typename Combine>
  __device__ V operator()(V value, const V& identity, Combine combine) {
    if (blockDim.x < kWarpSize) {
      for (int offset = blockDim.x / 2; offset > 0; offset /= 2) {
        value = combine(value, shuffle_xor(value, offset));
      }
      return value;
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      value = combine(value, shuffle_xor(value, offset));
    }
    if (blockDim.x == kWarpSize && (!kClusters || cluster_ == 1)) return value;

    const V* slots = exchange(value);
    const int count = num_slots();
    // Of few slots each has copies in several lanes, for fewer steps.
    const int lane = threadIdx.x % kWarpSize & (width_ - 1);
    V result = lane < count ? slots[lane] : identity;
    for (int i = lane + kWarpSize; i < count; i += kWarpSize) result = combine(result, slots[i]);
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      if (offset < width_) result = combine(result, shuffle_xor(result, offset));
    }
    return result;
  }

  __device__ V sum(V value) { return (*this)(value, V{}, Add()); }

 private:
  __device__ int num_slots() const { return blockDim.x / kWarpSize * cluster_; }

  // Leaves a warp's value in its slot, and returns those of all the row's warps.
  __device__ const V* exchange(const V& value) {
    const int warps = blockDim.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int turn = round_ % 2;
    V* slots = slots_ + (turn * blockDim.y + threadIdx.y) * num_slots();
    if (kClusters && cluster_ > 1) {
      if (round_ == 0) cluster_wait();  // until every block runs and can be written to
      const ClusterMailbox mailbox(barriers_ + turn);
      if (threadIdx.x == 0) mailbox.expect(num_slots() * static_cast<int>(sizeof(V)));
      if (lane < cluster_) mailbox.send(slots + cluster_rank() * warps + warp, lane, value);
      mailbox.wait(round_ / 2 % 2);
    } else {
      if (lane == 0) slots[warp] = value;
      __syncthreads();
    }
    ++round_;
    return slots;
  }

  uint64_t* barriers_;
  V* slots_;
  int cluster_;
  int width_ = 1;  // the power of two at or above the number of slots, up to a warp
  unsigned round_ = 0;
};

}  // namespace fusedcuda
