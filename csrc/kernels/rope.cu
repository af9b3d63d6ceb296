// Rotary position embedding: every pair (a, b) of a row is turned by the angle of its position,
//
//   a' = a * cos_a - b * sin_a        b' = b * cos_b + a * sin_b
//
// where the pairs are (i, i + D/2) or, interleaved, (2i, 2i + 1). Queries and keys go through one
// launch. The backward is the same kernel with the matrix transposed: sin_a and sin_b change places
// and signs.
//
// Bound by memory: each row is read once and written once, 16 bytes at a time from either half, so
// that a thread has both members of its pairs. cos and sin are small and stay in the L2, but their
// loads would still compete with the others: a thread reads its part of them once, keeps it in
// registers, and goes through several heads of the same position. Meanwhile the rows of the next
// heads are already on their way, which keeps about 48 KB in flight on each SM (30 are enough).
//
// Rows of a block are neighbours in memory, whichever of heads and positions comes first there.
//
// kVec is the vector width of T, or 1: the scalar path, which takes any strides.

#include "common/launch.h"
#include "common/vec.cuh"
#include "rope.h"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Kernel
// ------------------------------------------------------------------------------------------------

// The parameters and the plan, as the kernel reads them.
struct RopeArguments {
  RopeTensor q, k;
  RopeTable cos, sin;
  bool half_tables;
  bool transposed;
  bool heads_inside;
  int64_t half;           // head_dim / 2
  int64_t columns;        // shares of a row
  int64_t num_positions;  // of all sequences
  int num_heads;
  int heads_per_block;
  Divider length;
  Divider head_groups;
};

// A thread's share of a row: kVec elements of either half, on the scalar path one pair. Packed into
// whole registers, because in a loop each element of 16 bits would take one.
template <typename T, int kVec>
class Share {
 public:
  Share() = default;
  __device__ explicit Share(const Vector<T, kVec> (&halves)[2]) {
    memcpy(words_, halves, sizeof(halves));
  }

  __device__ void unpack(Compute<T> (&x)[2 * kVec]) const {
    Vector<T, 2 * kVec> values;
    memcpy(&values, words_, sizeof(values));
    fusedcuda::unpack<T, 2 * kVec>(values, x);
  }

 private:
  uint32_t words_[2 * kVec * sizeof(T) / sizeof(uint32_t)];
};

// Where a share begins in a row, in elements, and which of its elements are pairs: pair i has
// members a(i) and b(i).
template <int kVec, bool kInterleaved>
struct Pairs {
  int64_t first, second;

  __device__ Pairs(int64_t column, int64_t half) {
    const bool neighbours = kInterleaved && kVec == 1;
    first = neighbours ? 2 * column : column * kVec;
    second = neighbours ? first + 1 : half + column * kVec;
  }

  static __device__ constexpr int a(int i) { return kInterleaved ? 2 * i : i; }
  static __device__ constexpr int b(int i) { return kInterleaved ? 2 * i + 1 : i + kVec; }
};

// Vectors lie along the row, whose stride is then 1.
template <int kVec>
__device__ __forceinline__ int64_t along_row(int64_t element, int64_t stride) {
  return kVec > 1 ? element : element * stride;
}

// Where a thread's share of each head is. The heads of q are numbered first, those of k follow.
template <typename T, int kVec>
class Heads {
 public:
  __device__ Heads(const RopeLayout& q, const RopeLayout& k, int q_heads, int64_t batch,
                   int64_t position, int64_t first, int64_t second)
      : q_(q), k_(k), q_heads_(q_heads) {
    q_start_ = start(q, batch, position, first);
    k_start_ = start(k, batch, position, first);
    q_distance_ = along_row<kVec>(second - first, q.strides[3]);
    k_distance_ = along_row<kVec>(second - first, k.strides[3]);
  }

  // The first half of a head's share; the second is distance(head) behind it.
  __device__ T* at(unsigned head) const {
    const bool is_k = head >= q_heads_;
    const unsigned index = is_k ? head - q_heads_ : head;
    return (is_k ? k_start_ : q_start_) + index * (is_k ? k_.strides[1] : q_.strides[1]);
  }

  __device__ int64_t distance(unsigned head) const {
    return kVec > 1 || head < q_heads_ ? q_distance_ : k_distance_;
  }

  __device__ Share<T, kVec> load(unsigned head) const {
    const T* data = at(head);
    return Share<T, kVec>(
        {load_vector<T, kVec>(data), load_vector<T, kVec>(data + distance(head))});
  }

