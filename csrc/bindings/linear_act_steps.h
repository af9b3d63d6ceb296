// Which kernels a linear layer and its gradient are made of: products of cuBLASLt with as much in
// their epilogues as it fuses, the hand-written product where it is faster, and elementwise kernels
// for the rest. Decisions only; linear_act.cpp runs the steps. No torch here.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "../kernels/linear_act_columns_config.h"
#include "../kernels/linear_act_config.h"
#include "cublaslt_plan_cache.h"
#include "cublaslt_support.h"
#include "linear_act_layer.h"

namespace fusedcuda {

// --- What is done

enum class StepKind {
  kMatmul,        // cuBLASLt
  kHopper,        // our own product, with everything in its epilogue
  kHopperBwd,     // likewise both products of the gradient
  kNarrow,        // our own product for a layer of few inputs, likewise
  kOneOutputBwd,  // all of the gradient of a layer of one output
  kProduct,       // torch's product and additions, for what cuBLASLt has no kernel
  kDotRows,       // our own product for a layer of one output
  kBiasRows,      // the bias in every row of the output, to which a product is then added
  kActRows,       // y = act(z), or dz = dy act'(z)
  kColumnSums,    // over the rows of dy, or of dz in the pass that makes it
  kQuantize,      // y / scale in 8 bits, by torch
  kCopy,          // of a bias, to an aligned address
  kPadRows,       // to rows that start at multiples of 16 bytes, or back
};

struct Copy {
  const void* from = nullptr;
  void* to = nullptr;
  size_t bytes = 0;
};

struct BiasRows {
  const void* bias = nullptr;
  int64_t bias_batch = 0;
  LinearMatrix output;
  int64_t batch = 1, m = 0, n = 0;
};

struct Quantize {
  const void* from = nullptr;  // bfloat16
  void* to = nullptr;          // float8_e4m3fn
  const void* scale = nullptr;
  int64_t count = 0;
};

struct Step {
  StepKind kind = StepKind::kMatmul;
  const char* what = "";      // is made
  const char* why = nullptr;  // it takes this step, if a fused one was thinkable
  Matmul matmul;              // kMatmul, kProduct, kDotRows
  std::shared_ptr<MatmulPlan> plan;
  LinearActParams hopper;  // kHopper, kNarrow
  GemmConfig config;
  LinearActBwdParams hopper_bwd;
  LinearActBwdConfig bwd_config;
  OneOutputBwdParams one_output;
  OneOutputConfig one_output_config;
  ActRowsParams rows;
  ColumnSumsParams sums;
  ColumnSumsConfig sums_config;
  BiasRows bias_rows;
  Copy copy;
  Quantize quantize;
  PadRowsParams pad;
};

using Steps = std::vector<Step>;

// Which products are taken where both can be had.
enum class LinearBackend { kMeasured, kHopper, kCublasLt };

// Where plans come from. Without a cache there is no device, and cuBLASLt is believed to have a
// kernel for whatever no rule speaks against.
struct PlanSource {
  LinearBackend backend = LinearBackend::kMeasured;
  PlanCache* cache = nullptr;
  MatmulContext context;
  const EpilogueSupport* support = nullptr;
  DeviceTraits device;

  // Why there is no such product, or null.
  const char* find(const MatmulProblem& problem, std::shared_ptr<MatmulPlan>* plan) const {
    if (const char* rule = rule_against(problem)) return rule;
    if (const char* rule = rounds_before_bias(problem)) return rule;
    if (!support->fuses(problem)) return "cuBLASLt is not known to fuse it";
    if (cache == nullptr) return nullptr;
    *plan = cache->find(context, problem);
    return *plan == nullptr ? "cuBLASLt has no algorithm for it" : nullptr;
  }
};

// --- Products

inline cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return CUDA_R_64F;
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kFloat16:
      return CUDA_R_16F;
    default:
      return CUDA_R_16BF;
  }
}

inline cublasComputeType_t compute_type(const LinearLayer& layer) {
  if (layer.dtype == DType::kFloat64) return CUBLAS_COMPUTE_64F;
  return layer.dtype == DType::kFloat32 && layer.allows_tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                             : CUBLAS_COMPUTE_32F;
}

inline int32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 16;
  return static_cast<int32_t>(bits & -bits);
}

// The distance of `lines` of `length` elements. The next line of a single one is nobody's, so it is
// said to lie where the copy engine likes it.
inline int64_t line_stride(int64_t stride, int64_t lines, int64_t length) {
  return lines > 1 ? stride : (length + 15) / 16 * 16;
}

