// Plans of cuBLASLt: the descriptors of a problem, the algorithm that was chosen for it, and the
// call that runs it.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cublaslt_library.h"
#include "cublaslt_problem.h"

namespace fusedcuda {

// With what algorithms are looked for. NVIDIA recommends 32 MiB of workspace on Hopper.
struct MatmulContext {
  cublasLtHandle_t handle = nullptr;
  size_t workspace_limit = 32 << 20;
};

// --- Descriptors

inline cudaDataType_t scale_type(const MatmulProblem& problem) {
  return problem.compute == CUBLAS_COMPUTE_64F ? CUDA_R_64F : CUDA_R_32F;
}

// An output of 8 bits has no bias or c of its own type.
inline cudaDataType_t wide_output_type(const MatmulProblem& problem) {
  return problem.output_type == CUDA_R_8F_E4M3 ? CUDA_R_16BF : problem.output_type;
}

// The descriptors of a problem. cuBLASLt's matrices are column by column: our rows are its columns,
// its first factor is our b, and its output has n rows.
class MatmulDescriptors {
 public:
  explicit MatmulDescriptors(const MatmulProblem& p)
      : operation_(make_operation(p)),
        a_(make_layout(p, p.type, p.a_k_is_inner ? p.k : p.m, p.a_k_is_inner ? p.m : p.k,
                       p.a_stride, p.a_batch)),
        b_(make_layout(p, p.type, p.b_k_is_inner ? p.k : p.n, p.b_k_is_inner ? p.n : p.k,
                       p.b_stride, p.b_batch)),
        c_(make_layout(p, wide_output_type(p), p.n, p.m,
                       p.c_stride > 0 ? p.c_stride : p.output_stride,
                       p.c_stride > 0 ? p.c_batch : p.output_batch)),
        output_(make_layout(p, p.output_type, p.n, p.m, p.output_stride, p.output_batch)) {}

  cublasLtMatmulDesc_t operation() const { return operation_.get(); }
  cublasLtMatrixLayout_t a() const { return a_.get(); }
  cublasLtMatrixLayout_t b() const { return b_.get(); }
  cublasLtMatrixLayout_t c() const { return c_.get(); }
  cublasLtMatrixLayout_t output() const { return output_.get(); }

  template <typename Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) const {
    set(operation(), attribute, value);
  }

 private:
  struct Destroy {
    void operator()(cublasLtMatmulDesc_t desc) const { CublasLt::get().desc_destroy(desc); }
    void operator()(cublasLtMatrixLayout_t layout) const { CublasLt::get().layout_destroy(layout); }
  };
  using Operation = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy>;
  using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy>;

  template <typename Value>
  static void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                  const Value& value) {
    check_cublaslt(CublasLt::get().desc_set(desc, attribute, &value, sizeof(value)),
                   "an attribute of a matrix product");
  }

  static Operation make_operation(const MatmulProblem& p) {
    cublasLtMatmulDesc_t desc;
    check_cublaslt(CublasLt::get().desc_create(&desc, p.compute, scale_type(p)),
                   "to describe a matrix product");
    Operation operation(desc);
    set(desc, CUBLASLT_MATMUL_DESC_TRANSA, p.b_k_is_inner ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(desc, CUBLASLT_MATMUL_DESC_TRANSB, p.a_k_is_inner ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
    // The search for algorithms takes the alignment from these addresses and does not follow them.
    void* const aligned = reinterpret_cast<void*>(uintptr_t{16});
    if (uses_bias(p.epilogue)) {
      set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, aligned);
      set(desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, wide_output_type(p));
      if (p.batch > 1) set(desc, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, p.bias_batch);
    }
    if (uses_aux(p.epilogue)) {
      set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aligned);
      set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.aux_stride);
      if (p.batch > 1) set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, p.aux_batch);
    }
    if (p.scaled_factors) {
      set(desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, aligned);
      set(desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, aligned);
    }
    if (p.scaled_output) set(desc, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, aligned);
    return operation;
  }

  static Layout make_layout(const MatmulProblem& p, cudaDataType_t type, int64_t rows,
                            int64_t columns, int64_t stride, int64_t batch_stride) {
    const CublasLt& lt = CublasLt::get();
    cublasLtMatrixLayout_t layout;
    check_cublaslt(lt.layout_create(&layout, type, rows, columns, stride), "to describe a matrix");
    Layout owned(layout);
    if (p.batch > 1) {
      const int32_t batch = static_cast<int32_t>(p.batch);
      check_cublaslt(
          lt.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)),
          "a batch");
      check_cublaslt(lt.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                   &batch_stride, sizeof(batch_stride)),
                     "a batch's stride");
    }
    return owned;
  }

  Operation operation_;
  Layout a_, b_, c_, output_;
};