 private:
  static __device__ T* start(const RopeLayout& layout, int64_t batch, int64_t position,
                             int64_t first) {
    return static_cast<T*>(layout.data) + batch * layout.strides[0] + position * layout.strides[2] +
           along_row<kVec>(first, layout.strides[3]);
  }

  const RopeLayout& q_;
  const RopeLayout& k_;
  unsigned q_heads_;
  T* q_start_;
  T* k_start_;
  int64_t q_distance_;
  int64_t k_distance_;
};

// kCount neighbouring values of a table, in pieces of at most 16 bytes.
template <int kCount, typename U, typename C>
__device__ __forceinline__ void load_values(const U* data, C* values) {
  constexpr int kMost = kVectorBytes / static_cast<int>(sizeof(U));
  constexpr int kPiece = kCount < kMost ? kCount : kMost;
#pragma unroll
  for (int j = 0; j < kCount; j += kPiece) {
    const Vector<U, kPiece> piece = load_vector<U, kPiece>(data + j);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) values[j + i] = to_compute(piece.values[i]);
  }
}

// The value of a table for each element of a share.
template <int kVec, bool kInterleaved, typename U, typename C>
__device__ __forceinline__ void load_table(const RopeTable& table, bool half_table, int64_t batch,
                                           int64_t position, const Pairs<kVec, kInterleaved>& pairs,
                                           C (&values)[2 * kVec]) {
  const U* row =
      static_cast<const U*>(table.data) + batch * table.strides[0] + position * table.strides[1];
  auto at = [&](int64_t element) { return row + along_row<kVec>(element, table.strides[2]); };
  if (!half_table) {
    load_values<kVec>(at(pairs.first), values);
    load_values<kVec>(at(pairs.second), values + kVec);
    return;
  }
  C of_pair[kVec];
  if constexpr (kInterleaved && kVec > 1) {
    load_values<kVec / 2>(at(pairs.first / 2), of_pair);
    load_values<kVec / 2>(at(pairs.second / 2), of_pair + kVec / 2);
  } else {
    load_values<kVec>(at(kInterleaved ? pairs.first / 2 : pairs.first), of_pair);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[pairs.a(i)] = values[pairs.b(i)] = of_pair[i];
}

// What turns a share: x'[j] = cos[j] * x[j] + sin[j] * x[partner of j].
template <typename C, int kVec, bool kInterleaved>
struct Rotation {
  using P = Pairs<kVec, kInterleaved>;
  C cos[2 * kVec];
  C sin[2 * kVec];  // with the signs of the formula

  template <typename U>
  __device__ void load(const RopeArguments& p, int64_t batch, int64_t position, const P& pairs) {
    load_table<kVec, kInterleaved, U>(p.cos, p.half_tables, batch, position, pairs, cos);
    load_table<kVec, kInterleaved, U>(p.sin, p.half_tables, batch, position, pairs, sin);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const C sin_a = sin[P::a(i)], sin_b = sin[P::b(i)];
      sin[P::a(i)] = p.transposed ? sin_b : -sin_a;
      sin[P::b(i)] = p.transposed ? -sin_a : sin_b;
    }
  }

  template <typename T>
  __device__ void turn(const Share<T, kVec>& share, Vector<T, kVec> (&halves)[2]) const {
    C x[2 * kVec];
    share.unpack(x);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int a = P::a(i), b = P::b(i);
      halves[a / kVec].values[a % kVec] = from_compute<T>(cos[a] * x[a] + sin[a] * x[b]);
      halves[b / kVec].values[b % kVec] = from_compute<T>(cos[b] * x[b] + sin[b] * x[a]);
    }
  }
};