// output (m x n) = a (m x k) times b (n x k) transposed.
inline Matmul product(const LinearLayer& layer, int64_t m, int64_t n, int64_t k,
                      const LinearFactor& a, const LinearFactor& b, const LinearMatrix& output) {
  Matmul result;
  MatmulProblem& p = result.problem;
  p.m = m;
  p.n = n;
  p.k = k;
  p.batch = layer.batch;
  p.type = p.output_type = cuda_type(layer.dtype);
  p.compute = compute_type(layer);
  p.low_precision_reduction = layer.low_precision_reduction;
  p.device = layer.device;
  auto stride_of = [&](const GemmFactor& factor, int64_t rows) {
    return factor.k_is_inner ? line_stride(factor.stride, rows, k)
                             : line_stride(factor.stride, k, rows);
  };
  p.a_k_is_inner = a.matrix.k_is_inner;
  p.b_k_is_inner = b.matrix.k_is_inner;
  p.a_stride = stride_of(a.matrix, m);
  p.b_stride = stride_of(b.matrix, n);
  p.output_stride = line_stride(output.stride, m, n);
  p.a_alignment = alignment_of(a.matrix.data);
  p.b_alignment = alignment_of(b.matrix.data);
  p.output_alignment = alignment_of(output.data);
  if (p.batch > 1) {
    p.a_batch = a.batch_stride;
    p.b_batch = b.batch_stride;
    p.output_batch = output.batch_stride;
  }
  result.operands.a = a.matrix.data;
  result.operands.b = b.matrix.data;
  result.operands.output = output.data;
  return result;
}

inline void add_c(Matmul& matmul, const LinearMatrix& c) {
  if (c.data == nullptr) return;
  MatmulProblem& p = matmul.problem;
  p.c_stride = line_stride(c.stride, p.m, p.n);
  if (p.batch > 1) p.c_batch = c.batch_stride;
  p.c_alignment = alignment_of(c.data);
  matmul.operands.c = c.data;
}

inline void add_bias(Matmul& matmul, void* bias, int64_t batch_stride) {
  if (matmul.problem.batch > 1) matmul.problem.bias_batch = batch_stride;
  matmul.operands.bias = bias;
}

// A bias or a residual is added to rows of one element each, of 16 bits. Measured on an H200
// (cuBLASLt 13.1): the product is rounded first, also where c is added by beta = 1. In batches that
// a launch cannot count there are none.
inline bool is_one_output(const Matmul& matmul) {
  const MatmulProblem& p = matmul.problem;
  const bool half = p.output_type == CUDA_R_16F || p.output_type == CUDA_R_16BF;
  const bool adds = adds_bias(p.epilogue) || matmul.operands.c != nullptr;
  return p.n == 1 && half && adds && p.type == p.output_type && p.batch <= 65535;
}

// What is kept of m x n values of z, or was.
inline void add_aux(Matmul& matmul, void* saved) {
  MatmulProblem& p = matmul.problem;
  p.aux_stride = uses_mask(p.epilogue) ? 8 * mask_row_bytes(p.n) : p.n;
  if (p.batch > 1) p.aux_batch = p.m * p.aux_stride;
  matmul.operands.aux = saved;
}

inline LinearMatrix contiguous_matrix(void* data, int64_t m, int64_t n) { return {data, n, m * n}; }

// --- Steps

class StepPlanner {
 public:
  explicit StepPlanner(const PlanSource& source) : source_(source) { steps_.reserve(6); }

  Steps take() { return std::move(steps_); }

  // The product if cuBLASLt has it with its epilogue. Otherwise null and why.
  Step* try_matmul(const char* what, const Matmul& matmul, const char** why = nullptr) {
    std::shared_ptr<MatmulPlan> plan;
    const char* reason = source_.find(matmul.problem, &plan);
    if (why != nullptr) *why = reason;
    if (reason != nullptr) return nullptr;
    Step& step = add(StepKind::kMatmul, what);
    step.matmul = matmul;
    step.plan = std::move(plan);
    return &step;
  }

