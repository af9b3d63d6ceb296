// What the tests call: single products through a plan cache, and the steps of a linear layer, with
// Python in place of the kernels that are not cuBLASLt's.
#include <cstdio>
#include <exception>
#include <functional>

#include "bindings/linear_act_fp8_plan.h"
#include "bindings/linear_act_product.h"
#include "bindings/linear_act_run.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace fusedcuda;

namespace {

// 0, or 1 with the message.
int report_errors(char* error, size_t size, const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& exception) {
    std::snprintf(error, size, "%s", exception.what());
    return 1;
  }
}

cublasStatus_t run_plan(MatmulPlan& plan, const MatmulOperands& operands) {
  alignas(16) static thread_local char workspace[256];
  return plan.run(nullptr, operands, plan.workspace_bytes() > 0 ? workspace : nullptr, nullptr);
}

// ActRowsParams without what a test has no use for.
struct ActRowsCall {
  int dtype, activation, backward, saves;
  int64_t m, n, input_stride, output_stride;
  const void* input;
  void* output;
  void* saved;
};

struct ColumnSumsCall {
  ActRowsCall rows;
  int64_t batch;
  void* sums;
};

struct BiasRowsCall {
  int dtype;
  int64_t batch, m, n, bias_batch, stride, batch_stride;
  const void* bias;
  void* output;
};

struct OneOutputCall {
  int dtype, saves;
  int64_t rows, columns, dy_stride, x_stride, weight_step, dx_stride;
  const void *dy, *saved, *x, *weight;
  void *dx, *dweight, *dbias;
};

ActRowsCall call_of(const ActRowsParams& p) {
  return {static_cast<int>(p.dtype),
          static_cast<int>(p.activation),
          p.backward,
          static_cast<int>(p.saves),
          p.m,
          p.n,
          p.input.stride,
          p.output.stride,
          p.input.data,
          p.output.data,
          p.saved};
}

struct Callbacks {
  void (*act_rows)(const ActRowsCall*);
  void (*product)(const MatmulProblem*, const MatmulOperands*);
  void (*column_sums)(const ColumnSumsCall*);
  void (*quantize)(const Quantize*);
  void (*bias_rows)(const BiasRowsCall*);
  void (*one_output)(const OneOutputCall*);
};

struct Runner {
  const Callbacks& callbacks;
  DType dtype;

  cublasStatus_t matmul(MatmulPlan& plan, const MatmulOperands& operands) {
    return run_plan(plan, operands);
  }
  void hopper(const LinearActParams&, const GemmConfig&) {
    throw std::runtime_error("there is no GPU");
  }
  void hopper_bwd(const LinearActBwdParams&, const LinearActBwdConfig&) {
    throw std::runtime_error("there is no GPU");
  }
  void narrow(const LinearActParams&) { throw std::runtime_error("there is no GPU"); }
  void one_output_bwd(const OneOutputBwdParams& p, const OneOutputConfig&) {
    const OneOutputCall call = {static_cast<int>(p.dtype),
                                static_cast<int>(p.saves),
                                p.rows,
                                p.columns,
                                p.dy.stride,
                                p.x.stride,
                                p.weight_step,
                                p.dx.stride,
                                p.dy.data,
                                p.saved,
                                p.x.data,
                                p.weight,
                                p.dx.data,
                                p.dweight,
                                p.dbias};
    callbacks.one_output(&call);
  }
  void pad_rows(const PadRowsParams&) { throw std::runtime_error("there is no GPU"); }
  void dot_rows(const Matmul& matmul) { product(matmul); }
  void product(const Matmul& matmul) { callbacks.product(&matmul.problem, &matmul.operands); }
  void act_rows(const ActRowsParams& p) {
    const ActRowsCall call = call_of(p);
    callbacks.act_rows(&call);
  }
  void column_sums(const ColumnSumsParams& p, const ColumnSumsConfig&) {
    const ColumnSumsCall call = {call_of(p.rows), p.batch, p.sums};
    callbacks.column_sums(&call);
  }
  void quantize(const Quantize& quantize) { callbacks.quantize(&quantize); }
  void bias_rows(const BiasRows& b) {
    const BiasRowsCall call = {
        static_cast<int>(dtype), b.batch, b.m,          b.n, b.bias_batch, b.output.stride,
        b.output.batch_stride,   b.bias,  b.output.data};
    callbacks.bias_rows(&call);
  }
  void copy(const Copy& copy) { std::memcpy(copy.to, copy.from, copy.bytes); }
};

// What the kernels expect, and what a test has said.
EpilogueSupport& support() {
  static EpilogueSupport known;
  return known;
}

// A layer of few inputs has a kernel of ours, which is not here.
LinearBackend& backend() {
  static LinearBackend chosen = LinearBackend::kCublasLt;
  return chosen;
}