// U: the type of the tables, T or float.
template <typename T, typename U, bool kInterleaved, int kVec>
__global__ void __launch_bounds__(kRopeThreads, kRopeResidentBlocks)
    rope_kernel(const __grid_constant__ RopeArguments p) {
  constexpr int kDepth = kRopeDepth<kVec>;
  // Blocks of the same positions are neighbours, so that the tables they read are still in the L2.
  int64_t group;
  const int64_t tile = p.head_groups.divide(blockIdx.x, &group);
  const unsigned thread_position = p.heads_inside ? threadIdx.z : threadIdx.y;
  const unsigned thread_head = p.heads_inside ? threadIdx.y : threadIdx.z;
  const int64_t place = tile * (p.heads_inside ? blockDim.z : blockDim.y) + thread_position;
  const int step = p.heads_inside ? blockDim.y : blockDim.z;
  const int first_head = static_cast<int>(group) * p.heads_per_block + thread_head;
  const int end = min((static_cast<int>(group) + 1) * p.heads_per_block, p.num_heads);
  const int64_t column = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (place >= p.num_positions || first_head >= end || column >= p.columns) return;
  int64_t position;
  const int64_t batch = p.length.divide(place, &position);

  wait_for_previous_kernel();
  const Pairs<kVec, kInterleaved> pairs(column, p.half);
  const Heads<T, kVec> inputs(p.q.input, p.k.input, p.q.heads, batch, position, pairs.first,
                              pairs.second);
  const Heads<T, kVec> outputs(p.q.output, p.k.output, p.q.heads, batch, position, pairs.first,
                               pairs.second);
  // The next kDepth heads. The place of one that was stored is taken by the one kDepth further.
  Share<T, kVec> shares[kDepth];
#pragma unroll
  for (int u = 0; u < kDepth; ++u) {
    const int head = first_head + u * step;
    if (head < end) shares[u] = inputs.load(head);
  }
  Rotation<Compute<T>, kVec, kInterleaved> rotation;
  rotation.template load<U>(p, batch, position, pairs);
  let_next_kernel_start();
#pragma unroll 1
  for (int next = first_head; next < end; next += kDepth * step) {
#pragma unroll
    for (int u = 0; u < kDepth; ++u) {
      const int head = next + u * step;
      if (head >= end) break;
      T* output = outputs.at(head);
      const int64_t distance = outputs.distance(head);
      Vector<T, kVec> halves[2];
      rotation.turn(shares[u], halves);
      store_vector<T, kVec>(output, halves[0]);
      store_vector<T, kVec>(output + distance, halves[1]);
      if (head + kDepth * step < end) shares[u] = inputs.load(head + kDepth * step);
    }
  }
}

// ------------------------------------------------------------------------------------------------
// Launcher
// ------------------------------------------------------------------------------------------------

namespace rope_detail {

inline RopeArguments arguments_of(const RopeParams& params, const RopePlan& plan) {
  RopeArguments p = {};
  p.q = params.q;
  p.k = params.k;
  p.cos = params.cos;
  p.sin = params.sin;
  p.half_tables = params.half_tables;
  p.transposed = params.transposed;
  p.heads_inside = plan.heads_inside;
  p.half = params.head_dim / 2;
  p.columns = plan.columns;
  p.num_positions = params.batch * params.length;
  p.num_heads = params.num_heads();
  p.heads_per_block = plan.heads_per_block;
  p.length = Divider::make(params.length);
  p.head_groups = Divider::make(plan.head_groups);
  return p;
}

template <typename T, typename U>
cudaError_t start(const RopeParams& params, const RopePlan& plan, cudaStream_t stream) {
  constexpr int kVec = kVectorWidth<T>;
  const bool vectors = plan.vec == kVec;
  auto* kernel = params.interleaved
                     ? (vectors ? rope_kernel<T, U, true, kVec> : rope_kernel<T, U, true, 1>)
                     : (vectors ? rope_kernel<T, U, false, kVec> : rope_kernel<T, U, false, 1>);
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.column_tiles));
  const dim3 block(plan.threads_x, plan.threads_y, plan.threads_z);
  return launch(kernel, grid, block, plan.dependent_launch, stream, arguments_of(params, plan));
}

}  // namespace rope_detail

cudaError_t rope_device_traits(DeviceTraits* traits) {
  return describe_device(rope_kernel<float, float, false, 1>, traits);
}

cudaError_t launch_rope(const RopeParams& params, const RopePlan& plan, cudaStream_t stream) {
  if (plan.blocks == 0) return cudaSuccess;
  const bool same = params.table_dtype == params.dtype;
  switch (params.dtype) {
    case DType::kFloat64:
      return rope_detail::start<double, double>(params, plan, stream);
    case DType::kFloat32:
      return rope_detail::start<float, float>(params, plan, stream);
    case DType::kFloat16:
      return same ? rope_detail::start<__half, __half>(params, plan, stream)
                  : rope_detail::start<__half, float>(params, plan, stream);
    default:
      return same ? rope_detail::start<__nv_bfloat16, __nv_bfloat16>(params, plan, stream)
                  : rope_detail::start<__nv_bfloat16, float>(params, plan, stream);
  }
}

}  // namespace fusedcuda
