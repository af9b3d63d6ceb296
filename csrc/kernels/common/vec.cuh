// One memory transaction of a thread: 16 bytes, the widest load and store there is (LDG.E.128,
// STG.E.128).
#pragma once

#include <cstdint>
#include <cstring>

#include "convert.cuh"

namespace fusedcuda {

// Elements of T a thread handles at once. float64 goes element by element: it is there for
// gradcheck, not for speed.
template <typename T>
constexpr int kVectorWidth = kVectorBytes / static_cast<int>(sizeof(T));
template <>
constexpr int kVectorWidth<double> = 1;

template <typename T, int kVec>
struct alignas(kVec * sizeof(T)) Vector {
  T values[kVec];
};

// data must be aligned to the whole vector. Plain loads and stores: of the cache hints,
// L1::no_allocate and .cs loads cost 7 to 12 % unless the stores are .cs too, and then nothing is
// gained over no hints at all (H200, 1.2 GB; bench/tuning/pointwise_linear.cu).
template <typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> load_vector(const T* data) {
  return *reinterpret_cast<const Vector<T, kVec>*>(data);
}

template <typename T, int kVec>
__device__ __forceinline__ void store_vector(T* data, const Vector<T, kVec>& v) {
  *reinterpret_cast<Vector<T, kVec>*>(data) = v;
}

// To an address that is a multiple of 16. Left to the compiler, some of these become four stores.
__device__ __forceinline__ void store_words(void* to, const uint32_t (&words)[4]) {
#ifdef __CUDA_ARCH__
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
#else
  memcpy(to, words, sizeof(words));
#endif
}

template <typename T, int kVec>
__device__ __forceinline__ void unpack(const Vector<T, kVec>& v, Compute<T> (&x)[kVec]) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) x[j] = to_compute(v.values[j]);
}

template <typename T, int kVec>
__device__ __forceinline__ Vector<T, kVec> pack(const Compute<T> (&x)[kVec]) {
  Vector<T, kVec> v;
#pragma unroll
  for (int j = 0; j < kVec; ++j) v.values[j] = from_compute<T>(x[j]);
  return v;
}

}  // namespace fusedcuda
