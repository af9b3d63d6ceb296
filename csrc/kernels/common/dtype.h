// Element types the kernels are instantiated for, as run-time values of the parameter structs.
#pragma once

namespace fusedcuda {

enum class DType { kFloat64, kFloat32, kFloat16, kBFloat16 };

// The widest load and store of a thread: LDG.E.128, STG.E.128.
constexpr int kVectorBytes = 16;

inline int size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

// Bytes of what a type is computed in: float64, or float32.
inline int compute_size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// Elements of the widest load, as kVectorWidth in vec.cuh; float64 goes one by one.
inline int vector_width(DType dtype) {
  return dtype == DType::kFloat64 ? 1 : kVectorBytes / size_of(dtype);
}

}  // namespace fusedcuda
