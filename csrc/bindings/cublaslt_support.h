// Which epilogues cuBLASLt really fuses, and exactly: a call that works may still run a second
// kernel, which is no faster than one of our own, or round in between.
#pragma once

#include <array>
#include <cstdint>

#include "cublaslt_problem.h"

namespace fusedcuda {

// Why a product may not have its bias in the epilogue. On an H200 (cuBLASLt 13.1) RELU_AUX_BIAS
// rounded 16-bit products whose rows do not start at multiples of 16 bytes before it added the
// bias, and again after it: wrong where the two nearly cancel. No epilogue with a bias is trusted
// there; a residual may lie anywhere.
inline const char* rounds_before_bias(const MatmulProblem& p) {
  const bool half = p.output_type == CUDA_R_16F || p.output_type == CUDA_R_16BF;
  if (!half || !adds_bias(p.epilogue)) return nullptr;
  const int64_t elements = p.n | p.k | p.a_stride | p.b_stride | p.output_stride | p.a_batch |
                           p.b_batch | p.output_batch;
  const int32_t aligned = p.a_alignment & p.b_alignment & p.output_alignment;
  if (elements % 8 == 0 && aligned == 16) return nullptr;
  return "a bias in the epilogue is exact only where rows start at multiples of 16 bytes";
}

class EpilogueSupport {
 public:
  // What `make probe` has measured.
  void set(cudaDataType_t type, cublasComputeType_t compute, cublasLtEpilogue_t epilogue,
           bool fused) {
    known_[index(type, compute)][epilogue & kMask] = fused ? kFused : kApart;
  }

  bool fuses(const MatmulProblem& problem) const {
    const cublasLtEpilogue_t epilogue = problem.epilogue;
    if (epilogue == CUBLASLT_EPILOGUE_DEFAULT) return true;
    const int8_t known = known_[index(problem.type, problem.compute)][epilogue & kMask];
    return known == kUnknown ? expected(problem.type, epilogue) : known == kFused;
  }

 private:
  static constexpr int8_t kUnknown = 0, kFused = 1, kApart = 2;
  static constexpr int kMask = 1023;  // BGRADB, 512, is the largest epilogue

  // Of Hopper's 16-bit kernels all are documented to fuse, of the others the cheap ones.
  static bool expected(cudaDataType_t type, cublasLtEpilogue_t epilogue) {
    if (type == CUDA_R_64F) return epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (type == CUDA_R_16F || type == CUDA_R_16BF) return true;
    return epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_RELU ||
           epilogue == CUBLASLT_EPILOGUE_RELU_BIAS;
  }

  static int index(cudaDataType_t type, cublasComputeType_t compute) {
    switch (type) {
      case CUDA_R_64F:
        return 0;
      case CUDA_R_32F:
        return compute == CUBLAS_COMPUTE_32F_FAST_TF32 ? 5 : 1;
      case CUDA_R_16F:
        return 2;
      case CUDA_R_16BF:
        return 3;
      default:
        return 4;
    }
  }

  std::array<std::array<int8_t, kMask + 1>, 6> known_ = {};
};

}  // namespace fusedcuda
