// A cuBLASLt for tests without a GPU: the functions that fusedcuda uses, on host memory. It insists
// on what the real one demands or silently assumes.
#include <mutex>
#include <set>
#include <string>

#include "fake_product.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace fake;

namespace {

// --- What a test may ask for

std::mutex mutex;
std::set<int> without_algorithm, fails_when_run;  // epilogues
int searches = 0, products = 0;
std::string mistake;

// --- Checks

// An algorithm remembers what it was recommended for.
struct Algorithm {
  uint64_t magic, number, workspace;
  uint32_t alignments[4];
  uint64_t rest[3];
};
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
constexpr uint64_t kMagic = 0x6675736564;

std::string check_shapes(const Operation& operation, const Layout& a, const Layout& b,
                         const Layout& c, const Layout& d) {
  const bool ta =
      get(operation.attributes, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N) != CUBLAS_OP_N;
  const bool tb =
      get(operation.attributes, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N) != CUBLAS_OP_N;
  const int64_t m = ta ? a.columns : a.rows, k = ta ? a.rows : a.columns;
  const int64_t n = tb ? b.rows : b.columns;
  if ((tb ? b.columns : b.rows) != k) return "the factors differ in k";
  if (d.rows != m || d.columns != n || c.rows != m || c.columns != n) return "shape of c or d";
  if (a.type != b.type) return "types of the factors";
  const bool fp8 = a.type == CUDA_R_8F_E4M3;
  if (fp8 && (!ta || tb || k % 16 != 0 || m % 16 != 0)) return "fp8 wants TN and multiples of 16";
  const bool eight_out = d.type == CUDA_R_8F_E4M3;
  if (c.type != (eight_out ? CUDA_R_16BF : d.type)) return "type of c";
  // Of NVIDIA's table of types: factors of 16 bits may also give float32.
  const bool half = a.type == CUDA_R_16F || a.type == CUDA_R_16BF;
  if (!fp8 && a.type != d.type && !(half && d.type == CUDA_R_32F)) return "type of d";
  for (const Layout* layout : {&a, &b, &c, &d}) {
    if (layout->stride < layout->rows) return "a leading dimension is below the rows";
    if (get(layout->attributes, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 1) !=
        get(d.attributes, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 1))
      return "the batches differ";
  }
  const bool is_double = a.type == CUDA_R_64F;
  if (is_double != (operation.compute == CUBLAS_COMPUTE_64F)) return "compute type";
  if (operation.scale != (is_double ? CUDA_R_64F : CUDA_R_32F)) return "scale type";

  const Attributes& attributes = operation.attributes;
  const int epilogue = get(attributes, CUBLASLT_MATMUL_DESC_EPILOGUE, 1);
  if (is_double && epilogue != CUBLASLT_EPILOGUE_DEFAULT && epilogue != CUBLASLT_EPILOGUE_BIAS)
    return "epilogue of float64";
  if (epilogue & (4 | 16 | 512)) {
    const auto bias = get<uintptr_t>(attributes, CUBLASLT_MATMUL_DESC_BIAS_POINTER, 0);
    if (bias == 0 || bias % 16 != 0) return "a bias must be 16-byte aligned";
    const int type = get<int>(attributes, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, -1);
    if (type != (eight_out ? CUDA_R_16BF : d.type)) return "type of the bias";
  }
  if (epilogue & 128) {
    const int64_t unit = epilogue & (2 | 8) ? 128 : 8;
    const auto stride = get<int64_t>(attributes, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 0);
    const auto batch = get<int64_t>(attributes, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, 0);
    const auto aux = get<uintptr_t>(attributes, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, 0);
    if (stride % unit != 0 || batch % unit != 0 || stride < d.rows) return "stride of aux";
    if (aux == 0 || aux % 16 != 0) return "address of aux";
  }
  return "";
}

template <typename Descriptor, typename Opaque, typename... Values>
cublasStatus_t create(Opaque** opaque, Values... values) {
  *opaque = reinterpret_cast<Opaque*>(new Descriptor{values..., {}});
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Descriptor, typename Opaque>
cublasStatus_t destroy(Opaque* opaque) {
  delete reinterpret_cast<Descriptor*>(opaque);
  return CUBLAS_STATUS_SUCCESS;
}

bool aligned(const void* address, uint32_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

}  // namespace

// --- For tests

EXPORT void fake_reset() {
  without_algorithm.clear();
  fails_when_run.clear();
  searches = products = 0;
  mistake.clear();
}
EXPORT void fake_without_algorithm(int epilogue) { without_algorithm.insert(epilogue); }
EXPORT void fake_fails_when_run(int epilogue) { fails_when_run.insert(epilogue); }
EXPORT int fake_searches() { return searches; }
EXPORT int fake_products() { return products; }
EXPORT const char* fake_mistake() { return mistake.c_str(); }

// --- cuBLASLt

EXPORT size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
EXPORT const char* cublasLtGetStatusString(cublasStatus_t) { return mistake.c_str(); }

EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  return create<Operation>(desc, compute, scale);
}
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  return destroy<Operation>(desc);
}
EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                                     cublasLtMatmulDescAttributes_t attribute,
                                                     const void* data, size_t size) {
  return store(reinterpret_cast<Operation*>(desc)->attributes, attribute, data, size);
}
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t stride) {
  return create<Layout>(layout, type, static_cast<int64_t>(rows), static_cast<int64_t>(columns),
                        stride);
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return destroy<Layout>(layout);
}
EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                       cublasLtMatrixLayoutAttribute_t attribute,
                                                       const void* data, size_t size) {
  return store(reinterpret_cast<Layout*>(layout)->attributes, attribute, data, size);
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return create<Preference>(preference);
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy<Preference>(preference);
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
    const void* data, size_t size) {
  return store(reinterpret_cast<Preference*>(preference)->attributes, attribute, data, size);
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
    int wanted, cublasLtMatmulHeuristicResult_t* results, int* returned) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++searches;
  *returned = 0;
  const Operation& operation = real<Operation>(desc);
  mistake =
      check_shapes(operation, real<Layout>(a), real<Layout>(b), real<Layout>(c), real<Layout>(d));
  if (!mistake.empty()) return CUBLAS_STATUS_INVALID_VALUE;
  if (without_algorithm.count(get(operation.attributes, CUBLASLT_MATMUL_DESC_EPILOGUE, 1)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  const Attributes& preferences = real<Preference>(preference).attributes;
  const auto limit = get<uint64_t>(preferences, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 0);
  for (; *returned < wanted && *returned < 3; ++*returned) {
    cublasLtMatmulHeuristicResult_t& result = results[*returned];
    Algorithm algorithm = {kMagic, static_cast<uint64_t>(*returned), 0, {}, {}};
    algorithm.workspace = *returned == 0 ? std::min<uint64_t>(limit, 256) : 0;
    for (int i = 0; i < 4; ++i) {
      algorithm.alignments[i] =
          get<uint32_t>(preferences, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES + i, 256);
    }
    std::memcpy(&result.algo, &algorithm, sizeof(algorithm));
    result.workspaceSize = algorithm.workspace;
    result.state = CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              const cublasLtMatmulAlgo_t* choice,
                                              cublasLtMatmulHeuristicResult_t* result) {
  Algorithm algorithm;
  std::memcpy(&algorithm, choice, sizeof(algorithm));
  if (algorithm.magic != kMagic) return CUBLAS_STATUS_NOT_SUPPORTED;
  result->workspaceSize = algorithm.workspace;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(
    const cublasLtMatmulAlgo_t* choice, cublasLtMatmulAlgoConfigAttributes_t attribute, void* data,
    size_t size, size_t* written) {
  Algorithm algorithm;
  std::memcpy(&algorithm, choice, sizeof(algorithm));
  const uint32_t value = attribute == CUBLASLT_ALGO_CONFIG_ID        ? 66
                         : attribute == CUBLASLT_ALGO_CONFIG_TILE_ID ? 20 + algorithm.number
                                                                     : 1;
  std::memcpy(data, &value, size);
  *written = size;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha,
                                     const void* a, cublasLtMatrixLayout_t a_desc, const void* b,
                                     cublasLtMatrixLayout_t b_desc, const void* beta, const void* c,
                                     cublasLtMatrixLayout_t c_desc, void* d,
                                     cublasLtMatrixLayout_t d_desc,
                                     const cublasLtMatmulAlgo_t* choice, void* workspace,
                                     size_t workspace_bytes, cudaStream_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Operation& operation = real<Operation>(desc);
  const Layout &la = real<Layout>(a_desc), &lb = real<Layout>(b_desc), &lc = real<Layout>(c_desc),
               &ld = real<Layout>(d_desc);
  mistake = check_shapes(operation, la, lb, lc, ld);
  Algorithm algorithm = {};
  if (choice != nullptr) std::memcpy(&algorithm, choice, sizeof(algorithm));
  const double factors[2] = {load(operation.scale, static_cast<const char*>(alpha), 0),
                             load(operation.scale, static_cast<const char*>(beta), 0)};
  if (algorithm.magic != kMagic) {
    mistake = "no algorithm";
  } else if (workspace_bytes < algorithm.workspace ||
             (algorithm.workspace > 0 && (workspace == nullptr || !aligned(workspace, 16)))) {
    mistake = "workspace";
  } else if (!aligned(a, algorithm.alignments[0]) || !aligned(b, algorithm.alignments[1]) ||
             (factors[1] != 0 && !aligned(c, algorithm.alignments[2])) ||
             !aligned(d, algorithm.alignments[3])) {
    mistake = "an address is less aligned than was said";
  } else if (factors[0] != 1) {
    mistake = "alpha";
  }
  if (!mistake.empty()) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (fails_when_run.count(get(operation.attributes, CUBLASLT_MATMUL_DESC_EPILOGUE, 1)))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  if (algorithm.workspace > 0) std::memset(workspace, 0xff, algorithm.workspace);
  ++products;
  Product(operation, la, lb, lc, ld).run(factors[1], a, b, c, d);
  return CUBLAS_STATUS_SUCCESS;
}
