// Host operators for fusedcuda/_cublaslt.py and _tune.py: what cuBLASLt has been asked for, which
// algorithms it has for that, and which of them to take. Problems and algorithms are named by
// hexadecimal digits.
#pragma once

#include <string>
#include <vector>

#include "linear_act_target.h"

namespace fusedcuda {

inline MatmulProblem parse_problem(const char* op, const std::string& text) {
  const auto problem = from_hex<MatmulProblem>(text);
  if (!problem) fail(op, ": problem must be one of those of cublaslt_problems(); got ", text);
  return *problem;
}

inline cublasLtMatmulAlgo_t parse_algorithm(const char* op, const std::string& text) {
  const auto algorithm = from_hex<cublasLtMatmulAlgo_t>(text);
  if (!algorithm) fail(op, ": algorithm must be one of those of cublaslt_candidates(); got ", text);
  return *algorithm;
}

inline int64_t cublaslt_version() { return static_cast<int64_t>(CublasLt::get().get_version()); }

// What was measured of an epilogue on products of a cudaDataType_t and a cublasComputeType_t.
inline void cublaslt_fuses(int64_t type, int64_t compute, int64_t epilogue, bool fused) {
  epilogue_support().set(static_cast<cudaDataType_t>(type),
                         static_cast<cublasComputeType_t>(compute),
                         static_cast<cublasLtEpilogue_t>(epilogue), fused);
}

inline int64_t bytes_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_64F:
      return 8;
    case CUDA_R_32F:
      return 4;
    case CUDA_R_8F_E4M3:
      return 1;
    default:
      return 2;
  }
}

// Bytes of the operands, in the order in which cublaslt_run() takes them; 0 of those not used.
inline std::vector<int64_t> operand_bytes(const MatmulProblem& p) {
  auto spanned = [&](int64_t lines, int64_t stride, int64_t batch_stride, int64_t length) {
    return (p.batch - 1) * batch_stride + (lines - 1) * stride + length;
  };
  auto factor = [&](bool k_is_inner, int64_t rows, int64_t stride, int64_t batch_stride) {
    return k_is_inner ? spanned(rows, stride, batch_stride, p.k)
                      : spanned(p.k, stride, batch_stride, rows);
  };
  const int64_t element = bytes_of(p.type), written = bytes_of(p.output_type);
  const int64_t wide = bytes_of(wide_output_type(p));
  const int64_t aux = spanned(p.m, p.aux_stride, p.aux_batch, p.n);
  // A sum over k has an element for every row.
  const int64_t bias = p.epilogue == CUBLASLT_EPILOGUE_BGRADB ? p.m : p.n;
  return {
      element * factor(p.a_k_is_inner, p.m, p.a_stride, p.a_batch),
      element * factor(p.b_k_is_inner, p.n, p.b_stride, p.b_batch),
      p.c_stride > 0 ? wide * spanned(p.m, p.c_stride, p.c_batch, p.n) : 0,
      written * spanned(p.m, p.output_stride, p.output_batch, p.n),
      uses_bias(p.epilogue) ? wide * ((p.batch - 1) * p.bias_batch + bias) : 0,
      !uses_aux(p.epilogue)   ? 0
      : uses_mask(p.epilogue) ? (aux + 127) / 128 * 16
                              : written * aux,
  };
}

// The problems of the current device that have a plan, most recent first, as a JSON list.
inline std::string cublaslt_problems() {
  int32_t device;
  check_shim(aoti_torch_get_current_device_index(&device), "the current device");
  std::string json;
  for (MatmulProblem p : plan_cache().problems()) {
    if (p.device != device) continue;
    p.device = 0;
    const std::vector<int64_t> bytes = operand_bytes(p);
    json +=
        concat(json.empty() ? "" : ", ", "{\"problem\": \"", to_hex(&p, sizeof(p)),
               "\", \"m\": ", p.m, ", \"n\": ", p.n, ", \"k\": ", p.k, ", \"batch\": ", p.batch,
               ", \"type\": ", static_cast<int>(p.type), ", \"epilogue\": \"", name_of(p.epilogue),
               "\", \"bytes\": [", join(bytes.size(), [&](int64_t i) { return bytes[i]; }), "]}");
  }
  return concat("[", json, "]");
}