// --- Algorithms

// Why cuBLASLt is not asked: rules that it states, and where it is known to break silently.
inline const char* rule_against(const MatmulProblem& problem) {
  const cublasLtEpilogue_t epilogue = problem.epilogue;
  if (problem.m == 0 || problem.n == 0 || problem.k == 0)
    return "cuBLASLt multiplies no empty ones";
  if (problem.batch > INT32_MAX) return "more products than cuBLASLt counts";
  if (problem.type == CUDA_R_8F_E4M3) {
    const int64_t sizes = problem.n | problem.k | problem.a_stride | problem.b_stride |
                          problem.output_stride | problem.a_batch | problem.b_batch;
    const int32_t aligned = problem.a_alignment & problem.b_alignment & problem.output_alignment;
    if (sizes % 16 != 0 || aligned < 16 || !problem.a_k_is_inner || !problem.b_k_is_inner)
      return "8-bit factors need N, K, strides and addresses that are multiples of 16";
  }
  if (problem.type == CUDA_R_64F && epilogue != CUBLASLT_EPILOGUE_DEFAULT &&
      epilogue != CUBLASLT_EPILOGUE_BIAS)
    return "cuBLASLt has only the bias in an epilogue of float64";
  if (uses_aux(epilogue)) {
    const int64_t unit = uses_mask(epilogue) ? 128 : 8;
    if (problem.aux_stride % unit != 0 || problem.aux_batch % unit != 0)
      return "the rows of what is kept are no multiple of 8 elements apart";
  }
  // The address of a bias has to be aligned, and there is no preference to say that it is not
  // (pytorch#194497); here those of the later ones of a batch are not.
  const int64_t element = problem.output_type == CUDA_R_32F ? 4 : 2;
  if (problem.batch > 1 && uses_bias(epilogue) && problem.bias_batch * element % 16 != 0)
    return "the biases of a batch are not 16-byte aligned";
  // A sum over one output column has written beside it (apex#1392).
  if ((epilogue == CUBLASLT_EPILOGUE_BGRADB && problem.m == 1) ||
      (sums_output(epilogue) && problem.n == 1))
    return "a bias gradient of one element is summed apart";
  return nullptr;
}

// The statuses by which cuBLASLt says that it has no kernel for a problem.
inline bool means_unsupported(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
         status == CUBLAS_STATUS_ARCH_MISMATCH;
}

// The algorithms that cuBLASLt recommends, best first; none if it has none.
inline std::vector<cublasLtMatmulHeuristicResult_t> find_algorithms(
    const MatmulContext& context, const MatmulProblem& problem,
    const MatmulDescriptors& descriptors, int count) {
  const CublasLt& lt = CublasLt::get();
  struct Destroy {
    void operator()(cublasLtMatmulPreference_t p) const { CublasLt::get().preference_destroy(p); }
  };
  cublasLtMatmulPreference_t created;
  check_cublaslt(lt.preference_create(&created), "to look for algorithms");
  const std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy> preference(created);
  auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check_cublaslt(lt.preference_set(preference.get(), attribute, &value, sizeof(value)),
                   "a preference among algorithms");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{context.workspace_limit});
  // Partial sums in the output's type would be rounded before bias and activation are applied.
  const uint32_t exact = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      problem.low_precision_reduction ? uint32_t{CUBLASLT_REDUCTION_SCHEME_MASK} : exact);
  // cuBLASLt's first factor is our b.
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(problem.b_alignment));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(problem.a_alignment));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(problem.c_alignment));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(problem.output_alignment));

  std::vector<cublasLtMatmulHeuristicResult_t> found(count);
  int returned = 0;
  const cublasStatus_t status = lt.get_heuristic(
      context.handle, descriptors.operation(), descriptors.b(), descriptors.a(), descriptors.c(),
      descriptors.output(), preference.get(), count, found.data(), &returned);
  if (!means_unsupported(status)) check_cublaslt(status, "to look for algorithms");
  found.resize(status == CUBLAS_STATUS_SUCCESS ? returned : 0);
  auto failed = [](const auto& result) { return result.state != CUBLAS_STATUS_SUCCESS; };
  found.erase(std::remove_if(found.begin(), found.end(), failed), found.end());
  return found;
}

// What can be told of an algorithm.
struct AlgorithmTraits {
  int32_t id = 0;
  uint32_t tile = 0, stages = 0;  // cublasLtMatmulTile_t, cublasLtMatmulStages_t
  int32_t split_k = 1;
  uint32_t reduction = 0;
};

