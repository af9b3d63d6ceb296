// What the fake cuBLASLt computes: descriptors as attributes, elements of every type, and the
// products with their epilogues, in double.
#pragma once

#include <cublasLt.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

namespace fake {

// --- Descriptors

using Attributes = std::map<int, std::vector<char>>;

struct Operation {
  cublasComputeType_t compute;
  cudaDataType_t scale;
  Attributes attributes;
};

struct Layout {
  cudaDataType_t type;
  int64_t rows, columns, stride;
  Attributes attributes;
};

struct Preference {
  Attributes attributes;
};

template <typename Value>
Value get(const Attributes& attributes, int attribute, Value otherwise) {
  const auto found = attributes.find(attribute);
  if (found == attributes.end()) return otherwise;
  Value value;
  std::memcpy(&value, found->second.data(), sizeof(value));
  return value;
}

inline cublasStatus_t store(Attributes& attributes, int attribute, const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  attributes[attribute].assign(bytes, bytes + size);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Real, typename Opaque>
const Real& real(const Opaque* opaque) {
  return *reinterpret_cast<const Real*>(opaque);
}

// --- Elements

inline double power(int exponent) { return std::ldexp(1.0, exponent); }

// Rounded to `bits` bits behind the leading one, to nearest even, as a number of least exponent
// `least` is.
inline double rounded(double value, int bits, int least) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent;
  std::frexp(value, &exponent);
  const double unit = power(std::max(exponent - 1, least) - bits);
  return std::nearbyint(value / unit) * unit;
}

inline double load(cudaDataType_t type, const char* base, int64_t index) {
  switch (type) {
    case CUDA_R_64F:
      return reinterpret_cast<const double*>(base)[index];
    case CUDA_R_32F:
      return reinterpret_cast<const float*>(base)[index];
    case CUDA_R_16F:
      return static_cast<double>(reinterpret_cast<const _Float16*>(base)[index]);
    case CUDA_R_16BF: {
      const uint32_t bits = uint32_t{reinterpret_cast<const uint16_t*>(base)[index]} << 16;
      float value;
      std::memcpy(&value, &bits, sizeof(value));
      return value;
    }
    default: {  // e4m3
      const uint8_t bits = reinterpret_cast<const uint8_t*>(base)[index];
      const int exponent = bits >> 3 & 15, fraction = bits & 7;
      if (exponent == 15 && fraction == 7) return NAN;
      const double size =
          exponent == 0 ? fraction * power(-9) : (8 + fraction) * power(exponent - 10);
      return bits & 128 ? -size : size;
    }
  }
}

inline void save(cudaDataType_t type, char* base, int64_t index, double value) {
  switch (type) {
    case CUDA_R_64F:
      reinterpret_cast<double*>(base)[index] = value;
      break;
    case CUDA_R_32F:
      reinterpret_cast<float*>(base)[index] = static_cast<float>(value);
      break;
    case CUDA_R_16F:
      reinterpret_cast<_Float16*>(base)[index] = static_cast<_Float16>(value);
      break;
    case CUDA_R_16BF: {
      const float single = static_cast<float>(rounded(value, 7, -126));
      uint32_t bits;
      std::memcpy(&bits, &single, sizeof(bits));
      reinterpret_cast<uint16_t*>(base)[index] = static_cast<uint16_t>(bits >> 16);
      break;
    }
    default: {  // e4m3, saturated
      const double size = std::fmin(std::fabs(rounded(value, 3, -6)), 448.0);
      uint8_t best = 0;
      for (int bits = 0; bits < 127; ++bits) {
        const char code = static_cast<char>(bits);
        if (load(CUDA_R_8F_E4M3, &code, 0) == size) best = static_cast<uint8_t>(bits);
      }
      reinterpret_cast<uint8_t*>(base)[index] = best | (value < 0 ? 128 : 0);
    }
  }
}

// The value that is left of one when it has been written and read.
inline double stored(cudaDataType_t type, double value) {
  char element[8];
  save(type, element, 0, value);
  return load(type, element, 0);
}

inline int size_of(cudaDataType_t type) {
  return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : type == CUDA_R_8F_E4M3 ? 1 : 2;
}

// --- Epilogues

constexpr double kAlpha = 0.79788456080286535588, kBeta = 0.044715;

inline double gelu(double z) { return 0.5 * z * (1 + std::tanh(kAlpha * (z + kBeta * z * z * z))); }

inline double gelu_slope(double z) {
  const double t = std::tanh(kAlpha * (z + kBeta * z * z * z));
  return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * kAlpha * (1 + 3 * kBeta * z * z);
}

// --- The product

class Product {
 public:
  Product(const Operation& operation, const Layout& a, const Layout& b, const Layout& c,
          const Layout& d)
      : operation_(operation), a_(a), b_(b), c_(c), d_(d) {}

