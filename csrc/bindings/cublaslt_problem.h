// A matrix product as cuBLASLt is asked for it: the problem, for which an algorithm is chosen, and
// the operands of one call. Everything is row by row here; MatmulDescriptors turns it into
// cuBLASLt's column by column.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "../kernels/common/activation.h"

namespace fusedcuda {

// output[m, n] = epilogue(sum_k a[m, k] * b[n, k] + c[m, n]), `batch` times. Strides are counted in
// elements. Plain bytes without padding, so that they are hash and key at once.
struct MatmulProblem {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  // Between rows of a factor if its k is inner, else between its values of k.
  int64_t a_stride = 0, b_stride = 0;
  int64_t c_stride = 0;  // 0: nothing is added
  int64_t output_stride = 0;
  int64_t aux_stride = 0;  // of ReLU's mask in bits
  // From one product of the batch to the next.
  int64_t a_batch = 0, b_batch = 0, c_batch = 0, output_batch = 0, bias_batch = 0, aux_batch = 0;
  int32_t a_k_is_inner = 1, b_k_is_inner = 1;
  cudaDataType_t type = CUDA_R_16BF;         // of a and b
  cudaDataType_t output_type = CUDA_R_16BF;  // and of c and bias, unless the output has 8 bits
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  // What is known of the addresses, in bytes, up to 16. Bias and aux have 16.
  int32_t a_alignment = 16, b_alignment = 16, c_alignment = 16, output_alignment = 16;
  int32_t scaled_factors = 0, scaled_output = 0;  // by one device float each
  int32_t low_precision_reduction = 0;            // partial sums of split-K in the output's type
  int32_t device = 0;

