// The steps that torch's operators make, on CPU tensors: the calls through its stable interface are
// those of the binding.
#include "bindings/linear_act_torch.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace fusedcuda;

namespace {

template <typename Body>
int report_errors(char* error, size_t size, const Body& body) {
  try {
    body(TorchSteps(aoti_torch_device_type_cpu(), 0));
    return 0;
  } catch (const std::exception& exception) {
    std::snprintf(error, size, "%s", exception.what());
    return 1;
  }
}

}  // namespace

EXPORT int product(const MatmulProblem* problem, const MatmulOperands* operands, char* error,
                   size_t size) {
  return report_errors(error, size,
                       [&](const TorchSteps& steps) { steps.product({*problem, *operands}); });
}

EXPORT int quantize(const Quantize* call, char* error, size_t size) {
  return report_errors(error, size, [&](const TorchSteps& steps) { steps.quantize(*call); });
}

EXPORT int bias_rows(const BiasRows* call, int dtype, char* error, size_t size) {
  return report_errors(error, size, [&](const TorchSteps& steps) {
    steps.bias_rows(*call, static_cast<DType>(dtype));
  });
}