// The best `count` algorithms for a problem on the current device in cuBLASLt's order, as a JSON
// list; none for one that is never run.
inline std::string cublaslt_candidates(std::string problem, int64_t count) {
  const MatmulProblem parsed = parse_problem("cublaslt_candidates", problem);
  if (rule_against(parsed) != nullptr) return "[]";
  int32_t device;
  check_shim(aoti_torch_get_current_device_index(&device), "the current device");
  const PlanSource source = current_plan_source(device);
  const auto found =
      find_algorithms(source.context, parsed, MatmulDescriptors(parsed), static_cast<int>(count));
  auto candidate = [&](int64_t i) {
    const AlgorithmTraits traits = describe(found[i].algo);
    return concat("{\"algorithm\": \"", to_hex(&found[i].algo, sizeof(found[i].algo)),
                  "\", \"id\": ", traits.id, ", \"tile\": \"", tile_name(traits.tile),
                  "\", \"stages\": ", traits.stages, ", \"split_k\": ", traits.split_k,
                  ", \"workspace_bytes\": ", found[i].workspaceSize, "}");
  };
  return concat("[", join(found.size(), candidate), "]");
}

// Enqueues the product of a problem once with an algorithm (an empty one: cuBLASLt's
// recommendation). `operands`: bytes, as many of each as
// cublaslt_problems() says, and a workspace at the end; a scale if there is one is 1.
inline void cublaslt_run(std::string problem, std::string algorithm, std::vector<Tensor> operands) {
  constexpr const char* kOp = "cublaslt_run";
  const MatmulProblem parsed = parse_problem(kOp, problem);
  const std::vector<int64_t> bytes = operand_bytes(parsed);
  if (operands.size() != bytes.size() + 1)
    fail(kOp, ": operands must be ", bytes.size() + 1, " tensors; got ", operands.size());
  std::vector<void*> data;
  for (size_t i = 0; i < operands.size(); ++i) {
    const View view(operands[i]);
    int64_t size = 1;
    for (int64_t d = 0; d < view.dim; ++d) size *= view.sizes[d];
    if (view.dtype != aoti_torch_dtype_uint8() || !view.is_contiguous() || view.on_cpu() ||
        (i < bytes.size() && size < bytes[i]))
      fail(kOp, ": operand ", i, " must be at least ", i < bytes.size() ? bytes[i] : 0,
           " bytes on a CUDA device");
    data.push_back(view.data);
  }
  const int32_t device = View(operands[0]).device_index;
  const DeviceScope scope(device);
  const PlanSource source = current_plan_source(device);
  std::optional<cublasLtMatmulAlgo_t> choice;
  if (!algorithm.empty()) choice = parse_algorithm(kOp, algorithm);
  const auto plan = MatmulPlan::make(source.context, parsed, choice);
  if (plan == nullptr || plan->tuned() != choice.has_value())
    fail(kOp, ": cuBLASLt refuses this ", algorithm.empty() ? "problem" : "algorithm");
  MatmulOperands pointers;
  pointers.a = data[0];
  pointers.b = data[1];
  pointers.c = data[2];
  pointers.output = data[3];
  pointers.bias = data[4];
  pointers.aux = data[5];
  check_cublaslt(plan->run(source.context.handle, pointers, data[6], current_stream(device)),
                 "a matrix product");
}

// The algorithm for a problem from now on; an empty one goes back to cuBLASLt's recommendation.
inline void cublaslt_choose(std::string problem, std::string algorithm) {
  std::optional<cublasLtMatmulAlgo_t> choice;
  if (!algorithm.empty()) choice = parse_algorithm("cublaslt_choose", algorithm);
  plan_cache().choose(parse_problem("cublaslt_choose", problem), choice);
}

}  // namespace fusedcuda