  bool operator==(const MatmulProblem& other) const {
    return std::memcmp(this, &other, sizeof(MatmulProblem)) == 0;
  }
};
static_assert(std::has_unique_object_representations_v<MatmulProblem>);

struct MatmulOperands {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* c = nullptr;
  void* output = nullptr;
  void* bias = nullptr;  // read, or the gradient that is written
  void* aux = nullptr;   // mask or pre-activation, written in the forward direction
  const void* a_scale = nullptr;
  const void* b_scale = nullptr;
  const void* output_scale = nullptr;
};

struct Matmul {
  MatmulProblem problem;
  MatmulOperands operands;
};

// --- Text

// Bytes as hexadecimal digits and back: how Python and tuning files name problems and algorithms.
inline std::string to_hex(const void* data, size_t size) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * size);
  for (size_t i = 0; i < size; ++i) {
    const unsigned char byte = static_cast<const unsigned char*>(data)[i];
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

inline std::optional<int> hex_digit(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  return std::nullopt;
}

// Nothing if `text` is not the hexadecimal form of a Value.
template <typename Value>
std::optional<Value> from_hex(const std::string& text) {
  static_assert(std::is_trivially_copyable_v<Value>);
  if (text.size() != 2 * sizeof(Value)) return std::nullopt;
  unsigned char bytes[sizeof(Value)];
  for (size_t i = 0; i < sizeof(Value); ++i) {
    const std::optional<int> high = hex_digit(text[2 * i]), low = hex_digit(text[2 * i + 1]);
    if (!high || !low) return std::nullopt;
    bytes[i] = static_cast<unsigned char>(*high << 4 | *low);
  }
  Value value;
  std::memcpy(&value, bytes, sizeof(Value));
  return value;
}

// --- Epilogues

// The bits that cuBLASLt's epilogues are made of.
constexpr int kAuxBit = 128;
constexpr int kReluGradientBit = 8;
constexpr int kBiasGradientBit = 16;
static_assert((CUBLASLT_EPILOGUE_RELU | kAuxBit | CUBLASLT_EPILOGUE_BIAS) ==
              CUBLASLT_EPILOGUE_RELU_AUX_BIAS);
static_assert((CUBLASLT_EPILOGUE_GELU | kAuxBit | CUBLASLT_EPILOGUE_BIAS) ==
              CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
static_assert((kReluGradientBit | kAuxBit) == CUBLASLT_EPILOGUE_DRELU);
static_assert((CUBLASLT_EPILOGUE_DGELU | kBiasGradientBit) == CUBLASLT_EPILOGUE_DGELU_BGRAD);

// act(z + bias), with what the gradient needs of z kept in aux; nothing if there is no such one.
inline std::optional<cublasLtEpilogue_t> forward_epilogue(Activation activation, bool has_bias,
                                                          bool keeps) {
  int bits = has_bias ? CUBLASLT_EPILOGUE_BIAS : 0;
  switch (activation) {
    case Activation::kNone:
      return has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    case Activation::kRelu:
      bits |= CUBLASLT_EPILOGUE_RELU;
      break;
    case Activation::kGeluTanh:
      bits |= CUBLASLT_EPILOGUE_GELU;
      break;
    default:
      return std::nullopt;
  }
  return static_cast<cublasLtEpilogue_t>(bits | (keeps ? kAuxBit : 0));
}

// z * act'(aux), with its sum over m in bias if wanted; nothing if there is no such one.
inline std::optional<cublasLtEpilogue_t> backward_epilogue(Activation activation, bool sums) {
  if (activation == Activation::kRelu)
    return sums ? CUBLASLT_EPILOGUE_DRELU_BGRAD : CUBLASLT_EPILOGUE_DRELU;
  if (activation == Activation::kGeluTanh)
    return sums ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU;
  return std::nullopt;
}

inline bool uses_aux(cublasLtEpilogue_t epilogue) { return epilogue & kAuxBit; }
inline bool uses_mask(cublasLtEpilogue_t epilogue) {
  return uses_aux(epilogue) && epilogue & (CUBLASLT_EPILOGUE_RELU | kReluGradientBit);
}
inline bool sums_output(cublasLtEpilogue_t epilogue) { return epilogue & kBiasGradientBit; }
inline bool uses_bias(cublasLtEpilogue_t epilogue) {
  return epilogue & (CUBLASLT_EPILOGUE_BIAS | kBiasGradientBit | CUBLASLT_EPILOGUE_BGRADB);
}
inline bool adds_bias(cublasLtEpilogue_t epilogue) { return epilogue & CUBLASLT_EPILOGUE_BIAS; }
inline bool has_activation(cublasLtEpilogue_t epilogue) {
  return epilogue & (CUBLASLT_EPILOGUE_RELU | CUBLASLT_EPILOGUE_GELU | kAuxBit);
}

inline const char* name_of(cublasLtEpilogue_t epilogue) {
  switch (epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
      return "DEFAULT";
    case CUBLASLT_EPILOGUE_BIAS:
      return "BIAS";
    case CUBLASLT_EPILOGUE_RELU:
      return "RELU";
    case CUBLASLT_EPILOGUE_RELU_BIAS:
      return "RELU_BIAS";
    case CUBLASLT_EPILOGUE_RELU_AUX:
      return "RELU_AUX";
    case CUBLASLT_EPILOGUE_RELU_AUX_BIAS:
      return "RELU_AUX_BIAS";
    case CUBLASLT_EPILOGUE_GELU:
      return "GELU";
    case CUBLASLT_EPILOGUE_GELU_BIAS:
      return "GELU_BIAS";
    case CUBLASLT_EPILOGUE_GELU_AUX:
      return "GELU_AUX";
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
      return "GELU_AUX_BIAS";
    case CUBLASLT_EPILOGUE_DRELU:
      return "DRELU";
    case CUBLASLT_EPILOGUE_DRELU_BGRAD:
      return "DRELU_BGRAD";
    case CUBLASLT_EPILOGUE_DGELU:
      return "DGELU";
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
      return "DGELU_BGRAD";
    case CUBLASLT_EPILOGUE_BGRADB:
      return "BGRADB";
    default:
      return "another";
  }
}

}  // namespace fusedcuda