inline AlgorithmTraits describe(const cublasLtMatmulAlgo_t& algorithm) {
  AlgorithmTraits traits;
  auto get = [&](cublasLtMatmulAlgoConfigAttributes_t attribute, auto* value) {
    size_t written;
    check_cublaslt(CublasLt::get().algo_get(&algorithm, attribute, value, sizeof(*value), &written),
                   "to describe an algorithm");
  };
  get(CUBLASLT_ALGO_CONFIG_ID, &traits.id);
  get(CUBLASLT_ALGO_CONFIG_TILE_ID, &traits.tile);
  get(CUBLASLT_ALGO_CONFIG_STAGES_ID, &traits.stages);
  get(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &traits.split_k);
  get(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &traits.reduction);
  return traits;
}

// --- Plans

class MatmulPlan {
 public:
  // Null where cuBLASLt has no algorithm. `choice` is taken if cuBLASLt says that it fits.
  static std::shared_ptr<MatmulPlan> make(const MatmulContext& context,
                                          const MatmulProblem& problem,
                                          const std::optional<cublasLtMatmulAlgo_t>& choice) {
    if (rule_against(problem) != nullptr) return nullptr;
    auto plan = std::shared_ptr<MatmulPlan>(new MatmulPlan(problem));
    if (choice && plan->accept(context, *choice)) return plan;
    const auto found = find_algorithms(context, problem, plan->descriptors_, 1);
    if (found.empty()) return nullptr;
    plan->algorithm_ = found[0].algo;
    plan->workspace_bytes_ = found[0].workspaceSize;
    return plan;
  }

  size_t workspace_bytes() const { return workspace_bytes_; }
  const cublasLtMatmulAlgo_t& algorithm() const { return algorithm_; }
  bool tuned() const { return tuned_; }

  // Enqueues one product. Addresses that change from call to call belong to the descriptor, so
  // threads take turns.
  cublasStatus_t run(cublasLtHandle_t handle, const MatmulOperands& operands, void* workspace,
                     cudaStream_t stream) {
    static constexpr float kFloats[2] = {0, 1};
    static constexpr double kDoubles[2] = {0, 1};
    const bool is_double = scale_type(problem_) == CUDA_R_64F;
    auto factor = [&](int value) {
      return is_double ? static_cast<const void*>(&kDoubles[value]) : &kFloats[value];
    };
    const bool adds = problem_.c_stride > 0;
    // An unused c is not read; only outputs of its type may stand for it.
    const bool output_as_c = wide_output_type(problem_) == problem_.output_type;
    const void* c = adds ? operands.c : output_as_c ? operands.output : nullptr;

    const std::lock_guard<std::mutex> turn(mutex_);
    set_addresses(operands);
    return CublasLt::get().matmul(handle, descriptors_.operation(), factor(1), operands.b,
                                  descriptors_.b(), operands.a, descriptors_.a(), factor(adds), c,
                                  descriptors_.c(), operands.output, descriptors_.output(),
                                  &algorithm_, workspace, workspace_bytes_, stream);
  }

 private:
  explicit MatmulPlan(const MatmulProblem& problem) : problem_(problem), descriptors_(problem) {}

  bool accept(const MatmulContext& context, const cublasLtMatmulAlgo_t& choice) {
    cublasLtMatmulHeuristicResult_t result = {};
    const cublasStatus_t status = CublasLt::get().algo_check(
        context.handle, descriptors_.operation(), descriptors_.b(), descriptors_.a(),
        descriptors_.c(), descriptors_.output(), &choice, &result);
    if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > context.workspace_limit)
      return false;
    algorithm_ = choice;
    workspace_bytes_ = result.workspaceSize;
    tuned_ = true;
    return true;
  }

  void set_addresses(const MatmulOperands& operands) const {
    if (uses_bias(problem_.epilogue))
      descriptors_.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
    if (uses_aux(problem_.epilogue))
      descriptors_.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands.aux);
    if (problem_.scaled_factors) {
      descriptors_.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.b_scale);
      descriptors_.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.a_scale);
    }
    if (problem_.scaled_output)
      descriptors_.set(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, operands.output_scale);
  }

  MatmulProblem problem_;
  MatmulDescriptors descriptors_;
  cublasLtMatmulAlgo_t algorithm_ = {};
  size_t workspace_bytes_ = 0;
  bool tuned_ = false;
  std::mutex mutex_;
};

}  // namespace fusedcuda