  // The product in any case. The epilogue adds a bias at most; where it cannot, the output holds
  // the bias before, and where that cannot be either, torch multiplies and adds.
  void matmul(const char* what, const Matmul& matmul, const char* why = nullptr) {
    const MatmulProblem& p = matmul.problem;
    if (p.m == 0 || p.n == 0 || p.batch == 0) return;
    if (is_one_output(matmul)) {
      add(StepKind::kDotRows, what, "cuBLASLt rounds such a product before it adds").matmul =
          matmul;
      return;
    }
    const char* reason;
    if (Step* step = try_matmul(what, matmul, &reason)) {
      step->why = why;
      return;
    }
    if (try_on_bias_rows(what, matmul, reason)) {
      steps_.back().why = why;
      return;
    }
    Step& step = add(StepKind::kProduct, what, reason);
    step.matmul = matmul;
  }

  void act_rows(const char* what, const ActRowsParams& params, const char* why = nullptr) {
    if (params.m == 0 || params.n == 0) return;
    Step& step = add(StepKind::kActRows, what, why);
    step.rows = params;
    step.rows.dependent = source_.device.dependent_launch;
  }

  void column_sums(const char* what, const ColumnSumsParams& params, const char* why = nullptr) {
    if (params.batch == 0 || params.rows.n == 0) return;
    Step& step = add(StepKind::kColumnSums, what, why);
    step.sums = params;
    step.sums.rows.dependent = source_.device.dependent_launch;
    step.sums_config = choose_column_sums_config(params, source_.device);
  }

  void copy(const char* what, const Copy& copy, const char* why) {
    add(StepKind::kCopy, what, why).copy = copy;
  }

  // The bias of a layer where cuBLASLt can read it.
  void* aligned_bias(const LinearForward& f) {
    if (alignment_of(f.bias) >= 16) return f.bias;
    const int64_t elements = f.bias_batch > 0 ? f.layer.batch * f.layer.n : f.layer.n;
    copy("bias", {f.bias, f.aligned_bias, static_cast<size_t>(elements) * size_of(f.layer.dtype)},
         "cuBLASLt reads 16-byte aligned biases only");
    return f.aligned_bias;
  }

  void quantize(const char* what, const Quantize& quantize, const char* why) {
    add(StepKind::kQuantize, what, why).quantize = quantize;
  }

  // Our own products.
  void hopper(const char* what, const LinearActParams& params) {
    Step& step = add(StepKind::kHopper, what);
    step.hopper = params;
    step.config = choose_linear_act_config(params, source_.device);
  }
  void hopper(const char* what, const LinearActBwdParams& params) {
    Step& step = add(StepKind::kHopperBwd, what);
    step.hopper_bwd = params;
    step.bwd_config = choose_linear_act_bwd_config(params, source_.device);
  }

  void narrow(const char* what, const LinearActParams& params) {
    add(StepKind::kNarrow, what).hopper = params;
  }

  void one_output_bwd(const char* what, const OneOutputBwdParams& params) {
    Step& step = add(StepKind::kOneOutputBwd, what);
    step.one_output = params;
    step.one_output_config = choose_one_output_config(params, params.dtype, source_.device);
  }

  void pad_rows(const char* what, const PadRowsParams& params, const char* why) {
    Step& step = add(StepKind::kPadRows, what, why);
    step.pad = params;
    step.pad.dependent = source_.device.dependent_launch;
  }

  const PlanSource& source() const { return source_; }

 private:
  // Rows of the bias, and the product added to them: what both are is added up before it is
  // rounded.
  bool try_on_bias_rows(const char* what, const Matmul& matmul, const char* why) {
    if (matmul.operands.bias == nullptr || matmul.problem.c_stride > 0) return false;
    Matmul added = matmul;
    MatmulProblem& p = added.problem;
    p.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    p.bias_batch = 0;
    p.c_stride = p.output_stride;
    p.c_batch = p.output_batch;
    p.c_alignment = p.output_alignment;
    added.operands.bias = nullptr;
    added.operands.c = added.operands.output;
    std::shared_ptr<MatmulPlan> plan;
    if (source_.find(p, &plan) != nullptr) return false;
    const LinearMatrix output = {added.operands.output, p.output_stride, p.output_batch};
    add(StepKind::kBiasRows, "bias", why).bias_rows = {
        matmul.operands.bias, matmul.problem.bias_batch, output, p.batch, p.m, p.n};
    Step& step = add(StepKind::kMatmul, what);
    step.matmul = added;
    step.plan = std::move(plan);
    return true;
  }

  Step& add(StepKind kind, const char* what, const char* why = nullptr) {
    Step& step = steps_.emplace_back();
    step.kind = kind;
    step.what = what;
    step.why = why;
    return step;
  }

  const PlanSource& source_;
  Steps steps_;
};

}  // namespace fusedcuda