struct Output {
  char* text;
  size_t size;
};

// Runs what `plan` says and writes the steps as JSON, or the error.
template <typename Plan>
int run(PlanCache* cache, DType dtype, const Callbacks& callbacks, Output output,
        const Plan& plan) {
  return report_errors(output.text, output.size, [&] {
    PlanSource source;
    source.backend = backend();
    source.cache = cache;
    source.support = &support();
    Runner runner = {callbacks, dtype};
    const Steps steps = run_planned(plan, source, runner);
    std::snprintf(output.text, output.size, "%s", describe(steps).c_str());
  });
}

}  // namespace

// Of the library that is in use from now on.
EXPORT size_t version() { return CublasLt::get().get_version(); }

EXPORT void use_backend(int chosen) { backend() = static_cast<LinearBackend>(chosen); }

EXPORT void forget_support() { support() = EpilogueSupport(); }
EXPORT void set_support(int type, int compute, int epilogue, bool fused) {
  support().set(static_cast<cudaDataType_t>(type), static_cast<cublasComputeType_t>(compute),
                static_cast<cublasLtEpilogue_t>(epilogue), fused);
}

EXPORT PlanCache* cache_create(size_t capacity) { return new PlanCache(capacity); }
EXPORT void cache_destroy(PlanCache* cache) { delete cache; }
EXPORT size_t cache_size(const PlanCache* cache) { return cache->size(); }

// The status of cuBLASLt, -1 if it has no algorithm, or -2 with an error.
EXPORT int matmul(PlanCache* cache, const MatmulProblem* problem, const MatmulOperands* operands,
                  char* error, size_t size) {
  int status = -1;
  const int failed = report_errors(error, size, [&] {
    const std::shared_ptr<MatmulPlan> plan = cache->find({}, *problem);
    if (plan != nullptr) status = run_plan(*plan, *operands);
  });
  return failed ? -2 : status;
}

// The tile of the plan for a problem; that of cuBLASLt's candidate `number` is 20 + number.
EXPORT int plan_tile(PlanCache* cache, const MatmulProblem* problem) {
  return static_cast<int>(describe(cache->find({}, *problem)->algorithm()).tile);
}

// Chooses the candidate `number`, as it is written to a file and read back; -1: none.
EXPORT int choose(PlanCache* cache, const MatmulProblem* problem, int number) {
  std::optional<cublasLtMatmulAlgo_t> choice;
  if (number >= 0) {
    const auto found = find_algorithms({}, *problem, MatmulDescriptors(*problem), 8);
    if (number >= static_cast<int>(found.size())) return 1;
    choice = from_hex<cublasLtMatmulAlgo_t>(to_hex(&found[number].algo, sizeof(found[0].algo)));
    if (!choice) return 2;
  }
  cache->choose(*problem, choice);
  return 0;
}

EXPORT void name_tile(uint32_t tile, char* name, size_t size) {
  std::snprintf(name, size, "%s", tile_name(tile).c_str());
}

// Nanoseconds would drown in ctypes: the time of `count` hits.
EXPORT void find_again(PlanCache* cache, const MatmulProblem* problem, int count) {
  for (int i = 0; i < count; ++i) cache->find({}, *problem);
}

EXPORT int forward(PlanCache* cache, const LinearForward* f, const Callbacks* callbacks, char* text,
                   size_t size) {
  return run(cache, f->layer.dtype, *callbacks, {text, size},
             [&](const PlanSource& source) { return plan_forward(*f, source); });
}

EXPORT int backward(PlanCache* cache, const LinearBackward* b, const Callbacks* callbacks,
                    char* text, size_t size) {
  return run(cache, b->layer.dtype, *callbacks, {text, size},
             [&](const PlanSource& source) { return plan_backward(*b, source); });
}

EXPORT int mlp_backward(PlanCache* cache, const MlpBackward* mlp, const Callbacks* callbacks,
                        char* text, size_t size) {
  return run(cache, mlp->first.layer.dtype, *callbacks, {text, size},
             [&](const PlanSource& source) { return plan_mlp_backward(*mlp, source); });
}

EXPORT int fp8_forward(PlanCache* cache, const Fp8Forward* f, const Callbacks* callbacks,
                       char* text, size_t size) {
  return run(cache, f->linear.layer.dtype, *callbacks, {text, size},
             [&](const PlanSource& source) { return plan_fp8_forward(*f, source); });
}

EXPORT int product(PlanCache* cache, const LinearProduct* p, const Callbacks* callbacks, char* text,
                   size_t size) {
  return run(cache, p->linear.layer.dtype, *callbacks, {text, size},
             [&](const PlanSource& source) { return plan_product(*p, source); });
}