  void run(double beta, const void* a, const void* b, const void* c, void* d) const {
    const int batch = get(d_.attributes, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 1);
    for (int i = 0; i < batch; ++i) {
      one(i, beta, at(a_, a, i), at(b_, b, i), at(c_, c, i), const_cast<char*>(at(d_, d, i)));
    }
  }

 private:
  const Attributes& attributes() const { return operation_.attributes; }

  static const char* at(const Layout& layout, const void* data, int batch) {
    const auto stride =
        get<int64_t>(layout.attributes, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 0);
    return static_cast<const char*>(data) + batch * stride * size_of(layout.type);
  }

  double scale(int attribute) const {
    const auto* value = get<const float*>(attributes(), attribute, nullptr);
    return value == nullptr ? 1 : *value;
  }

  static double element(const Layout& layout, const char* data, bool transposed, int64_t row,
                        int64_t column) {
    return load(layout.type, data,
                transposed ? column + row * layout.stride : row + column * layout.stride);
  }

  void one(int batch, double beta, const char* a, const char* b, const char* c, char* d) const {
    const bool ta = get(attributes(), CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N) != CUBLAS_OP_N;
    const bool tb = get(attributes(), CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N) != CUBLAS_OP_N;
    const int64_t m = d_.rows, n = d_.columns, k = ta ? a_.rows : a_.columns;
    const int epilogue = get(attributes(), CUBLASLT_MATMUL_DESC_EPILOGUE, 1);
    const cudaDataType_t bias_type = c_.type;
    char* bias = get<char*>(attributes(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr) +
                 batch * size_of(bias_type) *
                     get<int64_t>(attributes(), CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, 0);
    const double factor =
        scale(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) * scale(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
    // As on an H200: 16-bit products whose rows are not multiples of 16 bytes apart.
    const bool rounds =
        size_of(d_.type) == 2 && (m | k | a_.stride | b_.stride | d_.stride) % 8 != 0;
    std::vector<double> sums(m, 0.0);
    for (int64_t j = 0; j < n; ++j) {
      double sum_of_b = 0;
      for (int64_t l = 0; l < k; ++l) sum_of_b += element(b_, b, tb, l, j);
      if (epilogue == CUBLASLT_EPILOGUE_BGRADB) save(bias_type, bias, j, sum_of_b);
      for (int64_t i = 0; i < m; ++i) {
        double z = 0;
        for (int64_t l = 0; l < k; ++l) z += element(a_, a, ta, i, l) * element(b_, b, tb, l, j);
        z *= factor;
        if (beta != 0) z += beta * load(c_.type, c, i + j * c_.stride);
        if (epilogue & 4) z = (rounds ? stored(d_.type, z) : z) + load(bias_type, bias, i);
        const double y = finish(epilogue, batch, i, j, z);
        sums[i] += y;
        save(d_.type, d, i + j * d_.stride, y * scale(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER));
      }
    }
    if (epilogue & 16) {
      for (int64_t i = 0; i < m; ++i) save(bias_type, bias, i, sums[i]);
    }
  }

  double finish(int epilogue, int batch, int64_t i, int64_t j, double z) const {
    char* aux = get<char*>(attributes(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, nullptr);
    const auto stride = get<int64_t>(attributes(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 0);
    const int64_t index =
        batch * get<int64_t>(attributes(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, 0) +
        j * stride + i;
    char* byte = aux + index / 8;
    const int bit = static_cast<int>(index % 8);
    if (epilogue & 8) return *byte >> bit & 1 ? z : 0;
    if (epilogue & 64) return z * gelu_slope(load(d_.type, aux, index));
    if (epilogue & 2) {
      if (epilogue & 128) *byte = static_cast<char>((*byte & ~(1 << bit)) | (z >= 0) << bit);
      return z <= 0 ? 0 : z;
    }
    if (epilogue & 32) {
      if (epilogue & 128) save(d_.type, aux, index, z);
      return gelu(z);
    }
    return z;
  }

  const Operation& operation_;
  const Layout &a_, &b_, &c_, &d_;
};

}  // namespace fake
